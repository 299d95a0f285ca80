"""Events of a streamed answer of the Responses API, in its order.

    response.created  response.in_progress
      response.output_item.added                                     each text
        response.content_part.added
          response.output_text.delta …  response.output_text.done
        response.content_part.done
      response.output_item.done
      response.output_item.added                                     each call
          response.function_call_arguments.delta …  response.function_call_arguments.done
      response.output_item.done
    response.completed | response.incomplete | response.failed

``sequence_number`` counts them all from 0. A stream that fails leaves its open items open.
"""

from __future__ import annotations

from typing import Any

import orjson

from gateway.generation.choice import Choice, Delta
from gateway.generation.parts import (
    AnswerCall,
    AnswerParts,
    AnswerText,
    Change,
    Closed,
    Grown,
    Opened,
)
from gateway.responses.response import ResponseObject
from mesh.errors import PdmeshError


class ResponseEvents:
    """Formats one stream: ``gateway.sse.Chunks``."""

    def __init__(self, response: ResponseObject) -> None:
        self._response = response
        self._parts = AnswerParts()
        self._number = 0

    def token(self, choice: Choice, delta: Delta, usage: dict[str, Any] | None) -> bytes:
        """A token that adds nothing visible has no event."""
        data = bytearray()
        if not self._number:
            unfinished = self._response.unfinished()
            data += self._event("response.created", response=unfinished)
            data += self._event("response.in_progress", response=unfinished)
        for change in self._parts.add(delta):
            is_cut = delta.finish_reason == "length" and change.part is self._parts.parts[-1]
            data += self._change(change, "incomplete" if is_cut else "completed")
        return bytes(data)

    def end(self, usage: dict[str, Any]) -> bytes:
        response = self._response.finished(self._parts.parts)
        return self._event(f"response.{response['status']}", response=response)

    def timing(self, timing: list[dict[str, Any]]) -> bytes:
        """This API's streams have no event for it."""
        return b""

    def error(self, error: PdmeshError) -> bytes:
        return self._event("response.failed", response=self._response.failed(error))

    def _change(self, change: Change, status: str) -> bytes:
        """Args: status: That of a part that is over."""
        part, index = change.part, change.index
        if isinstance(part, AnswerCall):
            return self._call_change(change, part, status)
        place = {
            "item_id": self._response.item_id(index, part),
            "output_index": index,
            "content_index": 0,
        }
        match change:
            case Opened():
                content = self._response.content(AnswerText())
                return self._added(index, part) + self._event(
                    "response.content_part.added", **place, part=content
                )
            case Grown(piece=piece, logprobs=entries):
                logprobs = self._response.logprobs(list(entries))
                return self._event(
                    "response.output_text.delta", **place, delta=piece, logprobs=logprobs
                )
            case Closed():
                content = self._response.content(part)
                text, logprobs = content["text"], content["logprobs"]
                return (
                    self._event("response.output_text.done", **place, text=text, logprobs=logprobs)
                    + self._event("response.content_part.done", **place, part=content)
                    + self._done(index, part, status)
                )

    def _call_change(self, change: Change, part: AnswerCall, status: str) -> bytes:
        index = change.index
        place = {"item_id": self._response.item_id(index, part), "output_index": index}
        match change:
            case Opened():
                return self._added(index, part)
            case Grown(piece=piece):
                return self._event("response.function_call_arguments.delta", **place, delta=piece)
            case Closed():
                whole = {"name": part.name, "arguments": part.arguments}
                return self._event(
                    "response.function_call_arguments.done", **place, **whole
                ) + self._done(index, part, status)

    def _added(self, index: int, part: AnswerText | AnswerCall) -> bytes:
        item = self._response.item(index, part, "in_progress")
        return self._event("response.output_item.added", output_index=index, item=item)

    def _done(self, index: int, part: AnswerText | AnswerCall, status: str) -> bytes:
        item = self._response.item(index, part, status)
        return self._event("response.output_item.done", output_index=index, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
