"""The bandwidth-bound role: KV import, continuous batching, token stream."""
