"""The address under which this machine is known to the others."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from mesh.errors import ConfigError

WILDCARDS = ("0.0.0.0", "::")
_REDIS_PORT = 6379


def address_towards(redis_url: str) -> str:
    """The IPv4 address from which this machine reaches the registry; nothing is sent.

    Raises:
        ConfigError: there is none: the registry is a Unix socket, its name is not known, or no
            route leads there.
    """
    parts = urlsplit(redis_url)
    if parts.scheme == "unix" or not parts.hostname:
        raise ConfigError("advertise_host: needed where the registry is no host")
    target = (parts.hostname, parts.port or _REDIS_PORT)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # of a datagram socket: only chooses the route
            return str(probe.getsockname()[0])
    except OSError as error:
        text = f"advertise_host: no IPv4 route to the registry at {target[0]}: {error}"
        raise ConfigError(text) from error
