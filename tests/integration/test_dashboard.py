"""The dashboard: of a real cluster, and in a browser with few and with many workers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cli.top import format_figures
from tests.integration.busy_gateway import SECRET, busy_gateway, keep_shown, send_requests
from tests.integration.chromium import BrowserPage, browser_page, find_chromium
from tests.integration.conftest import on
from tests.integration.layout_checks import CONTRASTS, FAULTS
from tests.integration.running_cluster import RunningCluster
from tests.unit.gateway.scripted_cluster import ScriptedCluster


async def fetch(url: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/debug/dashboard") as answer:
        assert answer.status == 200
        figures: dict[str, Any] = await answer.json()
        return figures


@on("int8-1p1d")
async def test_a_real_cluster_tells_its_transfers_and_requests(
    cluster: RunningCluster, session: aiohttp.ClientSession
) -> None:
    body = {"prompt": list(range(500, 800)), "max_tokens": 8, "ignore_eos": True}
    async with session.post(f"{cluster.url}/v1/completions", json=body) as response:
        assert response.status == 200
        answer_id = (await response.json())["id"].removeprefix("cmpl-")
    figures = await fetch(cluster.url)
    request = figures["requests"][0]
    assert request["id"].startswith(answer_id)
    assert request["prompt_tokens"] == 300
    assert (request["prefill_worker"], request["decode_worker"]) == ("prefill-0", "decode-0")
    assert abs(sum(request["parts"].values()) - request["total_s"]) < 1e-6
    [flow] = figures["flows"]
    assert (flow["prefill"], flow["decode"]) == ("prefill-0", "decode-0")
    assert flow["hidden_s"] + flow["exposed_s"] > 0
    # 30 layers, K and V, 3 heads of 64 elements in fp16; the last block may be half empty.
    slot_bytes = 30 * 2 * 3 * 64 * 2
    assert 300 * slot_bytes <= request["kv_bytes"] <= 320 * slot_bytes
    assert flow["bytes"] >= request["kv_bytes"]
    assert figures["summary"]["ttft_p95_s"] > 0
    assert [worker["state"] for worker in figures["workers"]] == ["up", "up"]
    assert max(worker["load_age_s"] for worker in figures["workers"]) < 3
    assert "prefill-0 → decode-0" in format_figures(figures)


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (8, 16)])
async def test_in_a_browser(num_prefill: int, num_decode: int, tmp_path: Path) -> None:
    """Its pictures can be kept: they lie in pytest's ``--basetemp``."""
    find_chromium()
    async with busy_gateway(num_prefill, num_decode) as cluster, browser_page(tmp_path) as page:
        shower = asyncio.create_task(keep_shown(cluster))
        await page.open(f"{cluster.url}/dashboard")
        await send_requests(cluster, 40)
        await page.until("document.querySelectorAll('#requests button').length > 40")
        await page.until("document.querySelectorAll('path.series').length >= 8")
        await check_content(page, num_prefill, num_decode)
        await check_waterfall(page)
        for width in (1280, 390):
            for scheme in ("light", "dark"):
                await page.show(width, 900, scheme)
                check = await page.evaluate(FAULTS)
                assert check["num_texts"] > 100
                assert check["faults"] == [], f"{width} {scheme}"
                assert await page.evaluate(CONTRASTS) == [], f"{width} {scheme}"
                picture = await page.screenshot()
                await asyncio.to_thread((tmp_path / f"{width}-{scheme}.png").write_bytes, picture)
        await check_that_faults_are_found(page)
        assert page.complaints == []
        shower.cancel()
        await check_what_is_gone(page, cluster)


async def check_that_faults_are_found(page: BrowserPage) -> None:
    """What the checks look for, made on purpose, is found."""
    await page.evaluate("""
        const planted = make('p', {}, 'planted');
        planted.style.cssText = 'position: absolute; left: 20px; top: 10px; color: #444';
        document.body.append(planted);""")
    faults = (await page.evaluate(FAULTS))["faults"]
    assert any("planted" in fault and "pdmesh" in fault for fault in faults)
    assert "planted" in await page.evaluate(CONTRASTS)
    await page.evaluate("planted.style.left = '380px'")
    assert "outside: planted" in (await page.evaluate(FAULTS))["faults"]
    await page.evaluate("planted.remove()")


