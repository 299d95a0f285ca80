"""Blocks of the paged KV cache, and which of them hold a known prefix."""
