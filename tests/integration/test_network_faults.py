"""A cluster over a real network that loses, delays and parts, and processes that freeze and die.

After each fault a client has the undisturbed run's tokens or an explicit error, and the workers
hold nothing for it any more one lease after the fault and the answer are over.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import aiohttp
import pytest

from tests.integration import network
from tests.integration.faults import FAULTS, LEASE_S, SLOW_MBIT_S, Fault, Moment
from tests.integration.loud_skip import skip_loudly
from tests.integration.network import Network
from tests.integration.reference import MARGIN, Reference
from tests.integration.running_cluster import RunningCluster
from tests.integration.separate_roles import SeparateRoles, nodes
from tests.integration.up_process import wait_until

_RESTART_TIMEOUT_S = 300.0
_NUM_OUTPUT = 12
_WORKER_FLAGS = (
    *("--weights", "fp32", "--kv-memory-mib", "160", "--max-model-len", "1024"),
    *("--max-batched-tokens", "128", "--lease-s", str(LEASE_S)),
)


@dataclass
class Site:
    """The running cluster, its network, and what it answers undisturbed."""

    cluster: RunningCluster
    roles: SeparateRoles
    network: Network
    long: list[int]
    short: list[int]
    expected: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    num_requests: int = 0


@dataclass
class Reading:
    """What a client has seen of one answer."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    error: str = ""


@pytest.fixture(scope="module")
def site(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    text_ids: list[int],
    reference: Reference,
) -> Iterator[Site]:
    """One process per node, over the transport that is the parameter."""
    if reason := network.missing():
        skip_loudly("network faults are", reason)
    net = Network(nodes())
    roles: SeparateRoles | None = None
    try:
        folder = tmp_path_factory.mktemp(f"network-{request.param}")
        roles = SeparateRoles(folder, net, *_WORKER_FLAGS, transport=request.param)
        with net.entered("gateway"):
            site = Site(RunningCluster(roles), roles, net, text_ids[:400], text_ids[450:490])
            for prompt in (site.long, site.short):
                undisturbed = asyncio.run(_read_alone(site, prompt))
                assert len(undisturbed.tokens) == _NUM_OUTPUT, undisturbed
                assert min(reference.margins(prompt, undisturbed.tokens)) > MARGIN, "another prompt"
                site.expected[tuple(prompt)] = undisturbed.tokens
        yield site
    finally:
        if roles is not None:
            roles.close()
        net.close()


@pytest.mark.parametrize("site", ["tcp"], indirect=True)
@pytest.mark.parametrize("fault", FAULTS["tcp"], ids=str)
async def test_over_tcp(site: Site, fault: Fault) -> None:
    await _try(site, fault)


@pytest.mark.parametrize("site", ["ucx"], indirect=True)
@pytest.mark.parametrize("fault", FAULTS["ucx"], ids=str)
async def test_over_ucx(site: Site, fault: Fault) -> None:
    await _try(site, fault)


async def _try(site: Site, fault: Fault) -> None:
    with site.network.entered("gateway"):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
            await _suffer(site, session, fault)


async def _suffer(site: Site, session: aiohttp.ClientSession, fault: Fault) -> None:
    victim, bystander, later = Reading(site.long), Reading(site.short), Reading(site.short)
    start_s = time.monotonic()
    try:
        if fault.moment == "start":
            fault.strike(site.roles, site.network)
            await asyncio.gather(*(_read(site, session, r) for r in (victim, bystander)))
            readings = []
        else:
            if fault.moment == "transfer":
                site.network.slow_down("prefill", "decode", mbit_s=SLOW_MBIT_S)
            readings = [asyncio.create_task(_read(site, session, victim))]
            await _wait_for(fault.moment, site, victim, readings[0])
            fault.strike(site.roles, site.network)
            readings.append(asyncio.create_task(_read(site, session, bystander)))
            await asyncio.sleep(fault.hold_s)
            if fault.moment == "transfer":
                assert not readings[0].done(), "its KV came through"
            if fault.kills:
                wait_until(lambda: _is_idle_but(site, fault.kills))
    finally:
        fault.heal(site.roles, site.network)
    healed_s = time.monotonic()
    await asyncio.gather(*readings)
    answered_s = time.monotonic()
    if fault.kills:
        wait_until(lambda: _all_linked(site), _RESTART_TIMEOUT_S)
    idle_s = site.cluster.wait_idle()
    print(
        f"\n{fault}: victim {victim.error or 'equal'}, bystander {bystander.error or 'equal'}; "
        f"struck and healed {healed_s - start_s:.1f} s, answered {answered_s - healed_s:.1f} s, "
        f"idle {idle_s:.2f} s"
    )
    await _read(site, session, later)
    assert not later.error
    for reading in (victim, bystander, later):
        expected = site.expected[tuple(reading.prompt)]
        assert reading.tokens == (expected[: len(reading.tokens)] if reading.error else expected)
    site.cluster.wait_idle()


def _all_linked(site: Site) -> bool:
    now = site.cluster.census()
    return now.keys() == site.cluster.start_census.keys() and all(
        held["running"] >= 0 for held in now.values()
    )


def _is_idle_but(site: Site, killed: str) -> bool:
    """Whether nothing is held by those that live."""
    now = site.cluster.census()
    return all(now.get(n) == held for n, held in site.cluster.start_census.items() if n != killed)


async def _wait_for(
    moment: Moment, site: Site, victim: Reading, reading: asyncio.Task[None]
) -> None:
    """Until the request is where the fault shall hit it."""

    def is_there() -> bool:
        if moment == "decode":
            return len(victim.tokens) >= 5
        census = site.cluster.census()
        if moment == "prefill":
            return 0 < census["prefill"]["queued_tokens"] < len(victim.prompt)
        return len(victim.tokens) == 1 and census["decode"]["open_transfers"] == 1

    while not is_there():
        assert not reading.done(), f"it was over before its {moment} could be hit"
        await asyncio.sleep(0.01)


async def _read_alone(site: Site, prompt: list[int]) -> Reading:
    reading = Reading(prompt)
    async with aiohttp.ClientSession() as session:
        await _read(site, session, reading)
    return reading


async def _read(site: Site, session: aiohttp.ClientSession, reading: Reading) -> None:
    """Stream one answer that no cached block can shorten, to its end or to an explicit error."""
    site.num_requests += 1
    body = {
        "prompt": reading.prompt,
        "max_tokens": _NUM_OUTPUT,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "cache_salt": f"request {site.num_requests}",
    }
    async with session.post(f"{site.cluster.url}/v1/completions", json=body) as response:
        if response.status != 200:
            assert response.status >= 500
            reading.error = (await response.json())["error"]["code"]
            return
        finish_reason = None
        async for line in response.content:
            data = line.removeprefix(b"data: ").strip()
            if data in (b"", b"[DONE]"):
                continue
            assert finish_reason is None, "something came after the end"
            event = json.loads(data)
            if "error" in event:
                reading.error = finish_reason = event["error"]["code"]
                continue
            [choice] = event["choices"]
            reading.tokens += choice["token_ids"]
            finish_reason = choice["finish_reason"]
        assert finish_reason is not None, "the stream just ended"
