"""Entry point of the gateway process."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import uuid

from aiohttp import web

from gateway.app import build_app
from gateway.prompts.served_model import load_served_model
from gateway.routing.cluster import Cluster
from gateway.server_state import ServerState
from mesh.config import GatewayConfig
from mesh.errors import ConfigError
from mesh.model_text.model_files import resolve_model
from mesh.registry.view import ClusterView
from mesh.service import process_epoch, run_service, setup_logging
from mesh.telemetry import metrics
from mesh.telemetry.tracing import open_tracing

_logger = logging.getLogger(__name__)

_LAST_WORDS_S = 0.25
"""How long handlers have to write what a failed request is told, after those that could finish have
(see ``gateway.app``). aiohttp spends it twice: then it cancels the ones that hang in a write."""

_IDLE_S = 75.0
_MAX_HEADER_LINE_BYTES = 8190
_MAX_HEADERS = 128


def run(config: GatewayConfig) -> None:
    """Serve the OpenAI-compatible API until SIGTERM or SIGINT.

    Raises:
        ConfigError: a field, a model file or the address cannot be used.
    """
    config.validate()
    setup_logging(config.log_level, "gateway", config.log_format)
    # Every text is encoded by itself, so the library's threads would only hand it back and forth.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    model = load_served_model(
        resolve_model(config.model),
        name=config.served_model_name,
        tool_call_parser=config.tool_call_parser,
    )

    gateway_id = config.gateway_id or f"gateway-{uuid.uuid4().hex[:12]}"
    tracing = open_tracing(config.otlp_endpoint, "gateway", gateway_id)
    metrics.identify(model.name, "gateway")

    async def serve(stop: asyncio.Event) -> None:
        cluster = Cluster(
            gateway_id=gateway_id,
            epoch=process_epoch(),
            model=model.name,
        )
        server = ServerState(
            model=model,
            cluster=cluster,
            request_timeout_s=config.request_timeout_s,
            max_body_bytes=config.max_body_bytes,
            tracing=tracing,
        )
        server.grammars.prepare()
        view = ClusterView(config.redis_url, on_change=cluster.refresh)
        runner = build_runner(build_app(server, view))
        await runner.setup()
        try:
            # The vocabulary and the modules stay: looking through them would halt every stream.
            gc.collect()
            gc.freeze()
            await _listen(runner, config)
            await stop.wait()
        finally:
            await runner.cleanup()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    run_service(serve)


def build_runner(app: web.Application, *, idle_timeout_s: float = _IDLE_S) -> web.AppRunner:
    """The server of ``app``: a client's disconnect cancels its handler, streaming or not.

    Args:
        app: From ``build_app``.
        idle_timeout_s: How long a connection may stay without a request's last header line.
    """
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=_LAST_WORDS_S,
        keepalive_timeout=idle_timeout_s,
        max_line_size=_MAX_HEADER_LINE_BYTES,
        max_field_size=_MAX_HEADER_LINE_BYTES,
        max_headers=_MAX_HEADERS,
    )


async def _listen(runner: web.AppRunner, config: GatewayConfig) -> None:
    try:
        await web.TCPSite(runner, config.host, config.port, backlog=1024).start()
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfigError(f"port: cannot bind {config.host}:{config.port}: {reason}") from error
    host, port = runner.addresses[0][:2]
    _logger.info("listening on http://%s:%d", host, port)
