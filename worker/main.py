"""What a worker's process does, whatever its role: from the configuration to an orderly end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from engine.device import Placement
from mesh.config import WorkerConfig
from mesh.service import process_epoch, run_service, setup_logging
from mesh.threads import configure_threads
from worker.placement import run_placed

if TYPE_CHECKING:
    from engine.engine import Engine
    from worker.followers.follower_processes import FollowerProcesses


class Control(Protocol):
    """A role's control loop."""

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``, then until what runs has ended."""
        ...


MakeControl = Callable[["WorkerConfig", "Engine", "FollowerProcesses | None", int], Control]
"""Of the configuration, rank 0's engine, the other ranks and the epoch."""


def run_worker(
    config: WorkerConfig, load_control: Callable[[], MakeControl], follower: str, reports: Any
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        config: The worker's.
        load_control: Imports what makes the role's control loop, once torch may be loaded.
        follower: Module that ranks 1, 2, … run.
        reports: Type of their messages.

    Raises:
        ConfigError: the configuration or the model is unusable.
        Unavailable: no GPU became free, or its lease was lost.
    """
    setup_logging(config.log_level, config.worker_id, config.log_format)
    configure_threads()

    async def main(stop: asyncio.Event) -> None:
        async def serve(placement: Placement) -> None:
            # Loads torch, which reads the thread settings and what GPUs there are.
            from worker.start import start_engine, start_followers

            make_control = load_control()
            await asyncio.sleep(0.01)  # hears of a signal that came while that was imported
            if stop.is_set():
                return
            epoch = process_epoch()
            followers = start_followers(config, placement, follower, reports, epoch)
            try:
                engine = await start_engine(config, placement, followers)
                if not stop.is_set():
                    await make_control(config, engine, followers, epoch).run(stop)
            finally:
                if followers is not None:
                    await followers.close()

        await run_placed(config, stop, serve)

    run_service(main)
