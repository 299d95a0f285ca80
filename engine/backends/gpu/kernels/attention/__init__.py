"""Attention over the paged KV cache, and what writes K and V into it."""
