"""Messages and tools in the shape that a chat template takes.

Templates that know tools get them as transformers passes them: the ``tools`` variable, calls with
their arguments as objects, results under the role ``tool``. For the others the tools are described
in the system prompt, and calls and results become plain text, in the format of Hermes models.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.request.schema import ChatMessage
from gateway.request.structured_fields import check_depth
from gateway.request.tool_fields import Tool, ToolCall
from gateway.tools.format import FORMATS
from mesh.errors import InvalidRequest

_HERMES = FORMATS["hermes"]
_DESCRIPTION = """\
You may call functions to help with the user's request. Their signatures, one JSON object a line:
<tools>
{tools}
</tools>
To call a function, answer with its name and arguments as JSON between tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"the argument's name": "its value"}}}}
</tool_call>"""


def tools_variable(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The ``tools`` variable of a template."""
    return [
        {"type": "function", "function": _without_nothing(msgspec.to_builtins(tool.function))}
        for tool in tools
    ]


def native_turns(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """``messages`` for a template that knows tools.

    Raises:
        InvalidRequest: the arguments of a call are not a JSON object.
    """
    turns = []
    for index, message in enumerate(messages):
        turn = _turn(message) | {"content": message.text}
        if message.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _arguments(call, index, position),
                    },
                }
                for position, call in enumerate(message.tool_calls)
            ]
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        turns.append(turn)
    return turns


def described_turns(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """``messages`` for a template that knows no tools.

    Raises:
        InvalidRequest: the arguments of a call are not a JSON object.
    """
    turns: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if message.role == "tool":
            text = f"<tool_response>\n{message.text}\n</tool_response>"
            if turns and messages[index - 1].role == "tool":
                turns[-1]["content"] += "\n" + text
            else:
                turns.append({"role": "user", "content": text})
            continue
        calls = [
            _HERMES.call_opening
            + _HERMES.head(call.function.name)
            + json.dumps(_arguments(call, index, position), ensure_ascii=False)
            + "}"
            + _HERMES.call_closing
            for position, call in enumerate(message.tool_calls or ())
        ]
        text = "\n".join([message.text, *calls] if message.text else calls)
        turns.append(_turn(message) | {"content": text})
    if tools:
        _describe(turns, tools)
    return turns


def _describe(turns: list[dict[str, Any]], tools: Sequence[Tool]) -> None:
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools_variable(tools)]
    text = _DESCRIPTION.format(tools="\n".join(lines))
    if turns[0]["role"] == "system":
        before = turns[0]["content"]
        turns[0]["content"] = f"{before}\n\n{text}" if before else text
    else:
        turns.insert(0, {"role": "system", "content": text})


def _turn(message: ChatMessage) -> dict[str, Any]:
    # "developer" is OpenAI's newer name of the role that templates know as "system".
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    if message.name is not None:
        turn["name"] = message.name
    return turn


def _arguments(call: ToolCall, message: int, position: int) -> dict[str, Any]:
    param = f"messages[{message}].tool_calls[{position}].function.arguments"
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param}: not JSON: {error}", param=param) from error
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{param}: not a JSON object", param=param)
    check_depth(arguments, param)
    return arguments


def _without_nothing(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None and key != "strict"}
