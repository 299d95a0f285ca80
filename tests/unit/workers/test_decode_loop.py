"""The decode worker's hot loop by its events: grants, commits, failures and quarantine."""

from __future__ import annotations

from typing import Any

import pytest

from decode_worker.loop import (
    BlocksFreed,
    DecodeLoop,
    KVCommitted,
    KVFailed,
    OpenTransfer,
    Submit,
)
from mesh.errors import TransferFailed
from mesh.messages import DecodeRequest, PeerRef, PrefillDone, SamplingParams
from tests.unit.engine.tiny_llama import TinyLlama, random_prompt
from worker.commands import Abort, CancelTransfer, Failed, GatewayLost, Tokens

PREFILL = PeerRef(worker_id="p", epoch=1, endpoint="tcp://nowhere:1")


class Worker:
    """A loop with the pool at hand; the KV that "arrives" is whatever the blocks hold."""

    def __init__(self, tiny_llama: TinyLlama, **config: Any) -> None:
        self.engine = tiny_llama.engine(**config)
        self.loop = DecodeLoop(self.engine)
        self.pool = self.engine.scheduler.pool

    @property
    def num_used(self) -> int:
        self.pool.check_integrity()
        return self.pool.num_blocks - self.pool.num_free

    def submit(
        self, name: str, prompt: list[int], max_tokens: int = 4, *, gateway: str = "g",
        prefill: PeerRef | None = PREFILL, ttl_s: float = 3600.0, after: str = "",
        num_emitted: int = 0,
    ) -> None:  # fmt: skip
        request = DecodeRequest(
            request_id=name,
            transfer_id=name,
            token_ids=tuple(prompt),
            num_prompt_tokens=len(prompt) - num_emitted,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            ttl_s=ttl_s,
            prefill=prefill,
            after=after,
        )
        self.loop.handle(Submit(request, gateway))

    def commit(self, name: str, *, finished: bool = False) -> None:
        done = PrefillDone(transfer_id=name, first_token_id=1, finished=finished, num_chunks=1)
        self.loop.handle(KVCommitted(done))

    def step(self) -> list[Any]:
        return self.loop.step()[0]

    def run(self, max_steps: int = 200) -> dict[str, list[int]]:
        """Tokens by transfer until nothing runs any more."""
        tokens: dict[str, list[int]] = {}
        for _ in range(max_steps):
            for event in of_type(self.step(), Tokens):
                for output in event.outputs:
                    tokens.setdefault(output.transfer_id, []).extend(output.token_ids)
            if not self.engine.scheduler.has_work:
                return tokens
        raise AssertionError("still running")


