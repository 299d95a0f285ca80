"""GPU backend: Triton kernels over a paged KV cache.

Never imported on a start without a GPU: Triton is no part of the CPU runtime's lock file.
"""
