"""The gateway's in-memory picture of the cluster, kept fresh from Redis in the background.

Reading it never waits. While Redis is lost it keeps its last content: the links to the workers
tell who is really alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from redis.asyncio import Redis

from mesh.backoff import Backoff
from mesh.cancel import cancel_and_wait
from mesh.errors import ProtocolError
from mesh.registry.keys import (
    HEARTBEAT_S,
    HEARTBEAT_TTL_S,
    LOAD_CHANNEL,
    LOAD_INTERVAL_S,
    MAX_WORKERS,
    MEMBER_CHANNEL,
    WORKERS_KEY,
    LoadUpdate,
    MemberChange,
    decode_value,
    load_key,
    worker_key,
)
from mesh.registry.redis_client import REDIS_ERRORS, REDIS_TIMEOUT_S, open_redis
from mesh.telemetry.rate_limited_log import RateLimitedLog
from mesh.worker_info import LoadSnapshot, WorkerInfo

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """What the view knows about one worker."""

    info: WorkerInfo
    load: LoadSnapshot | None
    """Last load heard of this epoch."""
    updated_s: float
    """``time.monotonic()`` when ``load`` (or, without one, ``info``) was heard."""


class ClusterView:
    """Follows the registry; entries change between turns of the event loop only."""

    def __init__(self, redis_url: str, *, on_change: Callable[[], None] | None = None) -> None:
        """Prepare; nothing is dialed before ``start()``.

        Args:
            redis_url: the registry.
            on_change: called in the event loop when a worker comes, goes or restarts (not when
                only its load changes).

        Raises:
            ConfigError: the URL is malformed.
        """
        self._redis: Redis = open_redis(redis_url)
        self._on_change = on_change
        self._entries: dict[str, WorkerEntry] = {}
        self._left: dict[str, int] = {}
        self._connected_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._lost_log = RateLimitedLog(_logger)
        self._bad_value_log = RateLimitedLog(_logger)
        self.redis_up = False
        """Whether the last exchange with Redis worked."""

    async def start(self) -> None:
        """Follow the registry in the background; returns at once, whether or not Redis answers."""
        self._task = asyncio.create_task(self._run(), name="cluster-view")

    async def close(self) -> None:
        """Stop following; the last content stays readable. Idempotent."""
        if self._task is None:
            return
        await cancel_and_wait(self._task)
        self._task = None
        self.redis_up = False
        await self._redis.aclose()

    def workers(self) -> list[WorkerEntry]:
        """All workers believed to be alive, in no particular order."""
        return list(self._entries.values())

    async def _run(self) -> None:
        backoff = Backoff(0.1, 2.0)
        while True:
            try:
                await self._follow(backoff)
            except REDIS_ERRORS as error:
                self.redis_up = False
                self._lost_log.warning("registry lost, routing by the last view: %s", error)
            except Exception:
                # A view that stops following would never learn of a new worker: rather try again.
                _logger.exception("following the registry failed")
            await asyncio.sleep(backoff.next_delay_s())

    async def _follow(self, backoff: Backoff) -> None:
        """Subscribe, read everything, then listen; a full read each heartbeat heals what we missed.

        Returns by raising one of REDIS_ERRORS.
        """
        async with self._redis.pubsub(ignore_subscribe_messages=True) as pubsub:
            await pubsub.subscribe(LOAD_CHANNEL, MEMBER_CHANNEL)
            self._connected_s = time.monotonic()
            next_read_s = 0.0
            while True:
                now_s = time.monotonic()
                if now_s >= next_read_s:
                    async with asyncio.timeout(REDIS_TIMEOUT_S):
                        await self._read_all()
                    self.redis_up = True
                    backoff.reset()
                    next_read_s = now_s + HEARTBEAT_S
                timeout_s = max(0.0, next_read_s - time.monotonic())
                message = await pubsub.get_message(timeout=timeout_s)
                if message is not None and self._on_published(message):
                    # Bounded: a worker we cannot read must not make us read all the time.
                    next_read_s = min(next_read_s, now_s + LOAD_INTERVAL_S)

    async def _read_all(self) -> None:
        members = await self._redis.smembers(WORKERS_KEY)
        ids = sorted(
            member if isinstance(member, str) else member.decode(errors="replace")
            for member in members
        )[:MAX_WORKERS]
        keys = [worker_key(i) for i in ids] + [load_key(i) for i in ids]
        values = await self._redis.mget(keys) if keys else []
        changed = False
        present = set()
        for worker_id, info_data, load_data in zip(
            ids, values[: len(ids)], values[len(ids) :], strict=True
        ):
            if info_data is None:
                continue
            present.add(worker_id)
            with self._tolerate_bad(worker_id):
                changed |= self._put(decode_value(info_data, WorkerInfo))
                entry = self._entries.get(worker_id)
                if load_data is not None and entry is not None and entry.load is None:
                    self._set_load(decode_value(load_data, LoadUpdate))
        # A server that came back empty is not news about the workers: they need time to return.
        if time.monotonic() - self._connected_s > HEARTBEAT_TTL_S:
            for worker_id in self._entries.keys() - present:
                _logger.info("worker expired id=%s", worker_id)
                del self._entries[worker_id]
                changed = True
        if changed:
            self._changed()

    def _on_published(self, message: dict[str, Any]) -> bool:
        """Take one published message in; True when a full read should follow."""
        data = message["data"]
        with self._tolerate_bad("published"):
            if message["channel"] == LOAD_CHANNEL.encode():
                return not self._set_load(decode_value(data, LoadUpdate))
            change = decode_value(data, MemberChange)
            if change.joined:
                return True
            self._remove(change)
        return False

    def _put(self, info: WorkerInfo) -> bool:
        known = self._entries.get(info.worker_id)
        if known is not None and known.info.epoch >= info.epoch:
            return False
        if info.epoch <= self._left.get(info.worker_id, 0):
            return False
        self._entries[info.worker_id] = WorkerEntry(info, None, time.monotonic())
        _logger.info("worker known id=%s role=%s epoch=%d", info.worker_id, info.role, info.epoch)
        return True

    def _set_load(self, update: LoadUpdate) -> bool:
        """Returns False when the update names a start of a worker that we do not know yet."""
        entry = self._entries.get(update.worker_id)
        if entry is None or update.epoch > entry.info.epoch:
            return False
        if update.epoch == entry.info.epoch:
            self._entries[update.worker_id] = replace(
                entry, load=update.load, updated_s=time.monotonic()
            )
        return True

    def _remove(self, change: MemberChange) -> None:
        if len(self._left) >= MAX_WORKERS:
            self._left.clear()
        # A full read that was under way may still carry the entry that was just withdrawn.
        self._left[change.worker_id] = max(change.epoch, self._left.get(change.worker_id, 0))
        entry = self._entries.get(change.worker_id)
        if entry is not None and entry.info.epoch <= change.epoch:
            del self._entries[change.worker_id]
            _logger.info("worker left id=%s", change.worker_id)
            self._changed()

    def _changed(self) -> None:
        if self._on_change is None:
            return
        try:
            self._on_change()
        except Exception:
            _logger.exception("cluster-view handler failed")

    @contextlib.contextmanager
    def _tolerate_bad(self, what: str) -> Any:
        """A value we cannot read must not hide the rest of the cluster."""
        try:
            yield
        except ProtocolError as error:
            self._bad_value_log.warning("ignored registry value of %s: %s", what, str(error)[:200])
