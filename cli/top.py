"""``pdmesh top``: the workers of a running cluster as a table."""

from __future__ import annotations

import time
from typing import Any

from cli.gateway_client import GatewayClient
from mesh.errors import Unavailable

_REFRESH_S = 1.0
_COLUMNS = ("worker", "role", "alive", "run", "wait", "queued tok", "KV used", "tok/s", "step")
_FORMAT = "{:<24} {:<8} {:<6} {:>5} {:>5} {:>11} {:>8} {:>8} {:>9}"


def run_top(url: str, *, once: bool) -> int:
    """Print the table, again each second unless ``once``.

    Raises:
        Unavailable: no gateway answers at ``url``.
    """
    client = GatewayClient(url)
    while True:
        census = client.census()
        if census is None:
            raise Unavailable(f"no gateway answers at {url}")
        table = format_census(census)
        if once:
            print(table)
            return 0
        # Home, the table, and clear what an earlier, longer one left.
        print(f"\033[H\033[2J{url}\n{table}", flush=True)
        time.sleep(_REFRESH_S)


def format_census(census: list[dict[str, Any]]) -> str:
    """One line per worker, under a heading."""
    lines = [_FORMAT.format(*_COLUMNS)]
    for worker in census:
        total = worker.get("kv_blocks_total") or 0
        used = total - (worker.get("kv_blocks_free") or 0)
        lines.append(
            _FORMAT.format(
                str(worker.get("id", "?"))[:24],
                str(worker.get("role", "?")),
                "yes" if worker.get("alive") else "no",
                worker.get("running", "-"),
                worker.get("waiting", "-"),
                worker.get("queued_tokens", "-"),
                f"{100 * used / total:.0f} %" if total else "-",
                f"{worker.get('tokens_per_s', 0.0):.0f}",
                f"{1000 * worker.get('step_time_s', 0.0):.1f} ms",
            )
        )
    return "\n".join(lines)
