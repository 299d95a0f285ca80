"""The form of streamed and whole answers."""

from __future__ import annotations

import re

import pytest

from tests.unit.gateway.client import CHAT, COMPLETIONS, MESSAGES, Client
from tests.unit.gateway.scripted_cluster import Script, ScriptedCluster

TEXT = "Hello wörld 日本 😀 yes"


@pytest.fixture(autouse=True)
async def pair(cluster: ScriptedCluster, script: Script) -> None:
    await cluster.pair(script)
    await cluster.show_all()


async def test_chat_stream_golden(client: Client, model) -> None:
    model_ids = model.tokenizer.encode("Yes 日", add_special_tokens=False)
    assert len(model_ids) == 4
    client.cluster.workers[0].script.answer = [*model_ids, 2]
    events = await client.stream(CHAT, stream_options={"include_usage": True})
    answer_id, created = re.match(
        rb'{"id":"(chatcmpl-\w{32})".*"created":(\d+)', events[0]
    ).groups()
    golden = [
        b'{"index":0,"delta":{"role":"assistant","content":"Yes"},"logprobs":null,"finish_reason":null}',
        b'{"index":0,"delta":{"content":" "},"logprobs":null,"finish_reason":null}',
        b'{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":null}',
        '{"index":0,"delta":{"content":"日"},"logprobs":null,"finish_reason":null}'.encode(),
        b'{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"stop"}',
    ]
    head = b'{"id":"%s","object":"chat.completion.chunk","created":%s,"model":"%s","choices":[' % (
        answer_id,
        created,
        model.name.encode(),
    )
    usage = (
        b'],"usage":{"prompt_tokens":31,"completion_tokens":5,"total_tokens":36,'
        b'"prompt_tokens_details":{"cached_tokens":0}}}'
    )
    chunks = [head + choice + b'],"usage":null}' for choice in golden]
    assert events == [*chunks, head + usage, b"[DONE]"]


async def test_completion_stream_golden(client: Client, model) -> None:
    events = await client.stream(COMPLETIONS, max_tokens=2)
    answer_id, created = re.match(rb'{"id":"(cmpl-\w{32})".*"created":(\d+)', events[0]).groups()
    head = b'{"id":"%s","object":"text_completion","created":%s,"model":"%s","choices":[' % (
        answer_id,
        created,
        model.name.encode(),
    )
    assert events == [
        head + b'{"index":0,"text":"Hello","logprobs":null,"finish_reason":null}]}',
        head + b'{"index":0,"text":" w","logprobs":null,"finish_reason":"length"}]}',
        b"[DONE]",
    ]


