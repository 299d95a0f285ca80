"""The prefill worker's hot loop by its events: what is sent when, and what each ending frees."""

from __future__ import annotations

from typing import Any

import pytest

from engine.scheduling.scheduler import SHED_AFTER_S
from mesh.messages import PeerRef, PrefillRequest, SamplingParams
from prefill_worker.loop import (
    Congestion,
    FinishTransfer,
    Granted,
    PrefillLoop,
    SendBlocks,
    Submit,
    TransferEnded,
)
from tests.unit.engine.tiny_llama import VOCAB_SIZE, TinyLlama, random_prompt
from worker.commands import Abort, CancelTransfer, Failed, GatewayLost, Tokens

DECODE = PeerRef(worker_id="d", epoch=1, endpoint="tcp://nowhere:1")
BLOCK_SIZE = 16


class Worker:
    """A loop with the number of free blocks at hand."""

    def __init__(self, tiny_llama: TinyLlama, **config: Any) -> None:
        self.engine = tiny_llama.engine(role="prefill", **config)
        self.loop = PrefillLoop(self.engine)
        self.pool = self.engine.scheduler.pool

    @property
    def num_used(self) -> int:
        self.pool.check_integrity()
        return self.pool.num_blocks - self.pool.num_free

    def submit(
        self, name: str, prompt: list[int], max_tokens: int = 8, *, gateway: str = "g",
        ttl_s: float = 3600.0, **sampling: Any,
    ) -> None:  # fmt: skip
        request = PrefillRequest(
            request_id=name,
            transfer_id=name,
            token_ids=tuple(prompt),
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling}),
            ttl_s=ttl_s,
            decode=DECODE,
        )
        self.loop.handle(Submit(request, gateway))

    def step(self) -> list[Any]:
        return self.loop.step()[0]

    def let_pass(self, seconds: float) -> None:
        """What has arrived is this much older from now on."""
        for sequence in self.engine.scheduler.live_sequences():
            sequence.arrival_s -= seconds


