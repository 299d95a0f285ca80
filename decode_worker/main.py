"""Entry point of a decode worker process."""

from __future__ import annotations

import asyncio

from mesh.config import WorkerConfig
from mesh.service import run_service, setup_logging
from mesh.threads import configure_threads


def run(config: WorkerConfig) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: the configuration or the model is unusable.
    """
    setup_logging(config.log_level, config.worker_id, config.log_format)
    configure_threads()
    from decode_worker.control import DecodeControl
    from engine.start import start_engine  # loads torch, which reads the thread settings

    async def main(stop: asyncio.Event) -> None:
        engine = await start_engine(config)
        if not stop.is_set():
            await DecodeControl(config, engine).run(stop)

    run_service(main)
