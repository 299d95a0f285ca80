"""Opens Redis clients that fail fast: the callers retry by their own timers."""

from __future__ import annotations

from redis import Redis as BlockingRedis
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry as BlockingRetry

from mesh.errors import ConfigError

REDIS_TIMEOUT_S = 2.0
"""Longest wait for a connection or an answer."""

REDIS_ERRORS: tuple[type[Exception], ...] = (RedisError, OSError, TimeoutError)
"""What a lost, restarting or misbehaving server raises."""


def open_redis(redis_url: str) -> Redis:
    """Make a client; nothing is dialed yet. The caller closes it with ``aclose()``.

    Raises:
        ConfigError: the URL is malformed.
    """
    try:
        return Redis.from_url(
            redis_url,
            socket_timeout=REDIS_TIMEOUT_S,
            socket_connect_timeout=REDIS_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            decode_responses=False,
        )
    except ValueError as error:
        raise ConfigError(f"redis_url: {error}") from error


def open_blocking_redis(redis_url: str) -> BlockingRedis:
    """The same for a thread without an event loop. The caller closes it with ``close()``.

    Raises:
        ConfigError: the URL is malformed.
    """
    try:
        return BlockingRedis.from_url(
            redis_url,
            socket_timeout=REDIS_TIMEOUT_S,
            socket_connect_timeout=REDIS_TIMEOUT_S,
            retry=BlockingRetry(NoBackoff(), 0),
            decode_responses=False,
        )
    except ValueError as error:
        raise ConfigError(f"redis_url: {error}") from error
