"""Entry point of a decode worker process."""

from __future__ import annotations

from kvtransfer.ranks.messages import ReceiveReport
from mesh.config import WorkerConfig
from worker.main import MakeControl, run_worker


def run(config: WorkerConfig) -> None:
    """Serve until SIGTERM or SIGINT; raises what ``run_worker`` does."""
    run_worker(config, _load_control, "decode_worker.follower", ReceiveReport)


def _load_control() -> MakeControl:
    from decode_worker.control import DecodeControl

    return DecodeControl
