"""A worker's load as the model thread last saw it; replaced whole, so any thread may read it."""

from __future__ import annotations

import msgspec

from engine.engine import Engine
from mesh.worker_info import LoadSnapshot


def take_snapshot(engine: Engine, *, num_held: int = 0) -> LoadSnapshot:
    """Read the engine's load (on the model thread); ``num_held`` requests wait outside it."""
    scheduler = engine.scheduler
    pool = scheduler.pool
    return LoadSnapshot(
        kv_blocks_total=pool.num_blocks,
        kv_blocks_free=pool.num_free,
        kv_blocks_quarantined=pool.num_quarantined,
        open_transfers=0,
        running=scheduler.num_running,
        waiting=scheduler.num_waiting + num_held,
        queued_tokens=scheduler.num_queued_tokens,
        step_time_s=engine.step_time_s,
        tokens_per_s=engine.tokens_per_s,
    )


def with_transfers(snapshot: LoadSnapshot, open_transfers: int, draining: bool) -> LoadSnapshot:
    """Add what only the control loop knows."""
    return msgspec.structs.replace(snapshot, open_transfers=open_transfers, draining=draining)
