"""How many KV blocks a GPU has room for."""
