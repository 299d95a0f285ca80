"""The inference engine both worker roles share: models, paged KV cache, kernels, scheduling."""
