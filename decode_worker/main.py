"""Entry point of a decode worker process."""

from __future__ import annotations

import asyncio

from engine.device import Placement
from kvtransfer.ranks.messages import ReceiveReport
from mesh.config import WorkerConfig
from mesh.service import process_epoch, run_service, setup_logging
from mesh.threads import configure_threads
from worker.placement import run_placed


def run(config: WorkerConfig) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: the configuration or the model is unusable.
        Unavailable: no GPU became free, or its lease was lost.
    """
    setup_logging(config.log_level, config.worker_id, config.log_format)
    configure_threads()

    async def main(stop: asyncio.Event) -> None:
        async def serve(placement: Placement) -> None:
            # Loads torch, which reads the thread settings and what GPUs there are.
            from decode_worker.control import DecodeControl
            from worker.start import start_engine, start_followers

            await asyncio.sleep(0.01)  # hears of a signal that came while that was imported
            if stop.is_set():
                return
            epoch = process_epoch()
            followers = start_followers(
                config, placement, "decode_worker.follower", ReceiveReport, epoch
            )
            try:
                engine = await start_engine(config, placement, followers)
                if not stop.is_set():
                    await DecodeControl(config, engine, followers, epoch).run(stop)
            finally:
                if followers is not None:
                    await followers.close()

        await run_placed(config, stop, serve)

    run_service(main)
