"""The end of a worker in good order: no new work, and time for what runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from mesh.registry.keys import LOAD_INTERVAL_S
from mesh.worker_info import LoadSnapshot

QUIET_S = 3 * LOAD_INTERVAL_S
"""Without work for this long a worker is done: the gateways have heard of the end by then, and
what they sent before they had is here."""

_POLL_S = 0.05

_logger = logging.getLogger(__name__)


async def drain(
    load: Callable[[], LoadSnapshot], timeout_s: float, *, quiet_s: float = QUIET_S
) -> bool:
    """Wait until nothing runs, waits or is transferred any more.

    Args:
        load: the current load; it must say ``draining`` already, so that routers send nothing new.
        timeout_s: longest wait.
        quiet_s: how long there must have been nothing.

    Returns:
        Whether all work ended in time; what did not is replayed elsewhere by its gateway.
    """
    now_s = time.monotonic()
    deadline_s, quiet_since_s = now_s + timeout_s, now_s
    while now_s < deadline_s:
        held = load()
        if held.running or held.waiting or held.open_transfers:
            quiet_since_s = now_s
        elif now_s - quiet_since_s >= quiet_s:
            return True
        await asyncio.sleep(min(_POLL_S, deadline_s - now_s))
        now_s = time.monotonic()
    held = load()
    is_done = not (held.running or held.waiting or held.open_transfers)
    if not is_done:
        _logger.warning(
            "stopping with work left after %g s: running=%d waiting=%d open_transfers=%d",
            timeout_s, held.running, held.waiting, held.open_transfers,
        )  # fmt: skip
    return is_done
