"""Attempts under random event orders: tokens in order, one end, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.generation.attempt import Attempt
from gateway.generation.generation_request import GenerationRequest
from gateway.routing.cluster import Cluster, Worker
from gateway.routing.router import Pair
from mesh.errors import IncompatiblePeer, PdmeshError, WorkerLost
from mesh.messages import AbortRequest, AnyMessage, RequestFailed, SamplingParams, TokenOutput
from mesh.worker_info import WorkerInfo
from tests.unit.gateway.client import CHAT, MESSAGES, Client
from tests.unit.gateway.scripted_cluster import (
    Script,
    ScriptedCluster,
    ScriptedWorker,
    wait_until,
)

TEXT = "Hello wörld 日本 😀 yes"
BASE = 3
LAST = 9


class RecordingLink:
    is_up = True

    def __init__(self) -> None:
        self.sent: list[AnyMessage] = []

    def send(self, message: AnyMessage) -> bool:
        self.sent.append(message)
        return True


class Owner:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finished = 0
        self.failures: list[PdmeshError] = []

    def on_tokens(self, output: TokenOutput) -> None:
        assert not self.finished
        assert not self.failures
        self.tokens += output.token_ids
        self.finished += output.finish_reason is not None

    def on_attempt_failed(self, error: PdmeshError, avoid: set[str], retryable: bool) -> None:
        self.failures.append(error)


def make_worker(name: str) -> Worker:
    info = WorkerInfo(
        worker_id=name,
        role="prefill" if name == "p" else "decode",
        epoch=1,
        endpoint="tcp://h:1",
        http_endpoint="",
        fingerprint="f",
        model="m",
        max_model_len=100,
        block_size=16,
        kv_blocks_total=10,
        max_num_seqs=1,
        transport="tcp",
    )
    worker = Worker(info=info)
    worker.link = RecordingLink()  # type: ignore[assignment]
    return worker


EVENTS = [("p", "token", BASE)] + [("d", "token", index) for index in range(BASE + 1, LAST + 1)]
faults = st.lists(
    st.one_of(
        st.tuples(st.sampled_from("pd"), st.just("token"), st.integers(0, LAST)),
        st.tuples(st.sampled_from("pd"), st.sampled_from(["failed", "lost"]), st.just(0)),
        st.just(("", "abort", 0)),
    ),
    max_size=4,
)


@given(faults=faults, seed=st.integers(0, 10_000), shuffle=st.booleans())
def test_any_order_of_events(faults: list[tuple[str, str, int]], seed: int, shuffle: bool) -> None:
    chooser = random.Random(seed)
    events = list(EVENTS)
    if shuffle:
        chooser.shuffle(events)
    elif chooser.random() < 0.5:
        events.append(events.pop(0))  # all of D overtakes P
    for fault in faults:
        events.insert(chooser.randint(0, len(events)), fault)
    cluster = Cluster(gateway_id="g", epoch=1, model="m")
    workers = {"p": make_worker("p"), "d": make_worker("d")}
    owner = Owner()
    attempt = Attempt(cluster, owner, prefill=workers["p"], decode=workers["d"], base=BASE)
    sampling = SamplingParams(max_tokens=LAST + 1)
    request = GenerationRequest(
        request_id="r", prompt_ids=(1,) * 5, sampling=sampling, deadline_s=1.0
    )
    attempt.start(request, token_ids=(1,) * (5 + BASE), ttl_s=1.0)
    aborted = False
    for name, kind, index in events:
        match kind:
            case "token":
                output = TokenOutput(
                    request_id="r",
                    transfer_id=attempt.transfer_id,
                    index=index,
                    token_ids=(100 + index,),
                    finish_reason="length" if index == LAST else None,
                )
                attempt.on_output(name, output)
            case "failed":
                failed = RequestFailed(
                    request_id="r", transfer_id="t", code="worker_lost", message="", retryable=True
                )
                attempt.on_failed(name, failed)
            case "lost":
                attempt.on_lost(name, WorkerLost("x"))
            case "abort":
                attempt.abort()
                aborted = True
    # In order, without gaps, whatever came.
    assert owner.tokens == [100 + BASE + i for i in range(len(owner.tokens))]
    assert owner.finished + len(owner.failures) <= 1
    if not faults and not shuffle:
        assert owner.finished == 1
    over = owner.finished or owner.failures or aborted
    for worker in workers.values():
        assert bool(worker.attempts) == (not over)
        assert bool(worker.sent) == (not over)
        aborts = [m for m in worker.link.sent if isinstance(m, AbortRequest)]  # type: ignore[union-attr]
        assert len(aborts) == (1 if over and not owner.finished else 0)
    attempt.abort()


@pytest.mark.parametrize("seed", range(4))
async def test_storm(client: Client, cluster: ScriptedCluster, script: Script, seed: int) -> None:
    """Workers fail, break the order, die and come back under load: no wrong text, nothing left."""
    chooser = random.Random(seed)
    name = cluster.model.name
    good = Script(answer=script.answer, delay_s=0.002)
    for role in ("prefill", "decode"):
        for _ in range(2):
            await cluster.add(ScriptedWorker(role, good, model=name))
    await cluster.show_all()
    everyone = list(cluster.workers)

    async def disturb() -> None:
        while True:
            await asyncio.sleep(0.03)
            worker = chooser.choice(cluster.workers)
            kind = chooser.choice(["fail", "gap", "die"])
            at = chooser.randint(0, 8)
            if kind == "fail":
                worker.script = Script(answer=script.answer, fail_at=at, delay_s=0.002)
            elif kind == "gap":
                worker.script = Script(
                    answer=script.answer,
                    delay_s=0.002,
                    tamper=lambda output, at=at: [] if output.index == at else [output],
                )
            else:
                await worker.close()
                cluster.workers.remove(worker)
                again = ScriptedWorker(worker.role, good, name=worker.id, model=name)
                everyone.append(await cluster.add(again))
                await cluster.show_all_registered()
            await asyncio.sleep(0.03)
            worker.script = good

    async def ask(index: int) -> str:
        await asyncio.sleep(index * 0.01)
        body = {"messages": MESSAGES, "stream": True}
        if index % 5 == 4:  # leaves early
            async with client.session.post(cluster.url + CHAT, json=body) as response:
                await response.content.readany()
            return "left"
        events = await client.stream(CHAT)
        if events[-1] != b"[DONE]":
            assert b'"error"' in events[-1]
            return "error"
        deltas = [json.loads(event)["choices"][0] for event in events[:-1]]
        assert "".join(delta["delta"]["content"] for delta in deltas) == TEXT
        assert len(deltas) == len(script.answer)
        return "done"

    disturber = asyncio.create_task(disturb())
    outcomes: list[str | BaseException] = []
    num_requests = 0
    while num_requests <= 2 * len(outcomes):  # until the storm has hit an attempt
        assert len(outcomes) < 400, "no attempt was repeated"
        outcomes += await asyncio.gather(*(ask(i) for i in range(40)), return_exceptions=True)
        num_requests = sum(len(worker.seen.requests) for worker in everyone)
    disturber.cancel()
    await asyncio.gather(disturber, return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, AssertionError)]
    assert all('"code":' in str(outcome) for outcome in refused), refused
    assert outcomes.count("done") >= len(outcomes) / 2, outcomes
    await wait_until(lambda: cluster.server.num_open_requests == 0)
    await wait_until(lambda: all(not worker.attempts for worker in cluster.cluster.workers))
    await wait_until(lambda: all(not worker.num_running for worker in cluster.workers))


def test_a_pair_that_refuses_each_other_is_noted() -> None:
    cluster = Cluster(gateway_id="g", epoch=1, model="m")
    workers = {"p": make_worker("p"), "d": make_worker("d")}
    owner = Owner()
    attempt = Attempt(cluster, owner, prefill=workers["p"], decode=workers["d"], base=0)
    sampling = SamplingParams(max_tokens=3)
    request = GenerationRequest(request_id="r", prompt_ids=(1,), sampling=sampling, deadline_s=1.0)
    attempt.start(request, token_ids=(1,), ttl_s=1.0)
    failed = RequestFailed(
        request_id="r", transfer_id=attempt.transfer_id,
        code="incompatible_peer", message="layouts differ", retryable=True,
    )  # fmt: skip
    attempt.on_failed("d", failed)
    assert [type(error) for error in owner.failures] == [IncompatiblePeer]
    assert cluster._incompatible == {Pair("p", "d")}
