"""Entry point of a decode worker process."""

from __future__ import annotations

import asyncio

from kvtransfer.rank_messages import ReceiveReport
from mesh.config import WorkerConfig
from mesh.service import process_epoch, run_service, setup_logging
from mesh.threads import configure_threads


def run(config: WorkerConfig) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: the configuration or the model is unusable.
    """
    setup_logging(config.log_level, config.worker_id, config.log_format)
    configure_threads()
    from decode_worker.control import DecodeControl
    from engine.start import start_engine, start_followers  # torch reads the thread settings

    async def main(stop: asyncio.Event) -> None:
        epoch = process_epoch()
        followers = start_followers(config, "decode_worker.follower", ReceiveReport, epoch)
        try:
            engine = await start_engine(config, followers)
            if not stop.is_set():
                await DecodeControl(config, engine, followers, epoch).run(stop)
        finally:
            if followers is not None:
                await followers.close()

    run_service(main)
