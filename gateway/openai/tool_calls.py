"""Tool calls in the shapes of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.generation.choice import Delta
from gateway.tools.parser import ToolCallPiece


def streamed_call(call: ToolCallPiece) -> dict[str, Any]:
    """One item of a chunk's ``delta.tool_calls``."""
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_whole(call.id, call.name, call.arguments)}


def joined_calls(deltas: Iterable[Delta]) -> list[dict[str, Any]]:
    """``message.tool_calls`` of a whole answer."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for call in delta.calls:
            if call.id:
                calls.append(_whole(call.id, call.name, call.arguments))
            else:
                calls[call.index]["function"]["arguments"] += call.arguments
    return calls


def _whole(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}
