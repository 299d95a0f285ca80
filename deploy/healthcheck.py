"""The image's health check: exit code 0 when PDMESH_HEALTH_URL answers 200.

Only the standard library's lightest: it runs every few seconds beside what it checks.
"""

from __future__ import annotations

import http.client
import os
import sys
from urllib.parse import urlsplit

_TIMEOUT_S = 3.0


def main() -> int:
    """Ask once; no proxy, no redirect."""
    url = urlsplit(os.environ.get("PDMESH_HEALTH_URL", "http://127.0.0.1:8000/health"))
    connection = http.client.HTTPConnection(url.netloc, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", url.path)
        return 0 if connection.getresponse().status == 200 else 1
    except (OSError, http.client.HTTPException):
        return 1
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