async def test_streamed_text_equals_whole_text(client: Client) -> None:
    chunks = await client.stream_json(CHAT)
    streamed = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    whole = await client.chat()
    assert streamed == whole["choices"][0]["message"]["content"] == TEXT
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert whole["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("include", [False, True])
async def test_stop_strings_streamed_and_whole(client: Client, include: bool) -> None:
    for start in range(len(TEXT)):
        for size in (1, 2, 3, 7):
            stop = TEXT[start : start + size]
            fields = {"stop": ["never", stop], "include_stop_str_in_output": include}
            expected = TEXT[: TEXT.index(stop) + (len(stop) if include else 0)]
            chunks = await client.stream_json(COMPLETIONS, **fields)
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
            whole = (await client.complete(**fields))["choices"][0]
            assert (whole["text"], whole["finish_reason"]) == (expected, "stop")


async def test_min_tokens_hold_stop_strings_off(client: Client) -> None:
    body = await client.complete(stop="l", min_tokens=3)
    assert body["choices"][0]["text"] == "Hello wör"


async def test_one_chunk_a_token(client: Client) -> None:
    chunks = await client.stream_json(CHAT, stream_options={"include_usage": True})
    with_choice = [chunk for chunk in chunks if chunk["choices"]]
    assert len(with_choice) == chunks[-1]["usage"]["completion_tokens"]
    assert [c["choices"][0]["finish_reason"] for c in with_choice[:-1]] == [None] * (
        len(with_choice) - 1
    )


async def test_role_comes_once_with_the_first_token(client: Client) -> None:
    chunks = await client.stream_json(CHAT, n=2)
    for index in (0, 1):
        deltas = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert [d["delta"].get("role") for d in deltas] == ["assistant"] + [None] * (
            len(deltas) - 1
        )
        assert deltas[0]["delta"]["content"] == "Hello"


async def test_continuous_usage_counts_tokens(client: Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await client.stream_json(COMPLETIONS, stream_options=options, max_tokens=4)
    assert chunks[-2]["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is not None for chunk in chunks)


async def test_whole_completion(client: Client, model) -> None:
    body = await client.complete(max_tokens=3)
    assert body["object"] == "text_completion"
    assert body["model"] == model.name
    assert body["choices"] == [
        {"index": 0, "text": "Hello wör", "logprobs": None, "finish_reason": "length"}
    ]
    assert body["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 3,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_completion_default_is_16_tokens(client: Client) -> None:
    client.cluster.workers[0].script.answer = [28]
    status, body = await client.post(COMPLETIONS, {"prompt": "hi"})
    assert status == 200
    assert body["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "num_choices"),
    [("hi", 1), (["hi", "you there"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2)],
)
async def test_prompt_forms(client: Client, prompt: object, num_choices: int) -> None:
    body = await client.complete(prompt=prompt)
    assert [choice["index"] for choice in body["choices"]] == list(range(num_choices))
    assert {choice["text"] for choice in body["choices"]} == {TEXT}


async def test_n_samples_have_their_own_seeds(client: Client, cluster: ScriptedCluster) -> None:
    body = await client.complete(n=3, seed=7, prompt=["a", "b"])
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3, 4, 5]
    assert body["usage"]["prompt_tokens"] == 2
    prefill, decode = (worker.seen.requests for worker in cluster.workers)
    assert sorted(r.sampling.seed for r in decode)[:2] == [7, 7]
    assert len({r.sampling.seed for r in decode}) == 3
    assert len({r.request_id for r in decode}) == 6
    # One prefill per prompt; the other samples follow the first one on its decode worker.
    firsts = {r.transfer_id for r in prefill}
    assert len(prefill) == 2
    assert {r.transfer_id for r in decode if r.prefill is not None} == firsts
    assert {r.after for r in decode if r.prefill is None} == firsts


async def test_echo_puts_the_prompt_first(client: Client, model) -> None:
    body = await client.complete(prompt="Say:", echo=True)
    assert body["choices"][0]["text"] == "Say:" + TEXT
    ids = model.tokenizer.encode("Say 日", add_special_tokens=False)
    chunks = await client.stream_json(COMPLETIONS, prompt=ids, echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Say 日" + TEXT


async def test_chat_logprobs(client: Client) -> None:
    body = await client.chat(logprobs=True, top_logprobs=2, max_tokens=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["Hello", " w"]
    assert content[0]["bytes"] == list(b"Hello")
    assert content[0]["logprob"] == -0.5
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.5]
    chunks = await client.stream_json(CHAT, logprobs=True, max_tokens=2)
    assert [c["choices"][0]["logprobs"]["content"][0]["token"] for c in chunks] == ["Hello", " w"]
    assert chunks[0]["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_completion_logprobs(client: Client) -> None:
    body = await client.complete(logprobs=1, max_tokens=3)
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["Hello", " w", "ör"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{"Hello": -0.5}, {" w": -0.5}, {"ör": -0.5}],
        "text_offset": [0, 5, 7],
    }
    chunks = await client.stream_json(COMPLETIONS, logprobs=0, max_tokens=3)
    assert [c["choices"][0]["logprobs"]["text_offset"] for c in chunks] == [[0], [5], [7]]


async def test_cached_tokens_are_reported(client: Client) -> None:
    client.cluster.workers[0].script.num_cached_tokens = 16
    body = await client.chat()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_ignore_eos_runs_to_the_limit(client: Client) -> None:
    body = await client.chat(ignore_eos=True, max_tokens=30)
    assert body["usage"]["completion_tokens"] == 30
    assert body["choices"][0]["finish_reason"] == "length"


async def test_stop_token_is_not_shown(client: Client, model) -> None:
    [token] = model.tokenizer.encode(" yes", add_special_tokens=False)
    body = await client.chat(stop_token_ids=[token])
    assert body["choices"][0]["message"]["content"] == TEXT.removesuffix(" yes")
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_request_id_is_echoed(client: Client, cluster: ScriptedCluster) -> None:
    body = {"messages": MESSAGES, "stream": True}
    for path, given, expected in (
        (CHAT, "abc-1", "abc-1"),
        (CHAT, "not ok", None),
        ("/v1/nothing", "abc-2", "abc-2"),
    ):
        async with client.session.post(
            cluster.url + path, json=body, headers={"x-request-id": given}
        ) as response:
            await response.read()
            found = response.headers["x-request-id"]
            assert found == expected if expected else re.fullmatch(r"\w{32}", found)


async def test_answer_that_ends_at_the_first_token(client: Client) -> None:
    client.cluster.workers[0].script.answer = [2]
    chunks = await client.stream_json(CHAT, stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] == 1
