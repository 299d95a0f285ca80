"""The life of every process: logging, signals, its epoch, and a worker's small HTTP endpoint."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from mesh.config import LogFormat
from mesh.errors import ConfigError
from mesh.telemetry import metrics
from mesh.telemetry.log_format import JsonFormatter, TextFormatter

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_logger = logging.getLogger(__name__)
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def process_epoch() -> int:
    """A number that is larger at each start of a process: wall-clock nanoseconds."""
    return time.time_ns()


def run_service(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run ``main(stop)`` in a new event loop until it returns.

    The first SIGINT or SIGTERM sets ``stop``, a second one cancels ``main``.
    """
    asyncio.run(_run(main))


async def _run(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    task = asyncio.ensure_future(main(stop))

    def on_signal() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        await task
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        _logger.warning("stopped by a second signal")
    finally:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)


def setup_logging(level: str, name: str, log_format: LogFormat = "text") -> None:
    """Send all records at or above ``level`` to stderr, one line each, marked with ``name``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(name) if log_format == "json" else TextFormatter(name))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class HttpServer:
    """A listening HTTP server; ``close()`` frees its port."""

    def __init__(self, runner: web.AppRunner, host: str, port: int) -> None:
        self._runner = runner
        self.port = port
        """The real port."""
        self.endpoint = f"http://{host}:{port}"

    async def close(self) -> None:
        """Stop listening and drop open connections."""
        await self._runner.cleanup()


async def serve_http(
    host: str, port: int, routes: Mapping[str, Handler], posts: Mapping[str, Handler] | None = None
) -> HttpServer:
    """Serve GET ``routes`` and POST ``posts`` (path → handler); port 0 takes any free one.

    Raises:
        ConfigError: the port cannot be bound.
    """
    app = web.Application(client_max_size=0)
    for path, handler in routes.items():
        app.router.add_get(path, handler)
    for path, handler in (posts or {}).items():
        app.router.add_post(path, handler)
    # A scrape that hangs must not hold a worker's shutdown up.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(
            f"http_port: cannot bind {host}:{port}: {os.strerror(error.errno or 0)}"
        ) from error
    return HttpServer(runner, host, runner.addresses[0][1])


async def metrics_handler(request: web.Request) -> web.Response:
    """``/metrics`` for ``serve_http``."""
    return web.Response(body=metrics.render(), headers={"Content-Type": metrics.CONTENT_TYPE})
