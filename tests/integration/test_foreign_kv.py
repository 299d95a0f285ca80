"""Requests are aborted while their KV is in flight, others get the blocks, nobody reads foreign KV.

Slow links keep a victim's KV in flight for most of a second after its client left. The survivor
takes the other prefill worker's link, so that its KV would be in place, and be decoded from, while
the victim's still lands: a worker that frees granted blocks too early gives wrong tokens here.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.integration import network
from tests.integration.loud_skip import skip_loudly
from tests.integration.network import Network
from tests.integration.reference import MARGIN, Reference
from tests.integration.running_cluster import RunningCluster, ask, stream
from tests.integration.separate_roles import SeparateRoles, nodes
from tests.integration.up_process import wait_until

_NUM_ROUNDS = int(os.environ.get("PDMESH_FOREIGN_KV_ROUNDS", "30"))
_NUM_PROMPTS = 6
_NUM_OUTPUT = 6
_VICTIM_TOKENS = 128
_TOKENS = 17
"""Of a survivor: two blocks."""
_LONGEST_WAIT_S = 0.4
_SLOW_MBIT_S = 60.0
"""A victim's 6 MB take 0.8 s."""
_LEASE_S = 5.0
_WORKERS = {"prefill-0": "prefill", "prefill-1": "prefill", "decode": "decode"}
_FLAGS = (
    *("--weights", "fp32", "--block-size", "16", "--max-model-len", "256", "--kv-blocks", "20"),
    *("--lease-s", str(_LEASE_S)),
)

pytestmark = pytest.mark.timeout(600 + 4 * _NUM_ROUNDS)


@pytest.fixture
def net() -> Iterator[Network]:
    """Two prefill workers behind slow links."""
    if reason := network.missing():
        skip_loudly("foreign KV is", reason)
    made = Network(nodes(_WORKERS))
    yield made
    made.close()


class _Rounds:
    """Victims and survivors on one cluster."""

    def __init__(
        self,
        cluster: RunningCluster,
        session: aiohttp.ClientSession,
        expected: dict[tuple[int, ...], list[int]],
    ) -> None:
        self._cluster = cluster
        self._session = session
        self._expected = expected
        self._random = random.Random(7)
        self._num_asked = 0
        self.seen: Counter[str] = Counter()

    async def play(self) -> None:
        """One victim, one survivor."""
        computed = asyncio.Event()
        victim = asyncio.create_task(self._stream(computed))
        if self._random.random() < 0.7:
            await computed.wait()  # all of its KV is posted now
        await asyncio.sleep(self._random.uniform(0, _LONGEST_WAIT_S))
        held = self._cluster.census()["decode"]
        victim.cancel()
        # While this waits, the router sends the survivor to the other prefill worker.
        ballast = self._ask(self._random_ids(8), max_tokens=1)
        prompt = self._random.choice(list(self._expected))
        survivor = self._ask(list(prompt), max_tokens=_NUM_OUTPUT)
        await asyncio.gather(victim, return_exceptions=True)
        self.seen["in flight"] += held["open_transfers"] > 0
        self.seen["quarantined"] += self._cluster.census()["decode"]["kv_blocks_quarantined"] > 0
        self.seen["equal"] += await survivor == self._expected[prompt]
        await ballast

    async def _stream(self, computed: asyncio.Event) -> None:
        """Read until cancelled."""
        self._num_asked += 1
        fields = {"max_tokens": 4, "ignore_eos": True, "cache_salt": f"request {self._num_asked}"}
        ids = self._random_ids(_VICTIM_TOKENS)
        async for _ in stream(self._cluster, self._session, ids, **fields):
            computed.set()

    def _random_ids(self, count: int) -> list[int]:
        return self._random.choices(range(100, 40_000), k=count)

    def _ask(self, ids: list[int], *, max_tokens: int) -> asyncio.Task[list[int]]:
        self._num_asked += 1
        salt = f"request {self._num_asked}"  # else the prefix cache would spare the transfer

        async def answer() -> list[int]:
            fields = {"max_tokens": max_tokens, "ignore_eos": True, "cache_salt": salt}
            return (await ask(self._cluster, self._session, ids, **fields)).token_ids

        return asyncio.create_task(answer())


async def test_freed_blocks_hold_nothing_foreign(
    net: Network,
    tmp_path: Path,
    session: aiohttp.ClientSession,
    reference: Reference,
    text_ids: list[int],
) -> None:
    roles = SeparateRoles(tmp_path, net, *_FLAGS, transport="ucx", workers=_WORKERS)
    try:
        with net.entered("gateway"):
            cluster = RunningCluster(roles)
            # Ready with one prefill worker: the census to come back to has both.
            wait_until(lambda: len(cluster.census()) == len(_WORKERS))
            cluster.start_census = cluster.census()
            expected: dict[tuple[int, ...], list[int]] = {}
            for first in range(0, len(text_ids), _TOKENS):
                prompt = text_ids[first : first + _TOKENS]
                alone = await ask(cluster, session, prompt, max_tokens=_NUM_OUTPUT, ignore_eos=True)
                if min(reference.margins(prompt, alone.token_ids)) > 10 * MARGIN:
                    expected[tuple(prompt)] = alone.token_ids
                if len(expected) == _NUM_PROMPTS:
                    break
            for name in ("prefill-0", "prefill-1"):
                net.slow_down(name, "decode", mbit_s=_SLOW_MBIT_S)
            rounds = _Rounds(cluster, session, expected)
            start_s = time.monotonic()
            for _ in range(_NUM_ROUNDS):
                await rounds.play()
            print(f"\n{rounds.seen} in {time.monotonic() - start_s:.0f} s")
            cluster.wait_idle()
            await session.close()
    finally:
        roles.close()
    assert rounds.seen["equal"] == _NUM_ROUNDS
    assert rounds.seen["in flight"] > _NUM_ROUNDS // 3
    assert rounds.seen["quarantined"] > _NUM_ROUNDS // 10
