"""``pdmesh top``: the gateway's dashboard as text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from cli.gateway_client import GatewayClient
from mesh.errors import Unavailable

_REFRESH_S = 1.0
_STALE_S = 3.0
_MAX_FLOWS = 8
_MAX_REQUESTS = 8
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_SLOTS = 40

_COLUMNS = (
    "worker", "role", "state", "KV used", "run", "wait", "queued tok", "transfers", "quarantine",
    "step", "tok/s",
)  # fmt: skip
_FORMAT = "{:<24} {:<8} {:<9} {:>7} {:>5} {:>5} {:>10} {:>9} {:>10} {:>9} {:>7}"
_FLOW_COLUMNS = ("KV transfers from → to", "transfers", "bytes", "hidden", "exposed", "waited")
_FLOW_FORMAT = "{:<49} {:>9} {:>10} {:>9} {:>9} {:>9}"
_REQUEST_COLUMNS = ("requests", "tokens", "TTFT", "queue", "prefill", "kv", "decode", "total", "")
_REQUEST_FORMAT = "{:<10} {:>15} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {}"


def run_top(url: str, *, once: bool) -> int:
    """Print the figures, again each second unless ``once``.

    Raises:
        Unavailable: no gateway answers at ``url``.
    """
    client = GatewayClient(url)
    while True:
        figures = client.figures()
        if figures is None:
            raise Unavailable(f"no gateway answers at {url}")
        text = format_figures(figures)
        if once:
            print(text)
            return 0
        # Home, the text, and clear what an earlier, longer one left.
        print(f"\033[H\033[2J{url}\n{text}", flush=True)
        time.sleep(_REFRESH_S)


def format_figures(figures: dict[str, Any]) -> str:
    """Percentiles, workers, transfers and the latest requests, as GET /debug/dashboard has them."""
    lines = [*_summary(figures), "", _FORMAT.format(*_COLUMNS)]
    lines += map(_worker, figures["workers"])
    if figures["flows"]:
        lines += ["", _FLOW_FORMAT.format(*_FLOW_COLUMNS)]
        lines += map(_flow, figures["flows"][:_MAX_FLOWS])
        if left := figures["flows"][_MAX_FLOWS:]:
            lines.append(f"and {len(left)} more pairs")
    if figures["requests"]:
        lines += ["", _REQUEST_FORMAT.format(*_REQUEST_COLUMNS)]
        lines += map(_request, figures["requests"][:_MAX_REQUESTS])
    return "\n".join(line.rstrip() for line in lines)


def _summary(figures: dict[str, Any]) -> list[str]:
    now, series = figures["summary"], figures["series"]
    state = "shutting down" if figures["draining"] else "ready" if figures["ready"] else "NOT READY"
    lines = [
        f"{figures['model']}: {state}, {figures['open_requests']} requests open; "
        f"last {now['window_s']:.0f} s: {now['finished']} finished, {now['failed']} failed; "
        f"{now['output_tokens_per_s']:.0f} output and {now['prompt_tokens_per_s']:.0f} prompt tok/s"
    ]
    for name in ("ttft", "tpot"):
        percentiles = [
            f"p{percent} {_seconds(now[f'{name}_p{percent}_s']):>8}" for percent in (50, 95, 99)
        ]
        line = sparkline(series[f"{name}_p95_s"][-_SPARK_SLOTS:])
        lines.append(f"{name.upper()}  {'  '.join(percentiles)}   p95 over time {line}")
    return lines


def sparkline(values: Sequence[float | None]) -> str:
    """One character a value, from 0 to the largest; a blank where there is none."""
    most = max((value for value in values if value is not None), default=0.0)
    return "".join(
        " " if value is None else _SPARKS[round(value / most * 7) if most else 0]
        for value in values
    )


def _worker(worker: dict[str, Any]) -> str:
    shown = (str(worker["id"])[:24], str(worker["role"]))
    age_s = worker["load_age_s"]
    if age_s is None:
        return _FORMAT.format(*shown, worker["state"], *("-" * 8))
    total = worker["kv_blocks_total"]
    used = 1 - worker["kv_blocks_free"] / total if total else 0.0
    is_stale = worker["state"] == "up" and age_s > _STALE_S
    return _FORMAT.format(
        *shown,
        f"{age_s:.0f} s old" if is_stale else worker["state"],
        f"{100 * used:.0f} %",
        worker["running"],
        worker["waiting"],
        worker["queued_tokens"],
        worker["open_transfers"],
        worker["kv_blocks_quarantined"],
        _seconds(worker["step_time_s"]),
        f"{worker['tokens_per_s']:.0f}",
    )


def _flow(flow: dict[str, Any]) -> str:
    pair = f"{flow['prefill']} → {flow['decode']}" if flow["prefill"] else "other pairs"
    times = (_seconds(flow[name]) for name in ("hidden_s", "exposed_s", "wait_s"))
    return _FLOW_FORMAT.format(pair, flow["transfers"], _bytes(flow["bytes"]), *times)


def _request(request: dict[str, Any]) -> str:
    parts = request["parts"]
    spent = (
        request["ttft_s"], parts["queue_s"], parts["prefill_s"],
        parts["kv_wait_s"] + parts["kv_exposed_s"], parts["decode_queue_s"] + parts["decode_s"],
        request["total_s"],
    )  # fmt: skip
    tokens = f"{request['prompt_tokens']} → {request['output_tokens']}"
    return _REQUEST_FORMAT.format(
        request["id"][:8], tokens, *map(_seconds, spent), request["outcome"]
    )


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


def _bytes(value: float) -> str:
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(len(units) - 1, max(0, int(value).bit_length() - 1) // 10)
    return f"{value / 1024**power:.{min(power, 1)}f} {units[power]}"
