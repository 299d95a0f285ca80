"""Bodies of POST /v1/messages and /v1/messages/count_tokens, as Anthropic has them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from gateway.request.decoding import decode_body
from gateway.request.schema import StopString
from gateway.request.tool_fields import ToolName
from mesh.errors import InvalidRequest

MAX_BLOCKS = 4096
MAX_STOP_SEQUENCES = 16

CallId = Annotated[str, Meta(min_length=1, max_length=256)]


class CacheControl(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """No effect: every prefix is cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class PromptText(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Text of the system prompt or of a tool's result."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


TextList = Annotated[list[PromptText], Meta(max_length=MAX_BLOCKS)]


class TextBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="text"):
    """Text of a message."""

    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


class ToolUseBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="tool_use"):
    """A call of an earlier turn."""

    id: CallId
    name: ToolName
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Any = None
    """Left by the ``anthropic`` package, as the next one; not read."""
    toolset_name: None = None


class ToolResultBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="tool_result"):
    """What a call returned."""

    tool_use_id: CallId
    content: str | TextList | None = None
    is_error: bool | None = None
    """The model is shown ``Error:`` before the content."""
    cache_control: CacheControl | None = None


class ThinkingBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="thinking"):
    """Left out of the prompt, as the next one: another model thought it."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="redacted_thinking"
):
    """Thinking that only its maker can read."""

    data: str


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


class InputMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn; turns of one role that follow each other are one."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Meta(max_length=MAX_BLOCKS)]


class ToolDefinition(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that the client runs."""

    name: ToolName
    input_schema: dict[str, Any]
    """JSON schema of the input."""
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    """The input follows the schema whenever the tool is used."""
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    """No effect: input always streams as soon as it is known to be a call."""
    defer_loading: Literal[False] | None = None


class AutoTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="auto"):
    """The model may use tools."""

    disable_parallel_tool_use: bool | None = None


class AnyTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="any"):
    """The model must use a tool."""

    disable_parallel_tool_use: bool | None = None


class NamedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="tool"):
    """The model must use this tool."""

    name: ToolName
    disable_parallel_tool_use: bool | None = None


class NoTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="none"):
    """The model is not told of the tools."""


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Only what does not ask for thinking; adaptive leaves it to the model."""

    type: Literal["disabled", "adaptive"]
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The text of the answer is JSON of this schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The field ``output_config``."""

    format: OutputFormat | None = None


class RequestMetadata(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """No effect: nothing is stored."""

    user_id: str | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""

    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=4096)]
    """When the last one is the assistant's, the answer goes on from there."""
    model: str | None = None
    system: str | TextList | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=128)] | None = None
    tool_choice: AutoTool | AnyTool | NamedTool | NoTool | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None

    not_served: ClassVar[tuple[str, ...]] = (
        *("container", "context_management", "diagnostics", "inference_geo", "mcp_servers"),
        *("user_profile_id", "workspace_id", "output_format"),
    )


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1)]
    """May be more than the context has room for."""
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOP_SEQUENCES)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] | None = None
    metadata: RequestMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    """No effect: there is one tier."""


_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountTokensRequest)


def decode_messages_request(body: bytes) -> MessagesRequest:
    """Decode and validate.

    Raises:
        InvalidRequest: not JSON, a wrong type or value, or a field that is not served.
    """
    request = decode_body(body, _decoder, MessagesRequest)
    _check_blocks(request.messages)
    return request


def decode_count_tokens_request(body: bytes) -> CountTokensRequest:
    """As ``decode_messages_request``, for /v1/messages/count_tokens."""
    request = decode_body(body, _count_decoder, CountTokensRequest)
    _check_blocks(request.messages)
    return request


_ROLES: dict[type, str] = {
    ToolUseBlock: "assistant",
    ThinkingBlock: "assistant",
    RedactedThinkingBlock: "assistant",
    ToolResultBlock: "user",
}


def _check_blocks(messages: list[InputMessage]) -> None:
    for index, message in enumerate(messages):
        blocks = message.content if isinstance(message.content, list) else []
        for position, block in enumerate(blocks):
            if _ROLES.get(type(block), message.role) != message.role:
                param = f"messages[{index}].content[{position}].type"
                raise InvalidRequest(f"{param}: not in a turn of {message.role}", param=param)
