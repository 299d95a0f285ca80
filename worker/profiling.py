"""POST /debug/profile?steps=N&timeout_s=S on a worker."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from aiohttp import web

from engine.engine import Engine
from engine.profiling.report import build_report
from engine.profiling.session import MAX_STEPS, ProfileData, ProfileSession
from engine.profiling.trace_file import write_trace
from mesh.config import WorkerConfig

DEFAULT_STEPS = 20
DEFAULT_TIMEOUT_S = 10.0
MAX_TIMEOUT_S = 60.0
_GRACE_S = 30.0
"""For the step that runs when time is up, and for stopping the profiler."""


class ProfileEndpoint:
    """At most one profile at a time; the control loop only waits for it."""

    def __init__(self, config: WorkerConfig, engine: Engine) -> None:
        self._config = config
        self._engine = engine
        self._is_running = False

    async def handle(self, request: web.Request) -> web.Response:
        """Profile the next steps and answer with the report."""
        try:
            steps = _number(request, "steps", DEFAULT_STEPS, 1, MAX_STEPS)
            timeout_s = _number(request, "timeout_s", DEFAULT_TIMEOUT_S, 0.1, MAX_TIMEOUT_S)
        except ValueError as error:
            return _json({"error": str(error)}, 400)
        if self._is_running or self._engine.profile is not None:
            return _json({"error": "a profile is running"}, 409)
        self._is_running = True
        try:
            return _json(await self._profile(int(steps), timeout_s))
        except TimeoutError:
            return _json({"error": "the model thread did not end the profile in time"}, 503)
        finally:
            self._is_running = False

    async def _profile(self, steps: int, timeout_s: float) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[ProfileData] = loop.create_future()

        def resolve(data: ProfileData) -> None:
            if not done.done():
                done.set_result(data)

        def on_done(data: ProfileData) -> None:
            loop.call_soon_threadsafe(resolve, data)

        session = ProfileSession(
            self._engine,
            steps,
            time.monotonic() + timeout_s,
            on_done,
        )
        self._engine.profile = session
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                data = await done
        finally:
            session.cancel()
        return await asyncio.to_thread(self._report, data)

    def _report(self, data: ProfileData) -> dict[str, Any]:
        config = self._config
        report = {"worker": config.worker_id, "role": config.role, **build_report(data)}
        path, why = "", "the worker has no --profile-dir"
        if data.profiler is None:
            why = "nothing was computed"
        elif config.profile_dir:
            path, why = write_trace(data.profiler, config.profile_dir, config.worker_id)
        return {**report, "trace_file": path or None, "no_trace": why or None}


def _number(request: web.Request, name: str, default: float, low: float, high: float) -> float:
    try:
        value = float(request.query.get(name, default))
    except ValueError:
        raise ValueError(f"{name} is not a number") from None
    if not low <= value <= high:
        raise ValueError(f"{name} is not between {low:g} and {high:g}")
    return value


def _json(content: dict[str, Any], status: int = 200) -> web.Response:
    body = json.dumps(content).encode()
    return web.Response(body=body, status=status, content_type="application/json")
