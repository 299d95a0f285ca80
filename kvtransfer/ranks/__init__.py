"""A transfer between tensor-parallel workers: one per pair of ranks, joined into one."""
