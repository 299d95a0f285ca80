"""What makes KV blocks ready to leave the GPU, and takes them up again."""
