"""Entry point of a prefill worker process."""

from __future__ import annotations

from kvtransfer.ranks.messages import SendReport
from mesh.config import WorkerConfig
from worker.main import MakeControl, run_worker


def run(config: WorkerConfig) -> None:
    """Serve until SIGTERM or SIGINT; raises what ``run_worker`` does."""
    run_worker(config, _load_control, "prefill_worker.follower", SendReport)


def _load_control() -> MakeControl:
    from prefill_worker.control import PrefillControl

    return PrefillControl
