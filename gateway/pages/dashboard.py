"""GET /dashboard and the figures it shows; both come from memory alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import orjson
from aiohttp import web

from gateway.observe.request_metrics import token_counts
from gateway.observe.time_slots import ClusterLoad
from gateway.pages.dashboard_page import load_page
from gateway.routing.cluster import Cluster, Worker
from gateway.server_state import SERVER_STATE, ServerState
from mesh.cancel import cancel_and_wait

_SAMPLE_S = 1.0
_HEAD = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


async def show_page(request: web.Request) -> web.Response:
    """GET /dashboard."""
    page = await asyncio.to_thread(load_page)  # reads files, the first time
    headers = {**_HEAD, "Content-Security-Policy": page.policy}
    return web.Response(body=page.body, content_type="text/html", charset="utf-8", headers=headers)


async def show_figures(request: web.Request) -> web.Response:
    """GET /debug/dashboard."""
    body = orjson.dumps(figures(request.app[SERVER_STATE]))
    return web.Response(body=body, content_type="application/json", headers=_HEAD)


def figures(server: ServerState) -> dict[str, Any]:
    """What the dashboard shows; ``docs/operations.md`` names the fields."""
    now_s = time.monotonic()
    server.cluster.refresh_loads()
    workers = sorted(server.cluster.workers, key=_order)
    return {
        "model": server.model.name,
        "ready": server.can_serve(),
        "draining": server.is_draining,
        "open_requests": server.num_open_requests,
        "workers": [_worker(worker, now_s) for worker in workers],
        **server.history.as_json(),
    }


async def sampled(app: web.Application) -> AsyncIterator[None]:
    """Sample load and throughput into the history while the application runs."""
    server = app[SERVER_STATE]
    task = asyncio.create_task(_sample(server), name="dashboard-sampler")
    yield
    await cancel_and_wait(task)


async def _sample(server: ServerState) -> None:
    interval_s = min(_SAMPLE_S, server.history.slot_s)
    while True:
        server.history.sample(cluster_load(server.cluster), *token_counts())
        await asyncio.sleep(interval_s)


def cluster_load(cluster: Cluster) -> ClusterLoad:
    """The load of all workers together."""
    cluster.refresh_loads()
    known = [(worker.info.role, worker.load) for worker in cluster.workers]
    prefill = [load for role, load in known if role == "prefill" and load is not None]
    decode = [load for role, load in known if role == "decode" and load is not None]
    total = sum(load.kv_blocks_total for load in decode)
    return ClusterLoad(
        prefill_running=sum(load.running for load in prefill),
        decode_running=sum(load.running for load in decode),
        prefill_waiting=sum(load.waiting for load in prefill),
        decode_waiting=sum(load.waiting for load in decode),
        queued_tokens=sum(load.queued_tokens for load in (*prefill, *decode)),
        kv_used=1 - sum(load.kv_blocks_free for load in decode) / total if total else 0.0,
    )


def _order(worker: Worker) -> tuple[bool, int, str]:
    """Prefill workers first; ``decode-10`` after ``decode-9``."""
    worker_id = worker.info.worker_id
    return worker.info.role != "prefill", len(worker_id), worker_id


def _worker(worker: Worker, now_s: float) -> dict[str, Any]:
    load = worker.load
    state = "up"
    if not worker.is_up:
        state = "down"
    elif not worker.registered:
        state = "leaving"
    elif load is not None and load.draining:
        state = "draining"
    entry: dict[str, Any] = {
        "id": worker.info.worker_id,
        "role": worker.info.role,
        "state": state,
        "max_num_seqs": worker.info.max_num_seqs,
        "attempts_here": len(worker.attempts),
        "load_age_s": None if load is None else now_s - worker.load_at_s,
    }
    return entry if load is None else entry | msgspec.to_builtins(load)
