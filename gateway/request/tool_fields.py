"""Request fields about tools: what there is to call, and the calls of earlier turns."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.request.structured_fields import check_depth
from mesh.errors import InvalidRequest

ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]


class FunctionDefinition(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; None: no arguments are described."""
    strict: bool | None = None
    """Arguments follow the schema whenever the function is called."""


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One item of ``tools``."""

    type: Literal["function"]
    function: FunctionDefinition


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None
) -> Tool:
    """The tool that other APIs describe by these fields."""
    function = FunctionDefinition(
        name=name, description=description, parameters=parameters, strict=strict
    )
    return Tool(type="function", function=function)


class FunctionName(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Names one of the functions."""

    name: ToolName


class NamedToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``tool_choice`` that names the function to call."""

    type: Literal["function"]
    function: FunctionName


ToolList = Annotated[list[Tool], Meta(max_length=128)]
ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class CalledFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call that the model made."""

    name: ToolName
    arguments: str
    """JSON text of an object."""
    parsed_arguments: Any = None
    """Left by the ``openai`` package; not read."""


class ToolCall(msgspec.Struct, kw_only=True):
    """One of an assistant message's ``tool_calls``."""

    id: Annotated[str, Meta(min_length=1, max_length=256)]
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None
    """Left by clients that joined a stream."""


ToolCallList = Annotated[list[ToolCall], Meta(max_length=128)]


def check_tools(tools: list[Tool] | None, choice: ToolChoice | None) -> None:
    """Check the two fields against each other.

    Raises:
        InvalidRequest: a choice without the tool it needs, or two tools of one name.
    """
    for index, tool in enumerate(tools or ()):
        check_depth(tool.function.parameters, f"tools[{index}].function.parameters")
    names = [tool.function.name for tool in tools or ()]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidRequest(
                f"tools[{index}]: {name!r} is there twice", param=f"tools[{index}].function.name"
            )
    if isinstance(choice, NamedToolChoice):
        if choice.function.name not in names:
            raise InvalidRequest(
                f"tool_choice: {choice.function.name!r} is not one of the tools",
                param="tool_choice",
            )
    elif choice == "required" and not names:
        raise InvalidRequest("tool_choice: there are no tools", param="tool_choice")
