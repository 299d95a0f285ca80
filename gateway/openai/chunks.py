"""Events of streamed chat and text completions, from preformatted bytes.

Every token is one event, also when it adds no visible text, so that clients which time events
measure the gap between tokens. The last token's event carries ``finish_reason``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from gateway.errors import error_body
from gateway.generation.choice import Choice, Delta
from gateway.generation.logprobs import CompletionLogprobs, TokenNames, chat_logprobs
from gateway.openai.tool_calls import streamed_call
from mesh.errors import PdmeshError

_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """What all events of one stream have in common."""

    answer_id: str
    created: int
    """Unix time in seconds."""
    model: str
    with_usage: bool
    """The client asked for ``include_usage``."""
    with_ids: bool
    """The client asked for ``return_token_ids``."""
    names: TokenNames


class _Frame:
    """The parts that all events of a stream share."""

    def __init__(self, kind: str, stream: Stream) -> None:
        head = orjson.dumps(
            {
                "id": stream.answer_id,
                "object": kind,
                "created": stream.created,
                "model": stream.model,
            }
        )
        self.head = b"data: " + head[:-1] + b',"choices":['
        # OpenAI: with include_usage every chunk has the field, null but for the last.
        self.no_usage = b',"usage":null' if stream.with_usage else b""

    def end(self, usage: dict[str, Any]) -> bytes:
        return self.head + self.close(usage) + _DONE if self.no_usage else _DONE

    def error(self, error: PdmeshError) -> bytes:
        return b"data: " + orjson.dumps(error_body(error)) + b"\n\n"

    def timing(self, timing: list[dict[str, Any]]) -> bytes:
        return self.head + self.close(None, b',"pdmesh_timing":' + orjson.dumps(timing))

    def close(self, usage: dict[str, Any] | None, extra: bytes = b"") -> bytes:
        shown = self.no_usage if usage is None else b',"usage":' + orjson.dumps(usage)
        return b"]" + shown + extra + b"}\n\n"


def _after_text(delta: Delta, logprobs: bytes, token_ids: bytes) -> bytes:
    reason = b"null" if delta.finish_reason is None else b'"%s"' % delta.finish_reason.encode()
    return b',"logprobs":' + logprobs + b',"finish_reason":' + reason + token_ids + b"}"


def _token_ids(delta: Delta) -> bytes:
    return b',"token_ids":[%d]' % delta.token_id


def _prompt_token_ids(choice: Choice) -> bytes:
    return b',"prompt_token_ids":' + orjson.dumps(choice.generation.request.prompt_ids)


class ChatChunks:
    """Events of /v1/chat/completions; the first token of a choice carries the role."""

    def __init__(self, stream: Stream) -> None:
        self._frame = _Frame("chat.completion.chunk", stream)
        self._names = stream.names
        self._with_ids = stream.with_ids
        self._heads: dict[int, bytes] = {}

    def token(self, choice: Choice, delta: Delta, usage: dict[str, Any] | None) -> bytes:
        head = self._heads.get(choice.index)
        prompt_ids = b""
        if head is None:
            start = self._frame.head + b'{"index":%d,"delta":{' % choice.index
            self._heads[choice.index] = start + b'"content":'
            head = start + b'"role":"assistant","content":'
            if self._with_ids:
                prompt_ids = _prompt_token_ids(choice)
        logprobs = b"null"
        if delta.logprobs is not None:
            content = [chat_logprobs(delta.logprobs, self._names)]
            logprobs = orjson.dumps({"content": content, "refusal": None})
        end = b"}" + _after_text(delta, logprobs, _token_ids(delta) if self._with_ids else b"")
        text = orjson.dumps(delta.text)
        if delta.calls:
            calls = orjson.dumps([streamed_call(call) for call in delta.calls])
            text = orjson.dumps(delta.text or None) + b',"tool_calls":' + calls
        return head + text + end + self._frame.close(usage, prompt_ids)

    def end(self, usage: dict[str, Any]) -> bytes:
        return self._frame.end(usage)

    def error(self, error: PdmeshError) -> bytes:
        return self._frame.error(error)

    def timing(self, timing: list[dict[str, Any]]) -> bytes:
        return self._frame.timing(timing)


class CompletionChunks:
    """Events of /v1/completions."""

    def __init__(self, stream: Stream) -> None:
        self._frame = _Frame("text_completion", stream)
        self._names = stream.names
        self._with_ids = stream.with_ids
        self._begun: set[int] = set()
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def token(self, choice: Choice, delta: Delta, usage: dict[str, Any] | None) -> bytes:
        logprobs = b"null"
        if delta.logprobs is not None:
            collected = self._logprobs.get(choice.index)
            if collected is None:
                collected = self._logprobs[choice.index] = CompletionLogprobs(self._names)
            collected.add(delta.logprobs, delta.text)
            logprobs = orjson.dumps(collected.take())
        start = self._frame.head + b'{"index":%d,"text":' % choice.index
        ids = b""
        if self._with_ids:
            ids = _token_ids(delta)
            if choice.index not in self._begun:
                self._begun.add(choice.index)
                ids += _prompt_token_ids(choice)
        end = _after_text(delta, logprobs, ids) + self._frame.close(usage)
        return start + orjson.dumps(delta.text) + end

    def end(self, usage: dict[str, Any]) -> bytes:
        return self._frame.end(usage)

    def error(self, error: PdmeshError) -> bytes:
        return self._frame.error(error)

    def timing(self, timing: list[dict[str, Any]]) -> bytes:
        return self._frame.timing(timing)
