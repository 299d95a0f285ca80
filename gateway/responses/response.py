"""The ``response`` object of the Responses API and the items of its ``output``."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.generation.answer import Answer
from gateway.generation.logprobs import TokenNames, chat_logprobs
from gateway.generation.parts import AnswerText, Part
from gateway.generation.usage import usage
from gateway.responses.schema import ResponsesRequest
from mesh.errors import PdmeshError
from mesh.messages import TokenLogprobs


class ResponseObject:
    """Writes the object of one request, at any point of its life."""

    def __init__(
        self, request: ResponsesRequest, answer: Answer, *, model: str, names: TokenNames
    ) -> None:
        """Args: names: How log-probabilities write tokens."""
        self._answer = answer
        self._names = names
        sampling = answer.choices[0].generation.request.sampling
        text = request.text
        form = text.format if text is not None else None
        self._fields = {
            "id": f"resp_{answer.id}",
            "object": "response",
            "created_at": answer.created,
            "background": False,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "metadata": request.metadata or {},
            "model": model,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": request.service_tier or "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"} if form is None else _given(form)},
            "tool_choice": _built(request.tool_choice) or "auto",
            "tools": [_built(tool) for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "user": request.user,
        }

    def unfinished(self) -> dict[str, Any]:
        """Before the first token."""
        return self._with("in_progress", output=[])

    def finished(self, parts: list[Part]) -> dict[str, Any]:
        """After the last token."""
        is_whole = self._answer.choices[0].finish_reason != "length"
        last = len(parts) - 1
        output = [
            self.item(index, part, "completed" if is_whole or index < last else "incomplete")
            for index, part in enumerate(parts)
        ]
        return self._with(
            "completed" if is_whole else "incomplete",
            output=output,
            incomplete_details=None if is_whole else {"reason": "max_output_tokens"},
            usage=response_usage(usage(self._answer.choices, 1)),
        )

    def failed(self, error: PdmeshError) -> dict[str, Any]:
        """After an error in the middle of the answer."""
        message = f"{error} ({error.code})"
        return self._with("failed", output=[], error={"code": _code(error), "message": message})

    def item(self, index: int, part: Part, status: str) -> dict[str, Any]:
        """An item of ``output``; one in progress is empty, whatever came with its first token."""
        begins = status == "in_progress"
        if isinstance(part, AnswerText):
            return {
                "id": self.item_id(index, part),
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": [] if begins else [self.content(part)],
            }
        return {
            "id": self.item_id(index, part),
            "type": "function_call",
            "call_id": part.id,
            "name": part.name,
            "arguments": "" if begins else part.arguments,
            "status": status,
        }

    def item_id(self, index: int, part: Part) -> str:
        """Unique, and the same at every event."""
        kind = "msg" if isinstance(part, AnswerText) else "fc"
        return f"{kind}_{self._answer.id}_{index}"

    def content(self, part: AnswerText) -> dict[str, Any]:
        """The only part of a message's content."""
        logprobs = self.logprobs(part.logprobs)
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": logprobs}

    def logprobs(self, entries: list[TokenLogprobs]) -> list[dict[str, Any]]:
        """Log-probabilities of tokens."""
        return [chat_logprobs(entry, self._names) for entry in entries]

    def _with(self, status: str, **fields: Any) -> dict[str, Any]:
        nothing = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._fields, **nothing, "status": status, **fields}


def response_usage(counts: dict[str, Any]) -> dict[str, Any]:
    """``usage`` under this API's names."""
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }


def _code(error: PdmeshError) -> str:
    """One of the codes that this API has."""
    if error.http_status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.http_status < 500 else "server_error"


def _built(value: Any) -> Any:
    return msgspec.to_builtins(value)


def _given(form: Any) -> dict[str, Any]:
    return {key: value for key, value in _built(form).items() if value is not None}
