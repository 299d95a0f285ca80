"""Ranks 1, 2, … of a tensor-parallel worker: their processes, and how rank 0 leads them."""
