"""One Triton kernel (or one tight group) per file.

Each file has the kernel, a launcher that neither waits for the device nor allocates what it is
given, a plain torch ``reference`` for the tests, and ``variants()``: what the product launches, for
``engine.backends.gpu.compile_check``. Kernels run on CPU tensors under TRITON_INTERPRET=1.
"""
