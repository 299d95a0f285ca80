"""The compute-bound role: chunked prefill, first token, KV export."""
