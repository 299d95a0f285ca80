"""What ``up`` and ``top`` ask a gateway, with the standard library only."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

_TIMEOUT_S = 1.5
_MAX_BYTES = 4 << 20

_ERRORS = (OSError, http.client.HTTPException, ValueError)


class GatewayClient:
    """Blocking GETs; every answer that is not one is None or False, never an exception."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        self._host = parts.hostname or "127.0.0.1"
        self._port = parts.port or 80

    def is_listening(self) -> bool:
        """Whether the gateway answers HTTP at all."""
        return self._get("/health") is not None

    def is_ready(self) -> bool:
        """Whether a request could be served now."""
        answer = self._get("/ready")
        return answer is not None and answer[0] == 200

    def census(self) -> list[dict[str, Any]] | None:
        """Live figures of every worker the gateway knows, None when it does not answer."""
        answer = self._object("/debug/census")
        workers = None if answer is None else answer.get("workers")
        if not isinstance(workers, list):
            return None
        return [worker for worker in workers if isinstance(worker, dict)]

    def figures(self) -> dict[str, Any] | None:
        """What the gateway's dashboard shows, None when it does not answer."""
        return self._object("/debug/dashboard")

    def _object(self, path: str) -> dict[str, Any] | None:
        answer = self._get(path)
        if answer is None or answer[0] != 200:
            return None
        try:
            content = json.loads(answer[1])
        except ValueError:
            return None
        return content if isinstance(content, dict) else None

    def _get(self, path: str) -> tuple[int, bytes] | None:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read(_MAX_BYTES)
        except _ERRORS:
            return None
        finally:
            connection.close()
