"""A ready cluster as seen by a client and an operator."""

from __future__ import annotations

import json
import random
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.integration.separate_roles import SeparateRoles
from tests.integration.up_process import Up

Prompt = str | list[int] | list[dict[str, Any]]
"""Text or token ids for /v1/completions, messages for /v1/chat/completions."""

_CENSUS = (
    "attempts_here",
    "kv_blocks_free",
    "kv_blocks_quarantined",
    "open_transfers",
    "running",
    "waiting",
    "queued_tokens",
)
"""What must be back at its start when nobody is served."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice, with the ids behind it."""

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    usage: dict[str, Any] = field(default_factory=dict)


class RunningCluster:
    """Owns one ``pdmesh up``, or roles started one by one; ``close()`` ends it."""

    def __init__(self, up: Up | SeparateRoles) -> None:
        self.up = up
        self.url = up.read_url()
        self.model: str = self.get("/v1/models")["data"][0]["id"]
        self.start_census = self.census()

    def close(self) -> None:
        """Kill every process."""
        self.up.close()

    def get(self, path: str) -> Any:
        """The JSON at ``path``."""
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return json.load(response)

    def census(self) -> dict[str, dict[str, int]]:
        """What every worker holds for requests, by worker id."""
        workers = self.get("/debug/census")["workers"]
        return {worker["id"]: {key: worker.get(key, -1) for key in _CENSUS} for worker in workers}

    def wait_idle(self, timeout_s: float = 60.0) -> float:
        """Wait until the census is the one after the start; seconds it took."""
        start_s = time.monotonic()
        while (now := self.census()) != self.start_census:
            assert time.monotonic() - start_s < timeout_s, f"{now} is not {self.start_census}"
            time.sleep(0.02)
        return time.monotonic() - start_s

    def measure_step_s(self) -> float:
        """Seconds that a prefill worker takes for a step of a long prompt, on average."""
        [worker] = [w for w in self.get("/debug/census")["workers"] if w["role"] == "prefill"]
        prompt = random.choices(range(10, 40_000), k=700)
        body = json.dumps({"prompt": prompt, "max_tokens": 1, "ignore_eos": True}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", body, headers)
        num_before = _num_steps(worker["http_endpoint"])
        start_s = time.monotonic()
        with urllib.request.urlopen(request, timeout=240) as response:
            response.read()
        elapsed_s = time.monotonic() - start_s
        return elapsed_s / (_num_steps(worker["http_endpoint"]) - num_before)


def _num_steps(endpoint: str) -> int:
    with urllib.request.urlopen(f"{endpoint}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    [line] = [line for line in lines if line.startswith("vllm:iteration_tokens_total_count{")]
    return round(float(line.split()[-1]))


async def ask(
    cluster: RunningCluster, session: aiohttp.ClientSession, prompt: Prompt, **fields: Any
) -> Answer:
    """One answer, not streamed."""
    path, body = _body(prompt, fields)
    async with session.post(cluster.url + path, json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    choice = answer["choices"][0]
    in_chat = "message" in choice
    return Answer(
        prompt_ids=answer["prompt_token_ids"] if in_chat else choice["prompt_token_ids"],
        token_ids=choice["token_ids"],
        text=choice["message"]["content"] if in_chat else choice["text"],
        finish_reason=choice["finish_reason"],
        usage=answer["usage"],
    )


async def stream(
    cluster: RunningCluster,
    session: aiohttp.ClientSession,
    prompt: Prompt,
    headers: dict[str, str] | None = None,
    **fields: Any,
) -> AsyncIterator[dict[str, Any]]:
    """The events of one streamed answer; the last must be ``[DONE]``."""
    path, body = _body(prompt, {**fields, "stream": True})
    async with session.post(cluster.url + path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        done = False
        async for line in response.content:
            assert not done or line == b"\n"
            if line == b"data: [DONE]\n":
                done = True
            elif line != b"\n":
                yield json.loads(line.removeprefix(b"data: "))
        assert done


def joined(events: Sequence[dict[str, Any]]) -> Answer:
    """The answer that streamed events make together."""
    assert "error" not in events[-1], events[-1]
    choices = [event["choices"][0] for event in events if event["choices"]]
    reasons = [choice["finish_reason"] for choice in choices]
    assert not any(reasons[:-1]), reasons
    first = events[0] | choices[0]
    return Answer(
        prompt_ids=first["prompt_token_ids"],
        token_ids=[token for choice in choices for token in choice["token_ids"]],
        text="".join(c["delta"]["content"] if "delta" in c else c["text"] for c in choices),
        finish_reason=reasons[-1],
        usage=events[-1].get("usage") or {},
    )


def _body(prompt: Prompt, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    fields = {"temperature": 0, "return_token_ids": True, **fields}
    if isinstance(prompt, list) and isinstance(prompt[0], dict):
        return "/v1/chat/completions", {"messages": prompt, **fields}
    return "/v1/completions", {"prompt": prompt, **fields}
