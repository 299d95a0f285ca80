"""Each worker's own /metrics, found through the census."""

from __future__ import annotations

import random
import re
import urllib.request

import aiohttp

from tests.integration.conftest import on
from tests.integration.running_cluster import RunningCluster, ask


def scrape(endpoint: str) -> dict[str, float]:
    text = urllib.request.urlopen(f"{endpoint}/metrics", timeout=60).read().decode()
    samples = re.findall(r"^((?:vllm|pdmesh):\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in samples}


@on("int8-1p1d")
async def test_a_repeated_prompt_is_found_by_both_roles(
    cluster: RunningCluster, session: aiohttp.ClientSession
) -> None:
    cluster.wait_idle()
    workers = {worker["role"]: worker for worker in cluster.get("/debug/census")["workers"]}
    endpoints = {role: worker["http_endpoint"] for role, worker in workers.items()}
    prompt = random.choices(range(10, 40_000), k=100)
    before = {role: scrape(endpoint) for role, endpoint in endpoints.items()}
    for _ in range(2):
        await ask(cluster, session, prompt, max_tokens=2, ignore_eos=True)
    cluster.wait_idle()
    for role, endpoint in endpoints.items():
        after = scrape(endpoint)
        grown = {name: after[name] - before[role][name] for name in after}
        assert grown["vllm:prefix_cache_queries_total"] >= 200, role
        assert 96 <= grown["vllm:prefix_cache_hits_total"] <= 112, role
        assert after["pdmesh:kv_blocks_quarantined"] == after["pdmesh:open_transfers"] == 0
        assert after["vllm:num_requests_running"] == after["vllm:kv_cache_usage_perc"] == 0