def of_type(events: list[Any], kind: type[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_a_request_is_granted_then_runs_once_its_kv_is_committed(tiny_llama: TinyLlama) -> None:
    worker = Worker(tiny_llama)
    worker.submit("a", random_prompt(40, seed=80))
    (opened,) = worker.step()
    assert isinstance(opened, OpenTransfer)
    assert (opened.transfer_id, opened.prefill, opened.first_index) == ("a", PREFILL, 0)
    assert len(opened.block_ids) == worker.num_used == 3
    assert worker.step() == []
    worker.commit("a")
    outputs = [output for _ in range(3) for event in worker.step() for output in event.outputs]
    assert [output.index for output in outputs] == [1, 2, 3]
    assert [output.finish_reason for output in outputs] == [None, None, "length"]
    assert worker.num_used == 0


def test_a_failed_transfer_is_retryable_and_its_blocks_wait_for_safety(
    tiny_llama: TinyLlama,
) -> None:
    worker = Worker(tiny_llama)
    worker.submit("a", random_prompt(40, seed=81))
    worker.step()
    worker.loop.handle(KVFailed("a", TransferFailed("lease_expired")))
    events = worker.step()
    (failed,) = of_type(events, Failed)
    assert (failed.message.code, failed.message.retryable) == ("transfer_failed", True)
    assert of_type(events, CancelTransfer) == [CancelTransfer("a")]
    assert (worker.pool.num_quarantined, worker.num_used) == (3, 3)
    worker.submit("a", random_prompt(40, seed=81))
    assert "in use" in of_type(worker.step(), Failed)[0].message.message
    worker.loop.handle(BlocksFreed("a"))
    assert (worker.pool.num_quarantined, worker.num_used) == (0, 0)
    worker.loop.handle(BlocksFreed("a"))
    worker.loop.handle(KVFailed("a", TransferFailed("again")))
    assert worker.step() == []


@pytest.mark.parametrize("how", ["commit", "finished commit", "blocks freed"])
def test_an_aborted_grant_is_quarantined_until_either_ending_comes(
    tiny_llama: TinyLlama, how: str
) -> None:
    worker = Worker(tiny_llama)
    worker.submit("a", random_prompt(40, seed=82))
    worker.step()
    worker.loop.handle(Abort("a"))
    assert worker.step() == [CancelTransfer("a")]
    assert worker.pool.num_quarantined == 3
    if how == "blocks freed":
        worker.loop.handle(BlocksFreed("a"))
    else:
        worker.commit("a", finished=how == "finished commit")
    assert (worker.pool.num_quarantined, worker.num_used) == (0, 0)


def test_blocks_of_the_prefix_cache_are_not_withheld_with_the_granted(
    tiny_llama: TinyLlama,
) -> None:
    worker = Worker(tiny_llama)
    prompt = random_prompt(40, seed=83)
    worker.submit("first", prompt, prefill=None)
    worker.run()
    worker.submit("second", prompt)
    (opened,) = worker.step()
    assert (opened.first_index, len(opened.block_ids)) == (2, 1)
    worker.loop.handle(Abort("second"))
    assert (worker.pool.num_quarantined, worker.num_used) == (1, 1)
    worker.loop.handle(BlocksFreed("second"))
    assert worker.num_used == 0


@pytest.mark.parametrize("moment", ["waiting", "granted", "running"])
def test_an_abort_at_any_state_frees_what_it_may(tiny_llama: TinyLlama, moment: str) -> None:
    worker = Worker(tiny_llama)
    worker.submit("a", random_prompt(20, seed=84), 50)
    if moment != "waiting":
        worker.step()
    if moment == "running":
        worker.commit("a")
        worker.step()
    worker.loop.handle(Abort("a"))
    worker.loop.handle(Abort("a"))
    events = worker.step()
    assert not of_type(events, Tokens) + of_type(events, Failed)
    assert bool(of_type(events, CancelTransfer)) == (moment == "granted")
    worker.loop.handle(BlocksFreed("a"))
    assert worker.num_used == 0


def test_an_answer_that_ended_at_its_first_token_is_dropped_silently(
    tiny_llama: TinyLlama,
) -> None:
    worker = Worker(tiny_llama)
    worker.submit("a", random_prompt(20, seed=85))
    worker.step()
    worker.commit("a", finished=True)
    assert worker.step() == []
    assert worker.num_used == 0


def test_kv_is_published_to_the_prefix_cache_only_after_the_commit(tiny_llama: TinyLlama) -> None:
    worker = Worker(tiny_llama)
    prompt = random_prompt(40, seed=86)
    worker.submit("a", prompt, 20)
    worker.step()
    worker.submit("before", prompt)
    assert of_type(worker.step(), OpenTransfer)[0].first_index == 0
    worker.commit("a")
    worker.submit("afterwards", prompt)
    assert of_type(worker.step(), OpenTransfer)[0].first_index == 2


def test_without_a_prefill_worker_it_computes_the_prompt_itself(tiny_llama: TinyLlama) -> None:
    worker = Worker(tiny_llama)
    prompt = random_prompt(40, seed=87)
    worker.submit("a", prompt, 6, prefill=None)
    assert worker.run() == {"a": tiny_llama.greedy(prompt, 6)}


def test_a_replay_goes_on_at_the_next_index(tiny_llama: TinyLlama) -> None:
    worker = Worker(tiny_llama)
    prompt = random_prompt(20, seed=88)
    answer = tiny_llama.greedy(prompt, 8)
    worker.submit("a", prompt + answer[:3], 8, prefill=None, num_emitted=3)
    (event,) = of_type(worker.step(), Tokens)
    assert event.outputs[0].index == 3
    assert [*event.outputs[0].token_ids, *worker.run()["a"]] == answer[3:]


def test_a_request_that_could_never_fit_is_refused(tiny_llama: TinyLlama) -> None:
    worker = Worker(tiny_llama, kv_blocks=4)
    worker.submit("fits", [1] * 60, 4, prefill=None)
    worker.submit("does not", [1] * 61, 4, prefill=None)
    (failed,) = of_type(worker.step(), Failed)
    assert (failed.message.transfer_id, failed.message.code) == (
        "does not",
        "context_length_exceeded",
    )


def test_what_waits_past_its_deadline_fails(tiny_llama: TinyLlama) -> None:
    worker = Worker(tiny_llama)
    worker.submit("a", random_prompt(20, seed=89), ttl_s=0.0)
    (failed,) = worker.step()
    assert failed.message.code == "deadline_exceeded"
    assert worker.num_used == 0


def test_a_lost_gateway_takes_only_its_own_requests_along(tiny_llama: TinyLlama) -> None:
    worker = Worker(tiny_llama)
    worker.submit("a", random_prompt(20, seed=90), gateway="g1", prefill=None)
    worker.submit("b", random_prompt(20, seed=91), gateway="g2", prefill=None)
    worker.submit("held", random_prompt(20, seed=90), gateway="g1", after="b")
    worker.loop.handle(GatewayLost("g1"))
    assert set(worker.run()) == {"b"}


@pytest.mark.parametrize("ending", ["commit", "failure", "abort"])
def test_samples_held_for_a_siblings_kv_start_at_whatever_ends_the_wait(
    tiny_llama: TinyLlama, ending: str
) -> None:
    worker = Worker(tiny_llama)
    prompt = random_prompt(40, seed=92)
    worker.submit("first", prompt)
    worker.submit("held", prompt, 6, prefill=None, after="first")
    worker.submit("gone", prompt, 6, prefill=None, after="first")
    worker.loop.handle(Abort("gone"))
    worker.step()
    assert worker.loop.snapshot.waiting == 2
    assert worker.engine.scheduler.num_waiting == 1
    if ending == "commit":
        worker.commit("first")
    elif ending == "failure":
        worker.loop.handle(KVFailed("first", TransferFailed("gone")))
    else:
        worker.loop.handle(Abort("first"))
    tokens = worker.run()
    assert len(tokens["held"]) == 6
    assert "gone" not in tokens
    if ending != "commit":
        assert tokens["held"] == tiny_llama.greedy(prompt, 6)
