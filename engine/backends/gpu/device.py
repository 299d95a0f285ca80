"""The few things that CUDA has and a CPU tensor lacks: pinned memory, events, graphs.

``HostDevice`` has their plain equivalents, so that everything above runs on CPU tensors in Triton's
interpreter, through the same buffers and in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in the device's order of work."""

    def has_passed(self) -> bool:
        """Whether ``wait`` would return at once."""
        ...

    def wait(self) -> None:
        """Block until the device has passed it; other threads run meanwhile."""
        ...


class Device(Protocol):
    """Where kernels run. Work is launched from one thread, and runs in the order of its launch."""

    torch_device: torch.device
    compiles: bool
    """Whether the first launch of a kind takes seconds."""

    @property
    def num_processors(self) -> int:
        """Streaming multiprocessors."""
        ...

    def use(self) -> None:
        """Launch what follows in the calling thread here."""
        ...

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8 of host memory that the device copies from and to by itself."""
        ...

    def record(self) -> Event:
        """Mark what has been launched so far."""
        ...

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record the launches of ``run``, so that the result repeats them as one.

        Every tensor that it reads or writes keeps its place; what it allocates is overwritten by
        the next capture's replay, so nothing allocated within may be read outside.
        """
        ...


class CudaDevice:
    """Implements ``Device`` on the current stream of one GPU."""

    compiles = True

    def __init__(self, index: int = 0) -> None:
        """One of those that CUDA sees."""
        self.torch_device = torch.device("cuda", index)
        self.use()
        self._graph_memory: Any = None

    @property
    def num_processors(self) -> int:
        return int(torch.cuda.get_device_properties(self.torch_device).multi_processor_count)

    def use(self) -> None:
        """See Device: a thread begins with the first GPU as its own."""
        torch.cuda.set_device(self.torch_device)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def record(self) -> Event:
        return _CudaEvent()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        if self._graph_memory is None:
            self._graph_memory = torch.cuda.graph_pool_handle()
        # On a stream of its own first: what libraries allocate at their first use there must not
        # become part of the graph.
        side = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream(self.torch_device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (the data plane's) may call CUDA meanwhile.
        with torch.cuda.graph(
            graph, pool=self._graph_memory, stream=side, capture_error_mode="thread_local"
        ):
            run()
        return graph.replay


class _CudaEvent:
    def __init__(self) -> None:
        # Blocking: the waiting thread leaves its core to those that pass tokens on.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def has_passed(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()


class HostDevice:
    """Implements ``Device`` with CPU tensors: launching is computing."""

    torch_device = torch.device("cpu")
    compiles = False
    num_processors = 4

    def use(self) -> None:
        """Nothing: there is one."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def record(self) -> Event:
        return _Passed()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See Device; replaying is running."""
        return run


class _Passed:
    def has_passed(self) -> bool:
        return True

    def wait(self) -> None:
        pass
