"""Bad requests: a 4xx in OpenAI's form that names the field, and nothing lost."""

from __future__ import annotations

import io
import json
from typing import Any

import msgspec
import pytest

from gateway.generation.sampling import build_sampling, seed_of_sample
from gateway.prompts.served_model import SamplingDefaults, ServedModel
from gateway.request import decoding
from mesh.errors import ContextTooLong, InvalidRequest
from tests.unit.gateway.client import CHAT, COMPLETIONS, MESSAGES, Client
from tests.unit.gateway.scripted_cluster import Script, ScriptedCluster


@pytest.fixture
async def ready(client: Client, cluster: ScriptedCluster, script: Script) -> Client:
    await cluster.pair(script)
    await cluster.show_all()
    return client


def chat_body(**fields: Any) -> bytes:
    return json.dumps({"messages": MESSAGES, **fields}).encode()


def completion_body(**fields: Any) -> bytes:
    return json.dumps({"prompt": "hi", **fields}).encode()


BOTH_BAD = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "5"),
    ("max_tokens", 1.5),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("seed", "x"),
    ("seed", 1 << 70),
    ("n", 0),
    ("n", 129),
    ("best_of", 0),
    ("stop", 5),
    ("stop", ""),
    ("stop", ["a", "b", "c", "d", "e"]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", "x"),
    ("ignore_eos", "yes"),
    ("min_tokens", -1),
    ("repetition_penalty", 0),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("logit_bias", {"5": 101}),
    ("logit_bias", [1]),
    ("stream", "true"),
    ("stream_options", {"include_usage": True}),
    ("response_format", {"type": "xml"}),
    ("priority", "high"),
    ("cache_salt", ""),
    ("user", 5),
    ("metadata", "x"),
    ("tools", [{"type": "function"}]),
    ("tool_choice", "required"),
    ("functions", [{}]),
    ("structured_outputs", {"regex": 5}),
    ("guided_json", 5),
    ("logits_processors", ["x"]),
    ("bad_words", [""]),
    ("bad_words", ["x"] * 65),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("store", True),
    ("metadata", {"a": 1}),
    ("metadata", {str(i): "" for i in range(17)}),
    ("verbosity", "high"),
    ("vllm_xargs", {"a": 1}),
    ("a_field_of_the_future", 1),
    ("a_field_of_the_future", None),
    ("use_beam_search", True),
    ("length_penalty", 2.0),
    ("suffix", "tail"),
    ("prompt_logprobs", 1),
    ("reasoning_effort", "high"),
]


@pytest.mark.parametrize(("field", "value"), BOTH_BAD)
def test_bad_value_names_the_field(field: str, value: object) -> None:
    for decode, body in (
        (decoding.decode_chat_request, chat_body(**{field: value})),
        (decoding.decode_completion_request, completion_body(**{field: value})),
    ):
        with pytest.raises(InvalidRequest) as caught:
            decode(body)
        assert (caught.value.param or "").split("[")[0].split(".")[0] == field
        assert field in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [*MESSAGES, {"role": "wizard", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"echo": True}, "echo"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"messages": [{**MESSAGES[0], "mood": "x"}]}, "messages[0].mood"),
        ({"messages": [{**MESSAGES[0], "refusal": "x"}]}, "messages[0].refusal"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"modalities": ["audio"]}, "modalities"),
    ],
)
def test_bad_chat_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decoding.decode_chat_request(chat_body(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"messages": MESSAGES}, "messages"),
    ],
)
def test_bad_completion_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decoding.decode_completion_request(completion_body(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize("missing", ["messages", "prompt"])
def test_missing_field_is_named(missing: str) -> None:
    decode = {
        "messages": decoding.decode_chat_request,
        "prompt": decoding.decode_completion_request,
    }[missing]
    with pytest.raises(InvalidRequest) as caught:
        decode(b"{}")
    assert caught.value.param == missing


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"prompt": "\\ud800"}'],
)
async def test_bad_json_is_400(ready: Client, body: bytes) -> None:
    for path in (CHAT, COMPLETIONS):
        status, answer = await ready.post(path, body)
        assert status == 400, answer
        assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"functions": None, "function_call": "none", "suffix": None, "best_of": 1},
        {"service_tier": "auto", "store": False, "user": "u", "metadata": {"a": "b"}},
        {"response_format": {"type": "text"}, "modalities": ["text"], "logit_bias": None},
        {"temperature": None, "stop": None, "seed": None, "stream": None, "n": None},
        {"use_beam_search": False, "length_penalty": 1.0, "reasoning_effort": None},
        {"safety_identifier": "s", "prompt_cache_key": "k", "verbosity": "medium"},
    ],
)
def test_fields_that_ask_for_nothing_are_accepted(fields: dict[str, Any]) -> None:
    decoding.decode_chat_request(chat_body(**fields))
    decoding.decode_completion_request(completion_body(**fields))


