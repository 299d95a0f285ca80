"""The KV pool and how its bytes are addressed, laid out and compressed."""
