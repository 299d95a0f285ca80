"""What every pdmesh process shares: messages, codec, links, registry, config, metrics, errors."""
