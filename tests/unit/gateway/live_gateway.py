"""A gateway with scripted workers in a thread of its own, for clients that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.prompts.served_model import ServedModel
from tests.unit.gateway.scripted_cluster import Script, ScriptedCluster


@contextmanager
def live_gateway(
    model: ServedModel, script: Script, *, max_model_len: int
) -> Iterator[ScriptedCluster]:
    """Serve until the block is left."""
    cluster: list[ScriptedCluster] = []
    ready = threading.Event()
    stop: list[asyncio.Event] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        stop.append(asyncio.Event())
        scripted = ScriptedCluster(model)
        await scripted.start()
        await scripted.pair(script, max_model_len=max_model_len)
        await scripted.show_all()
        cluster.append(scripted)
        ready.set()
        await stop[0].wait()
        await scripted.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="live-gateway")
    thread.start()
    try:
        assert ready.wait(10)
        yield cluster[0]
    finally:
        loops[0].call_soon_threadsafe(stop[0].set)
        thread.join(10)
        assert not thread.is_alive()
