"""``pdmesh profile``: what the steps of a running cluster's workers spend their time on."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from cli.gateway_client import GatewayClient
from mesh.errors import InvalidRequest, Unavailable

_MAX_BYTES = 8 << 20
_MARGIN_S = 45.0
_COLUMNS = ("phase", "op", "calls", "ms", "share", "GB/s", "GFLOP/s", "of limit", "bound")
_FORMAT = "{:<8} {:<18} {:>7} {:>9} {:>6} {:>8} {:>9} {:>9} {:<8}"


def run_profile(url: str, *, worker: str, steps: int, timeout_s: float) -> int:
    """Profile one worker, or all at once, and print a table for each.

    Raises:
        Unavailable: no gateway answers at ``url``.
        InvalidRequest: it knows no such worker.
    """
    census = GatewayClient(url).census()
    if census is None:
        raise Unavailable(f"no gateway answers at {url}")
    chosen = [entry for entry in census if worker in ("", entry.get("id"))]
    if not chosen:
        raise InvalidRequest(f"there is no worker {worker!r}" if worker else "there is no worker")
    with ThreadPoolExecutor(len(chosen)) as threads:
        reports = threads.map(lambda entry: _ask(entry, steps, timeout_s), chosen)
        failed = False
        for entry, report in zip(chosen, reports, strict=True):
            failed |= "error" in report
            print(format_report(str(entry.get("id", "?")), report), end="\n\n", flush=True)
    return 1 if failed else 0


def format_report(worker_id: str, report: dict[str, Any]) -> str:
    """A heading, the table, and what bounds the step."""
    if "error" in report:
        return f"{worker_id}: {report['error']}"
    lines = [
        f"{worker_id} ({report['role']}): {report['steps']} steps, {report['tokens']} tokens, "
        f"{1000 * report['mean_step_s']:.1f} ms a step"
    ]
    limits = report["limits"]
    if limits is not None:
        lines.append(
            f"limits measured here: {limits['bytes_per_s'] / 1e9:.1f} GB/s, "
            f"{limits['flops_per_s'] / 1e9:.0f} GFLOP/s"
        )
        lines += ["", _FORMAT.format(*_COLUMNS)]
        lines += [_line(row) for row in report["ops"]]
        lines.append("")
    lines.append(report["bound"])
    lines.append(report["trace_file"] or f"no trace: {report['no_trace']}")
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    return _FORMAT.format(
        row["phase"],
        row["op"],
        row["calls"],
        f"{1000 * row['time_s']:.2f}",
        f"{row['share']:.1%}",
        f"{row['bytes_per_s'] / 1e9:.1f}",
        f"{row['flops_per_s'] / 1e9:.1f}",
        f"{row['of_limit']:.0%}",
        row["bound"],
    )


def _ask(entry: dict[str, Any], steps: int, timeout_s: float) -> dict[str, Any]:
    parts = urlsplit(str(entry.get("http_endpoint", "")))
    connection = http.client.HTTPConnection(
        parts.hostname or "", parts.port or 80, timeout=timeout_s + _MARGIN_S
    )
    try:
        connection.request("POST", f"/debug/profile?steps={steps}&timeout_s={timeout_s}")
        answer = json.loads(connection.getresponse().read(_MAX_BYTES))
    except (OSError, http.client.HTTPException, ValueError) as error:
        return {"error": f"no answer: {error}"}
    finally:
        connection.close()
    return answer if isinstance(answer, dict) else {"error": "no report"}