async def test_errors_over_http(ready: Client) -> None:
    status, body = await ready.post(CHAT, {"messages": MESSAGES, "temperature": 3})
    assert status == 400
    assert body == {
        "error": {
            "message": "temperature: Expected `float` <= 2.0",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "invalid_request",
        }
    }
    status, body = await ready.post(CHAT, {"messages": MESSAGES, "model": "gpt-9"})
    assert (status, body["error"]["param"]) == (404, "model")
    assert body["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        [[]],
        ["a", 5],
        [[1], "a"],
        [1, "a"],
        [1.5],
        [True],
        [49152],
        [-1],
        [[1], [49152]],
    ],
)
async def test_bad_prompts(ready: Client, prompt: object) -> None:
    status, body = await ready.post(COMPLETIONS, {"prompt": prompt})
    assert status == 400, body
    assert body["error"]["param"] == "prompt"


async def test_too_long_prompts(ready: Client) -> None:
    for path, fields, param in (
        (COMPLETIONS, {"prompt": [5] * 8192}, "prompt"),
        (COMPLETIONS, {"prompt": "a b " * 5000}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "a b " * 5000}]}, "messages"),
        (COMPLETIONS, {"prompt": [5] * 8000, "max_tokens": 193}, "max_tokens"),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": 8192}, "max_completion_tokens"),
    ):
        status, body = await ready.post(path, fields)
        assert (status, body["error"]["param"]) == (400, param)
        assert body["error"]["code"] == "context_length_exceeded"
    assert (await ready.complete(prompt=[5] * 8191, max_tokens=1))["usage"]["prompt_tokens"] == 8191


async def test_too_many_choices(ready: Client) -> None:
    for fields in ({"prompt": ["a"] * 129}, {"prompt": ["a"] * 2, "n": 65}):
        status, _ = await ready.post(COMPLETIONS, fields)
        assert status == 400


async def test_token_ids_outside_the_vocabulary(ready: Client) -> None:
    for fields, param in (
        ({"stop_token_ids": [49152]}, "stop_token_ids"),
        ({"logit_bias": {"49152": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"allowed_token_ids": [49152]}, "allowed_token_ids"),
        ({"allowed_token_ids": [2], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": [5], "bad_words": ["x"]}, "bad_words"),
    ):
        status, body = await ready.post(CHAT, {"messages": MESSAGES, **fields})
        assert (status, body["error"]["param"]) == (400, param)


async def test_body_over_the_limit_is_413(ready: Client) -> None:
    status, body = await ready.post(
        COMPLETIONS, io.BytesIO(completion_body(prompt="a" * (1 << 20)))
    )
    assert (status, body["error"]["code"]) == (413, "payload_too_large")


async def test_wrong_path_and_method(ready: Client) -> None:
    assert (await ready.post("/v1/nothing", {}))[0] == 404
    status, body = await ready.get(CHAT)
    assert (status, body["error"]["code"]) == (405, "method_not_allowed")


async def test_bad_requests_send_nothing_to_workers(
    ready: Client, cluster: ScriptedCluster
) -> None:
    for field, value in BOTH_BAD:
        await ready.post(CHAT, {"messages": MESSAGES, field: value})
    assert all(not worker.seen.requests for worker in cluster.workers)
    assert cluster.server.num_open_requests == 0


def sampling(model: ServedModel, *, max_model_len: int = 8192, **fields: Any):
    request = decoding.decode_chat_request(chat_body(**fields))
    return build_sampling(request, model, num_prompt_tokens=10, max_model_len=max_model_len)


def test_openai_defaults(model: ServedModel) -> None:
    built = sampling(model)
    assert (built.temperature, built.top_p, built.top_k, built.min_p) == (1.0, 1.0, 0, 0.0)
    assert built.max_tokens == 8182
    assert built.stop_token_ids == (2,)
    assert built.num_logprobs == -1
    assert sampling(model).seed != built.seed


def test_defaults_of_the_model_and_the_request_over_them(model: ServedModel) -> None:
    own = SamplingDefaults(temperature=0.2, top_k=20)
    model = msgspec.structs.replace(model, defaults=own)
    assert sampling(model).temperature == 0.2
    built = sampling(model, temperature=0, top_k=-1)
    assert (built.temperature, built.top_k) == (0.0, 0)


def test_every_field_reaches_the_workers(model: ServedModel) -> None:
    built = sampling(
        model,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=-3,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"7": -100},
        min_tokens=3,
        max_completion_tokens=9,
        max_tokens=5,
        stop_token_ids=[5, 2],
        logprobs=True,
        top_logprobs=4,
    )
    assert built.max_tokens == 9
    assert built.seed == (-3) & ((1 << 63) - 1)
    assert built.logit_bias == ((7, -100.0),)
    assert built.stop_token_ids == (2, 5)
    assert built.num_logprobs == 4
    assert (built.top_p, built.top_k, built.min_p, built.min_tokens) == (0.9, 5, 0.1, 3)
    assert (built.repetition_penalty, built.presence_penalty) == (1.1, 0.5)
    assert sampling(model, ignore_eos=True).stop_token_ids == ()


def test_context_is_the_workers(model: ServedModel) -> None:
    assert sampling(model, max_model_len=11).max_tokens == 1
    with pytest.raises(ContextTooLong):
        sampling(model, max_model_len=10)


def test_seeds_of_samples_differ_and_start_with_the_own() -> None:
    seeds = [seed_of_sample(7, sample) for sample in range(128)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 128
    assert all(0 <= seed < 1 << 63 for seed in seeds)
