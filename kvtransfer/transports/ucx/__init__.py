"""Over UCX, through NIXL."""