async def check_content(page: BrowserPage, num_prefill: int, num_decode: int) -> None:
    assert await page.evaluate("document.querySelectorAll('.row.worker .meter').length") == (
        num_prefill + num_decode
    )
    text = await page.evaluate("document.body.innerText")
    up = num_decode - (num_decode > 3)
    for expected in (
        "SmolLM2-135M-Instruct", "live", "TTFT p50", f"decode {up} of {num_decode} up", "abort",
        "prefill-0 → " if num_prefill == 1 else "→ decode-", "MiB",
    ):  # fmt: skip
        assert expected in text
    if num_decode > 3:
        assert "draining" in text
        assert await page.evaluate("document.querySelector('.fill.high').style.width") == "97.998%"
        order = "[...document.querySelectorAll('.worker .name b')].map((name) => name.textContent)"
        names = [f"prefill-{n}" for n in range(num_prefill)]
        assert await page.evaluate(order) == names + [f"decode-{n}" for n in range(num_decode)]
    assert SECRET not in text


async def check_waterfall(page: BrowserPage) -> None:
    """A chosen request is shown and stays, and its bars lie where its parts are."""
    figures = json.loads(
        await page.evaluate("fetch('debug/dashboard').then((answer) => answer.text())")
    )
    request = next(request for request in figures["requests"] if request["output_tokens"] == 36)
    await page.evaluate(f"""
        [...document.querySelectorAll('#requests button')]
          .find((row) => row.innerText.includes('{request["id"][:8]}')).click()""")
    assert await page.evaluate("document.querySelector('#waterfall h3').innerText") == request["id"]
    bars: dict[str, list[float]] = await page.evaluate("""
        Object.fromEntries([...document.querySelectorAll('#waterfall .span')].map((span) => {
          const name = span.firstChild.innerText, bar = span.querySelector('i');
          if (!bar) return [name, null];
          const lane = bar.parentElement.getBoundingClientRect();
          const own = bar.getBoundingClientRect();
          return [name, [(own.left - lane.left) / lane.width, own.width / lane.width]];
        }))""")
    parts, total_s = request["parts"], request["total_s"]
    assert {
        "tokenise",
        "prefill queue",
        "prefill",
        "transfer hidden",
        "decode queue",
    } <= bars.keys()
    start, width = bars["decode"]
    assert width == pytest.approx(parts["decode_s"] / total_s, abs=0.01)
    assert start + width == pytest.approx(1 - parts["respond_s"] / total_s, abs=0.01)
    assert bars["total"] is None
    before = await page.evaluate("document.querySelector('#waterfall h3').innerText")
    await asyncio.sleep(1.2)  # a poll later
    assert await page.evaluate("document.querySelector('#waterfall h3').innerText") == before


async def check_what_is_gone(page: BrowserPage, cluster: ScriptedCluster) -> None:
    """First a worker, then every worker's news, then the gateway."""
    cluster.view.show(*cluster.workers[:-1])
    cluster.cluster.refresh()
    name = cluster.workers[-1].id
    gone = f"""
        [...document.querySelectorAll('.worker')].some((row) =>
          row.innerText.includes('{name}') && row.innerText.includes('gone for'))"""
    await page.until(gone)
    await page.until("document.getElementById('status').innerText === 'workers stale'")
    assert await page.evaluate("document.getElementById('banner').checkVisibility()")
    await cluster.runner.cleanup()
    await page.until("document.getElementById('status').innerText === 'gateway gone'", 20)
    assert "does not answer" in await page.evaluate("document.getElementById('banner').innerText")
    assert "stale" in await page.evaluate("document.body.className")
    # All that it complained of is that nobody answered.
    assert all("ERR_CONNECTION_REFUSED" in complaint for complaint in page.complaints)
