"""One NIXL agent with the pool registered, which can be destroyed at a known moment."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from typing import Any

from kvtransfer.errors import TransportError
from kvtransfer.memory.pool import BlockMemory
from kvtransfer.transports.ucx.library import NixlLibrary


def memory_kind(is_host: bool) -> str:
    return "DRAM" if is_host else "VRAM"


class NixlAgent:
    """One NIXL agent with the pool registered at ``base``. ``destroy`` ends everything it does."""

    def __init__(self, nixl: NixlLibrary, name: str, memory: BlockMemory, base: int) -> None:
        self._nixl = nixl
        self.handle: Any = nixl.make_agent(name)
        self.kind = memory_kind(memory.is_host)
        region = [(base, memory.num_bytes, memory.device_id, "")]
        try:
            self._registration: Any = self.handle.register_memory(region, self.kind)
        except nixl.errors as error:
            raise TransportError(f"could not register the KV pool: {error}") from error

    def destroy(self) -> bool:
        """End it now; False if something still refers to it, so that it lives on."""
        if self.handle is None:
            return True
        reference = weakref.ref(self.handle.agent)
        with suppress(*self._nixl.errors):  # the agent goes next, and its registration with it
            self.handle.deregister_memory(self._registration)
        # The last references: NIXL destroys the agent here.
        self.handle = self._registration = None
        if reference() is not None:
            gc.collect()  # a frame in somebody's traceback, most likely
        return reference() is None