def of_type(events: list[Any], kind: type[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_a_prompt_ends_with_its_blocks_its_token_and_the_last_word(tiny_llama: TinyLlama) -> None:
    worker = Worker(tiny_llama)
    prompt = random_prompt(20, seed=60)
    worker.submit("a", prompt)
    blocks, tokens, finish = worker.step()
    (token,) = tiny_llama.greedy(prompt, 1)
    assert isinstance(blocks, SendBlocks)
    assert (blocks.first_index, len(blocks.block_ids)) == (0, 2)
    assert isinstance(tokens, Tokens)
    assert tokens.outputs[0].token_ids == (token,)
    assert finish == FinishTransfer("a", first_token_id=token, finished=False)
    assert worker.num_used == 2
    worker.loop.handle(TransferEnded("a", None))
    assert worker.step() == []
    assert worker.num_used == 0


@pytest.mark.parametrize(
    ("length", "budget", "sent"),
    [
        (32, 31, [(0, 1), (1, 1)]),  # a chunk that ends one token before the prompt's end
        (17, 16, [(0, 1), (1, 1)]),
        (33, 31, [(0, 1), (1, 2)]),
        (40, 15, [None, (0, 1), (1, 2)]),  # a chunk inside the first block sends nothing
        (16, 15, [None, (0, 1)]),
        (48, 48, [(0, 3)]),
    ],
)
def test_each_chunk_sends_whole_blocks_and_the_last_one_the_rest(
    tiny_llama: TinyLlama, length: int, budget: int, sent: list[tuple[int, int] | None]
) -> None:
    worker = Worker(tiny_llama, max_batched_tokens=budget)
    worker.submit("a", random_prompt(length, seed=61))
    for number, expected in enumerate(sent):
        events = worker.step()
        blocks = of_type(events, SendBlocks)
        assert [(event.first_index, len(event.block_ids)) for event in blocks] == (
            [] if expected is None else [expected]
        )
        assert bool(of_type(events, FinishTransfer)) == (number == len(sent) - 1)


def test_blocks_found_in_the_cache_are_sent_too(tiny_llama: TinyLlama) -> None:
    worker = Worker(tiny_llama)
    prompt = random_prompt(40, seed=62)
    for name in ("first", "second"):
        worker.submit(name, prompt)
        events = worker.step()
        worker.loop.handle(TransferEnded(name, None))
    (blocks,) = of_type(events, SendBlocks)
    assert (blocks.first_index, len(blocks.block_ids)) == (0, 3)
    assert of_type(events, Tokens)[0].outputs[0].num_cached_tokens == 32


def test_an_answer_of_one_token_sends_nothing(tiny_llama: TinyLlama) -> None:
    worker = Worker(tiny_llama)
    worker.submit("a", random_prompt(20, seed=63), 1)
    events = worker.step()
    assert not of_type(events, SendBlocks)
    assert of_type(events, FinishTransfer)[0].finished
    assert of_type(events, Tokens)[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_an_abort_pins_the_blocks_until_no_write_is_in_flight(
    tiny_llama: TinyLlama, num_steps: int
) -> None:
    worker = Worker(tiny_llama, max_batched_tokens=16)
    worker.submit("a", random_prompt(40, seed=64))
    for _ in range(num_steps):
        worker.step()
    used = worker.num_used
    worker.loop.handle(Abort("a"))
    worker.loop.handle(Abort("a"))
    events = worker.step()
    assert CancelTransfer("a") in events
    assert not of_type(events, SendBlocks) + of_type(events, Tokens)
    assert worker.num_used == used
    worker.loop.handle(TransferEnded("a", "cancelled"))
    assert not of_type(worker.step(), Failed)
    assert worker.num_used == 0
    worker.loop.handle(Abort("a"))
    assert worker.step() == []


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_transfer_that_fails_before_the_token_is_a_retryable_failure(
    tiny_llama: TinyLlama, num_steps: int
) -> None:
    worker = Worker(tiny_llama, max_batched_tokens=16)
    worker.submit("a", random_prompt(40, seed=65))
    for _ in range(num_steps):
        worker.step()
    worker.loop.handle(TransferEnded("a", "peer_lost: gone"))
    (failed,) = of_type(worker.step(), Failed)
    assert (failed.gateway_id, failed.message.code) == ("g", "transfer_failed")
    assert failed.message.retryable
    assert worker.num_used == 0


def test_a_transfer_that_fails_after_the_token_is_the_decode_workers_news(
    tiny_llama: TinyLlama,
) -> None:
    worker = Worker(tiny_llama)
    worker.submit("a", random_prompt(20, seed=66))
    worker.step()
    worker.loop.handle(TransferEnded("a", "peer_lost: gone"))
    assert worker.step() == []
    assert worker.num_used == 0


def test_a_lost_gateway_takes_only_its_own_requests_along(tiny_llama: TinyLlama) -> None:
    worker = Worker(tiny_llama)
    worker.submit("a", random_prompt(20, seed=67), gateway="g1")
    worker.submit("b", random_prompt(20, seed=68), gateway="g2")
    worker.loop.handle(GatewayLost("g1"))
    events = worker.step()
    assert of_type(events, CancelTransfer) == [CancelTransfer("a")]
    assert [event.gateway_id for event in of_type(events, Tokens)] == ["g2"]


def test_a_request_past_its_deadline_fails_before_it_is_computed(tiny_llama: TinyLlama) -> None:
    worker = Worker(tiny_llama)
    worker.submit("a", random_prompt(20, seed=69), ttl_s=0.0)
    events = worker.step()
    assert of_type(events, Failed)[0].message.code == "deadline_exceeded"
    assert of_type(events, CancelTransfer) == [CancelTransfer("a")]
    worker.submit("a", random_prompt(20, seed=69))
    (failed,) = worker.step()
    assert "in use" in failed.message.message
    worker.loop.handle(TransferEnded("a", "cancelled"))
    assert worker.step() == []
    assert worker.num_used == 0
    worker.submit("a", random_prompt(20, seed=69))
    assert of_type(worker.step(), Tokens)


@pytest.mark.parametrize(
    ("prompt", "sampling", "code"),
    [
        ([1] * 65, {}, "context_length_exceeded"),
        ([], {}, "internal_error"),
        ([VOCAB_SIZE], {}, "internal_error"),
        ([-1], {}, "internal_error"),
        ([1], {"stop_token_ids": (VOCAB_SIZE,)}, "internal_error"),
        ([1], {"logit_bias": ((-1, 1.0),)}, "internal_error"),
    ],
)
def test_what_cannot_run_is_refused_at_once(
    tiny_llama: TinyLlama, prompt: list[int], sampling: dict[str, Any], code: str
) -> None:
    worker = Worker(tiny_llama, kv_blocks=4)
    worker.submit("a", prompt, **sampling)
    failed, cancelled = worker.step()
    assert failed.message.code == code
    assert not failed.message.retryable
    assert cancelled == CancelTransfer("a")  # it was expected
    worker.loop.handle(TransferEnded("a", "cancelled"))
    assert worker.step() == []


def test_a_transfer_id_in_use_is_refused_and_the_first_goes_on(tiny_llama: TinyLlama) -> None:
    worker = Worker(tiny_llama)
    worker.submit("a", random_prompt(20, seed=70))
    worker.submit("a", random_prompt(20, seed=71), gateway="other")
    events = worker.step()
    assert [event.gateway_id for event in of_type(events, Failed)] == ["other"]
    assert [event.gateway_id for event in of_type(events, Tokens)] == ["g"]


def test_prompts_that_nobody_takes_leave_half_the_pool_to_granted_ones(
    tiny_llama: TinyLlama,
) -> None:
    worker = Worker(tiny_llama, kv_blocks=8)
    for number in range(3):
        worker.submit(f"idle{number}", random_prompt(30, seed=72 + number))
    worker.step()
    assert worker.num_used == 4
    worker.submit("granted", random_prompt(64, seed=75))
    worker.loop.handle(Granted("granted"))
    assert [event.outputs[0].transfer_id for event in of_type(worker.step(), Tokens)] == ["granted"]


def test_a_granted_prompt_sheds_one_that_nobody_takes(tiny_llama: TinyLlama) -> None:
    worker = Worker(tiny_llama, kv_blocks=8)
    worker.submit("idle", random_prompt(60, seed=76))
    worker.step()
    worker.loop.handle(Granted("early"))
    worker.submit("early", random_prompt(70, seed=77))
    assert worker.step() == []
    worker.let_pass(SHED_AFTER_S)
    events = worker.step()
    assert of_type(events, CancelTransfer) == [CancelTransfer("idle")]
    (failed,) = of_type(events, Failed)
    assert (failed.message.transfer_id, failed.message.retryable) == ("idle", True)
    assert worker.num_used == 4
    worker.loop.handle(TransferEnded("idle", "cancelled"))
    assert of_type(worker.step(), Tokens)[0].outputs[0].transfer_id == "early"


@pytest.mark.parametrize("budget", [20, 512])
def test_groups_of_layers_leave_during_the_forward(tiny_llama: TinyLlama, budget: int) -> None:
    worker = Worker(tiny_llama, kv_layer_groups=2, max_batched_tokens=budget)
    worker.loop = PrefillLoop(worker.engine, 2)
    during: list[Any] = []
    worker.loop.emit = during.extend
    prompt = random_prompt(37, seed=91)
    worker.submit("a", prompt)
    after: list[Any] = []
    while not of_type(after, FinishTransfer):
        after += worker.step()
    assert not of_type(after, SendBlocks), "nothing is left for the end of a step"
    sent = of_type(during, SendBlocks)
    offered = {
        (event.first_index + i, event.part) for event in sent for i in range(len(event.block_ids))
    }
    assert sorted(offered) == [(block, part) for block in range(3) for part in range(2)]
    assert sum(len(event.block_ids) for event in sent) == 6, "something was offered twice"
    by_part = [[event.first_index for event in sent if event.part == part] for part in range(2)]
    assert by_part[0] == by_part[1]


def test_congestion_holds_back_prompts_of_that_receiver(tiny_llama: TinyLlama) -> None:
    worker = Worker(tiny_llama)
    worker.loop.handle(Congestion(frozenset({"d"})))
    worker.submit("a", random_prompt(20, seed=60))
    assert not of_type(worker.step(), Tokens)
    worker.loop.handle(Congestion(frozenset({"another"})))
    assert of_type(worker.step(), Tokens)
