"""With fp32 weights, greedy output over HTTP is transformers' float32 output, token for token."""

from __future__ import annotations

import asyncio

import aiohttp

from tests.integration.conftest import on
from tests.integration.prompts import Case, cases
from tests.integration.reference import MARGIN, Reference
from tests.integration.running_cluster import Answer, RunningCluster, ask

_NUM_CLIENTS = 16
EOS_ID = 2


async def _ask(
    cluster: RunningCluster, session: aiohttp.ClientSession, case: Case, **fields: object
) -> Answer:
    return await ask(
        cluster,
        session,
        case.prompt,
        max_tokens=case.max_tokens,
        ignore_eos=case.ignore_eos,
        **fields,
    )


def _differences(reference: Reference, answers: list[tuple[Case, Answer]]) -> list[str]:
    """Everything about the answers that transformers would have done otherwise."""
    found = []
    for case, answer in answers:
        is_ids = isinstance(case.prompt, list) and isinstance(case.prompt[0], int)
        if answer.prompt_ids != (case.prompt if is_ids else reference.encode(case.prompt)):
            found.append(f"{case.name}: the prompt's tokens differ")
        wrong = reference.mismatches(answer.prompt_ids, answer.token_ids)
        found += [f"{case.name}: {text}" for text in wrong]
        ended = answer.token_ids[-1] == EOS_ID and not case.ignore_eos
        reason = "stop" if ended else "length"
        if answer.finish_reason != reason or (not ended and case.max_tokens != _length(answer)):
            found.append(f"{case.name}: {answer.finish_reason} after {_length(answer)} tokens")
        if not case.ignore_eos and EOS_ID in answer.token_ids[:-1]:
            found.append(f"{case.name}: went on after the end")
        visible = answer.token_ids[:-1] if ended else answer.token_ids
        text = reference.tokenizer.decode(visible, skip_special_tokens=True)
        if text != answer.text:
            found.append(f"{case.name}: {answer.text!r} is not {text!r}")
    return found


def _length(answer: Answer) -> int:
    return len(answer.token_ids)


@on("fp32-1p1d", "fp32-2p2d")
async def test_alone(
    cluster: RunningCluster,
    session: aiohttp.ClientSession,
    reference: Reference,
    text_ids: list[int],
) -> None:
    answers = [(case, await _ask(cluster, session, case)) for case in cases(text_ids)]
    assert len(answers) >= 30
    assert _differences(reference, answers) == []
    cluster.wait_idle()


@on("fp32-1p1d", "fp32-2p2d")
async def test_with_16_clients(
    cluster: RunningCluster,
    session: aiohttp.ClientSession,
    reference: Reference,
    text_ids: list[int],
) -> None:
    clients = asyncio.Semaphore(_NUM_CLIENTS)

    async def ask_one(case: Case) -> tuple[Case, Answer]:
        async with clients:
            # With a salt of its own it can't use what other prompts left in the caches.
            return case, await _ask(cluster, session, case, cache_salt=case.name)

    answers = await asyncio.gather(*(ask_one(case) for case in cases(text_ids)))
    assert not any(_num_cached(answer) for _, answer in answers)
    assert _differences(reference, list(answers)) == []
    cluster.wait_idle()


@on("fp32-1p1d", "fp32-2p2d")
async def test_again_from_the_prefix_cache(
    cluster: RunningCluster,
    session: aiohttp.ClientSession,
    reference: Reference,
    text_ids: list[int],
) -> None:
    chosen = [case for case in cases(text_ids) if case.name in ("513 tokens", "chat turns")]
    for case in chosen:
        await _ask(cluster, session, case)
    answers = [(case, await _ask(cluster, session, case)) for case in chosen]
    assert _differences(reference, answers) == []
    if len(cluster.start_census) == 2:  # with more workers, another one may be chosen
        assert all(_num_cached(answer) for _, answer in answers)
    cluster.wait_idle()


@on("fp32-1p1d")
async def test_generate_itself(
    cluster: RunningCluster, session: aiohttp.ClientSession, reference: Reference
) -> None:
    """The judge above, checked against what the words say: ``generate``, step by step."""
    for prompt in ("The three primary colours are", "def add(a, b):"):
        answer = await ask(cluster, session, prompt, max_tokens=20)
        assert min(reference.margins(answer.prompt_ids, answer.token_ids)) > MARGIN, "pick another"
        assert answer.token_ids == reference.generate(reference.encode(prompt), 20)


def test_the_judge_can_say_no(reference: Reference) -> None:
    prompt = reference.encode("The three primary colours are")
    output = reference.generate(prompt, 8)
    assert reference.mismatches(prompt, output) == []
    output[5] += 1
    wrong = reference.mismatches(prompt, output)
    assert wrong
    assert wrong[0].startswith("[5]")


def _num_cached(answer: Answer) -> int:
    cached: int = answer.usage["prompt_tokens_details"]["cached_tokens"]
    return cached
