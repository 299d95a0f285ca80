"""GET endpoints for operators and clients: models, documentation, health, metrics, census."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import orjson
from aiohttp import web

from gateway.pages import docs_page
from gateway.pages.openapi import build_document
from gateway.routing.cluster import Cluster, Worker
from gateway.server_state import SERVER_STATE, ServerState
from mesh.errors import ModelNotFound, Unavailable
from mesh.telemetry import metrics

_CENSUS_TIMEOUT_S = 1.0


def _json(content: Any) -> web.Response:
    return web.Response(body=orjson.dumps(content), content_type="application/json")


def _model(server: ServerState) -> dict[str, Any]:
    return {
        "id": server.model.name,
        "object": "model",
        "created": server.created,
        "owned_by": "pdmesh",
        "max_model_len": server.max_model_len,
    }


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    return _json({"object": "list", "data": [_model(request.app[SERVER_STATE])]})


async def get_model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}."""
    server = request.app[SERVER_STATE]
    name = request.match_info["id"]
    if name != server.model.name:
        raise ModelNotFound(f"the model {name!r} does not exist", param="model")
    return _json(_model(server))


async def health(request: web.Request) -> web.Response:
    """GET /health: the process is alive."""
    return _json({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """GET /ready: a request could be served now, else 503."""
    server = request.app[SERVER_STATE]
    if server.is_draining:
        raise Unavailable("the gateway is shutting down")
    if not server.can_serve():
        raise Unavailable("no matching pair of a prefill and a decode worker is up")
    return _json({"status": "ready"})


async def show_metrics(request: web.Request) -> web.Response:
    """GET /metrics, for Prometheus."""
    request.app[SERVER_STATE].cluster.count_workers()
    # In a thread: it reads /proc and takes milliseconds with many buckets.
    body = await asyncio.to_thread(metrics.render)
    return web.Response(body=body, headers={"Content-Type": metrics.CONTENT_TYPE})


async def openapi(request: web.Request) -> web.Response:
    """GET /openapi.json."""
    return _json(await asyncio.to_thread(build_document, request.app[SERVER_STATE].model.name))


async def docs(request: web.Request) -> web.Response:
    """GET /docs."""
    document = await asyncio.to_thread(build_document, request.app[SERVER_STATE].model.name)
    page = docs_page.render(document)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return web.Response(
        text=page, content_type="text/html", headers={"Content-Security-Policy": policy}
    )


async def census(request: web.Request) -> web.Response:
    """GET /debug/census: every worker's live figures, asked over its link."""
    cluster = request.app[SERVER_STATE].cluster
    workers = sorted(cluster.workers, key=lambda worker: worker.info.worker_id)
    return _json({"workers": await asyncio.gather(*(_census(cluster, w) for w in workers))})


async def _census(cluster: Cluster, worker: Worker) -> dict[str, Any]:
    reply = await cluster.status(worker, _CENSUS_TIMEOUT_S)
    info = worker.info if reply is None else reply.info
    entry: dict[str, Any] = {
        "id": info.worker_id,
        "role": info.role,
        "alive": reply is not None,
        "epoch": info.epoch,
        "endpoint": info.endpoint,
        "http_endpoint": info.http_endpoint,
        "transport": info.transport,
        "device": info.device,
        "cpu_level": info.cpu_level,
        "gpus": msgspec.to_builtins(info.gpus),
        "fingerprint": info.fingerprint,
        "model": info.model,
        "max_model_len": info.max_model_len,
        "block_size": info.block_size,
        "max_num_seqs": info.max_num_seqs,
        "attempts_here": len(worker.attempts),
    }
    if reply is not None:
        entry |= msgspec.to_builtins(reply.load)
    return entry
