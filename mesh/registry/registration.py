"""A worker's entry in the registry: registers, heartbeats, publishes load, leaves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from redis.asyncio import Redis

from mesh.backoff import Backoff
from mesh.cancel import cancel_and_wait
from mesh.errors import ProtocolError
from mesh.registry.keys import (
    HEARTBEAT_S,
    HEARTBEAT_TTL_S,
    LOAD_CHANNEL,
    LOAD_INTERVAL_S,
    MEMBER_CHANNEL,
    WORKERS_KEY,
    LoadUpdate,
    MemberChange,
    decode_value,
    encode_value,
    load_key,
    worker_key,
)
from mesh.registry.redis_client import REDIS_ERRORS, open_redis
from mesh.telemetry.rate_limited_log import RateLimitedLog
from mesh.worker_info import LoadSnapshot, WorkerInfo

_CLOSE_TIMEOUT_S = 1.0
_TTL_MS = int(HEARTBEAT_TTL_S * 1000)

_logger = logging.getLogger(__name__)


class Registration:
    """Keeps one worker registered until ``close()``; survives the loss of Redis."""

    def __init__(self, redis_url: str, info: WorkerInfo, load: Callable[[], LoadSnapshot]) -> None:
        """Prepare; nothing is written before ``start()``.

        Args:
            redis_url: the registry.
            info: what peers learn about this start of the worker.
            load: called in the event loop about ten times a second; must not block.

        Raises:
            ConfigError: the URL is malformed.
        """
        self._info = info
        self._load = load
        self._redis: Redis = open_redis(redis_url)
        self._task: asyncio.Task[None] | None = None
        self._lost_log = RateLimitedLog(_logger)
        self.redis_up = False

    async def start(self) -> None:
        """Register in the background; returns at once, whether or not Redis answers."""
        self._task = asyncio.create_task(self._run(), name="registration")

    async def close(self) -> None:
        """Leave: stop the heartbeats, remove our keys and tell the gateways. Idempotent."""
        if self._task is None:
            return
        await cancel_and_wait(self._task)
        self._task = None
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._leave()
        except REDIS_ERRORS as error:
            _logger.warning("could not leave the registry: %s", error)
        finally:
            await self._redis.aclose()

    async def _run(self) -> None:
        backoff = Backoff(0.1, 2.0)
        while True:
            try:
                await self._beat_until_lost(backoff)
                return
            except REDIS_ERRORS as error:
                self.redis_up = False
                self._lost_log.warning("registry lost, serving on: %s", error)
            except Exception:
                # A worker that stops registering is lost to the cluster: rather try again.
                _logger.exception("registration failed")
            await asyncio.sleep(backoff.next_delay_s())

    async def _beat_until_lost(self, backoff: Backoff) -> None:
        next_heartbeat_s = float("-inf")
        joined = False
        while True:
            now_s = time.monotonic()
            pipeline = self._redis.pipeline(transaction=False)
            heartbeat = now_s >= next_heartbeat_s
            if heartbeat:
                if await self._superseded():
                    return
                self._add_heartbeat(pipeline)
                next_heartbeat_s = now_s + HEARTBEAT_S
            update = LoadUpdate(
                worker_id=self._info.worker_id, epoch=self._info.epoch, load=self._load()
            )
            data = encode_value(update)
            pipeline.set(load_key(update.worker_id), data, px=_TTL_MS)
            pipeline.publish(LOAD_CHANNEL, data)
            if not joined:
                # After the keys, so that whoever hears of it finds them.
                pipeline.publish(MEMBER_CHANNEL, encode_value(self._change(joined=True)))
            await pipeline.execute()
            joined = True
            self.redis_up = True
            backoff.reset()
            await asyncio.sleep(max(0.0, now_s + LOAD_INTERVAL_S - time.monotonic()))

    def _add_heartbeat(self, pipeline: Redis) -> None:
        key = worker_key(self._info.worker_id)
        pipeline.set(key, encode_value(self._info), px=_TTL_MS)
        pipeline.sadd(WORKERS_KEY, self._info.worker_id)

    async def _superseded(self) -> bool:
        """Whether a later start of this worker has registered; then this one must not fight it."""
        registered = await self._registered_epoch()
        if registered <= self._info.epoch:
            return False
        _logger.error("a later start of %s is registered, leaving", self._info.worker_id)
        return True

    async def _registered_epoch(self) -> int:
        data = await self._redis.get(worker_key(self._info.worker_id))
        if data is None:
            return 0
        try:
            return decode_value(data, WorkerInfo).epoch
        except ProtocolError:
            return 0

    async def _leave(self) -> None:
        worker_id = self._info.worker_id
        pipeline = self._redis.pipeline(transaction=True)
        if await self._registered_epoch() == self._info.epoch:
            pipeline.delete(worker_key(worker_id), load_key(worker_id))
            pipeline.srem(WORKERS_KEY, worker_id)
        pipeline.publish(MEMBER_CHANNEL, encode_value(self._change(joined=False)))
        await pipeline.execute()

    def _change(self, *, joined: bool) -> MemberChange:
        return MemberChange(worker_id=self._info.worker_id, epoch=self._info.epoch, joined=joined)
