"""Every request field of OpenAI's and vLLM's APIs: honoured, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from openai.types import chat, completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from gateway.request import decoding, schema
from mesh.messages import TokenOutput
from tests.unit.gateway.client import CHAT, COMPLETIONS, MESSAGES, Client
from tests.unit.gateway.scripted_cluster import Script, ScriptedCluster

# vLLM entrypoints/openai: what its two requests have beyond OpenAI's.
VLLM = """
    add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
    chat_template_kwargs continue_final_message documents ec_transfer_params ignore_eos
    include_reasoning include_stop_str_in_output kv_transfer_params length_penalty
    logits_processors media_io_kwargs min_p min_tokens mm_processor_kwargs priority prompt_embeds
    prompt_logprobs repetition_detection repetition_penalty request_id return_token_ids
    return_tokens_as_token_ids skip_special_tokens spaces_between_special_tokens stop_token_ids
    structured_outputs thinking_token_budget top_k truncate_prompt_tokens use_beam_search vllm_xargs
""".split()  # noqa: SIM905
CHAT_ALONE = {"add_generation_prompt", "continue_final_message", "chat_template_kwargs"}


def known(kind: type[msgspec.Struct]) -> set[str]:
    return {*kind.__struct_fields__, *decoding.refused_fields(kind)}


def test_every_field_of_the_openai_package_is_known() -> None:
    of_chat = set(chat_create_params.CompletionCreateParamsBase.__annotations__)
    assert len(of_chat) > 30
    assert of_chat | {"stream"} <= known(schema.ChatRequest)
    of_completions = set(completion_create_params.CompletionCreateParamsBase.__annotations__)
    assert len(of_completions) > 15
    assert of_completions | {"stream"} <= known(schema.CompletionRequest)
    of_stream = chat.ChatCompletionStreamOptionsParam.__annotations__
    assert set(of_stream) <= set(schema.StreamOptions.__struct_fields__)
    of_assistant = chat.ChatCompletionAssistantMessageParam.__annotations__
    assert set(of_assistant) <= set(schema.ChatMessage.__struct_fields__)


def test_every_field_of_vllm_is_known() -> None:
    assert set(VLLM) <= known(schema.ChatRequest)
    assert set(VLLM) - CHAT_ALONE <= known(schema.CompletionRequest)


def test_nothing_is_both_served_and_refused() -> None:
    for kind in (schema.ChatRequest, schema.CompletionRequest):
        assert not set(kind.__struct_fields__) & set(decoding.refused_fields(kind))


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("moood", 1, "unknown_parameter"),
        ("moood", None, "unknown_parameter"),
        ("prompt_logprobs", 1, "unsupported_parameter"),
        ("use_beam_search", 1, "unsupported_parameter"),
        ("suffix", "x", "unsupported_parameter"),
        ("top_k", "x", "invalid_request"),
    ],
)
async def test_the_code_says_why(client: Client, field: str, value: object, code: str) -> None:
    for path, base in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "a"})):
        status, body = await client.post(path, {**base, field: value})
        assert status == 400
        assert (body["error"]["code"], body["error"]["param"]) == (code, field)
        assert field in body["error"]["message"]


def test_messages_of_an_answer_can_be_sent_back() -> None:
    answer = chat.ChatCompletionMessage(role="assistant", content="Hi.", annotations=[])
    messages = [*MESSAGES, answer.model_dump(), *MESSAGES]
    request = decoding.decode_chat_request(json.dumps({"messages": messages}).encode())
    assert request.messages[1].text == "Hi."


@pytest.fixture
async def ready(client: Client, cluster: ScriptedCluster, script: Script) -> Client:
    await cluster.pair(script)
    await cluster.show_all()
    return client


def _sample_index(output: TokenOutput) -> int:
    return int(output.request_id.rpartition("-")[2])


async def test_best_of_returns_the_likeliest(ready: Client, cluster: ScriptedCluster) -> None:
    mean = [-3.0, -1.0, -2.0, -0.5]

    def tamper(output: TokenOutput) -> list[TokenOutput]:
        sample = _sample_index(output)
        entry = msgspec.structs.replace(output.logprobs[0], logprob=mean[sample])
        return [msgspec.structs.replace(output, logprobs=(entry,))]

    for worker in cluster.workers:
        worker.script.tamper = tamper
    fields = {"best_of": 4, "n": 3, "seed": 1, "max_tokens": 2}
    body = await ready.complete(logprobs=0, **fields)
    shown = [choice["logprobs"]["token_logprobs"][0] for choice in body["choices"]]
    assert shown == [-0.5, -1.0, -2.0]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 8, "all that were made are counted"
    assert body["usage"]["prompt_tokens"] == 1
    without = await ready.complete(**fields, return_token_ids=True)
    assert [choice["logprobs"] for choice in without["choices"]] == [None] * 3
    assert all(len(choice["prompt_token_ids"]) == 1 for choice in without["choices"])
    assert len((await ready.chat(best_of=2, max_tokens=2))["choices"]) == 1


async def test_tokens_can_be_named_by_id(ready: Client, script: Script) -> None:
    names = [f"token_id:{token_id}" for token_id in script.answer[:3]]
    fields: dict[str, Any] = {"return_tokens_as_token_ids": True, "max_tokens": 3}
    body = await ready.complete(logprobs=1, **fields)
    assert body["choices"][0]["logprobs"]["tokens"] == names
    assert [list(top) for top in body["choices"][0]["logprobs"]["top_logprobs"]] == [
        [name] for name in names
    ]
    answer = await ready.chat(logprobs=True, top_logprobs=1, **fields)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == names
    assert content[0]["top_logprobs"][0]["token"] == names[0]
    assert content[0]["bytes"] == list(b"Hello")
    chunks = await ready.stream_json(COMPLETIONS, logprobs=1, **fields)
    assert [chunk["choices"][0]["logprobs"]["tokens"][0] for chunk in chunks] == names


async def test_truncated_prompts_keep_their_end(ready: Client, cluster: ScriptedCluster) -> None:
    body = await ready.complete(prompt=[5, 6, 7, 8], truncate_prompt_tokens=2, max_tokens=1)
    assert body["usage"]["prompt_tokens"] == 2
    assert cluster.workers[0].seen.requests[-1].token_ids == (7, 8)
    long = list(range(100)) * 100
    await ready.complete(prompt=long, truncate_prompt_tokens=-1, max_tokens=10)
    assert cluster.workers[0].seen.requests[-1].token_ids == tuple(long[-8182:])
    text = "one two three four"
    shown = await ready.complete(prompt=text, truncate_prompt_tokens=2, echo=True, max_tokens=1)
    assert shown["choices"][0]["text"] == " three fourHello"
    chat_body = await ready.chat(truncate_prompt_tokens=4, max_tokens=1)
    assert chat_body["usage"]["prompt_tokens"] == 4


async def test_masks_reach_the_workers(ready: Client, cluster: ScriptedCluster) -> None:
    await ready.complete(allowed_token_ids=[9, 7, 9], max_tokens=1)
    assert cluster.workers[0].seen.requests[-1].sampling.allowed_token_ids == (7, 9)
    await ready.complete(bad_words=["dog", " cat"], max_tokens=1)
    encode = cluster.model.tokenizer.encode
    expected = {
        tuple(encode(text, add_special_tokens=False)) for text in ("dog", " dog", " cat", " cat")
    }
    assert set(cluster.workers[0].seen.requests[-1].sampling.bad_words) == expected
