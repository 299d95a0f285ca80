"""GPU backend: Triton kernels over a paged KV cache.

Never imported on a start without a GPU: Triton is no part of the CPU runtime's lock file.
"""

import os

# Triton asks to choose. Multiply-adds round once, which is faster and no less exact.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
