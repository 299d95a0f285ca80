"""One Triton kernel (or one tight group) per file.

Each file has the kernel, a launcher that neither waits for the device nor allocates what it is
given, a plain torch ``reference`` for the tests, and ``variants()``: what the product launches, for
``engine.backends.gpu.compile_check``. Kernels run on CPU tensors under TRITON_INTERPRET=1.
"""

import functools
import importlib
import pkgutil
from types import ModuleType


@functools.cache
def modules() -> dict[str, ModuleType]:
    """The kernels' files, imported, by name alone and in the order of it."""
    found = [x.name for x in pkgutil.walk_packages(__path__, f"{__name__}.") if not x.ispkg]
    by_name = {name.rpartition(".")[2]: name for name in found}
    return {name: importlib.import_module(by_name[name]) for name in sorted(by_name)}
