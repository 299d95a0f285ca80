"""A request of the Messages API as the chat request that runs."""

from __future__ import annotations

import json

from gateway.anthropic.schema import (
    AnyTool,
    AutoTool,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    NamedTool,
    NoTool,
    PromptText,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from gateway.prompts.conversation import Conversation, FieldNames
from gateway.request.checks import check_together
from gateway.request.schema import ChatRequest
from gateway.request.structured_fields import JsonSchemaFormat, ResponseFormat
from gateway.request.tool_fields import (
    FunctionName,
    NamedToolChoice,
    Tool,
    ToolChoice,
    function_tool,
)
from mesh.errors import InvalidRequest

_NAMES = {
    "messages": "messages",
    "continue_final_message": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
}


def messages_to_chat(request: CountTokensRequest) -> tuple[ChatRequest, FieldNames]:
    """Turn one into the other; the names lead back from the fields of the chat request.

    Raises:
        InvalidRequest: the fields contradict each other; it names the client's field.
    """
    names = FieldNames(dict(_NAMES))
    conversation = Conversation(names)
    if request.system:
        conversation.add_text("system", _texts(request.system), "system")
    for index, message in enumerate(request.messages):
        _add(conversation, message, f"messages[{index}]")
    if not conversation.messages:
        raise InvalidRequest("messages: no content", param="messages")
    choice = request.tool_choice
    chat = ChatRequest(
        model=request.model,
        messages=conversation.messages,
        tools=_tools(request, names),
        tool_choice=_tool_choice(request),
        response_format=_response_format(request),
        continue_final_message=conversation.messages[-1].role == "assistant",
    )
    if choice is not None and not isinstance(choice, NoTool) and choice.disable_parallel_tool_use:
        chat.parallel_tool_calls = False
    if isinstance(request, MessagesRequest):
        chat.max_tokens = request.max_tokens
        chat.stop = request.stop_sequences
        chat.stream = request.stream
        chat.temperature = request.temperature
        chat.top_p = request.top_p
        chat.top_k = request.top_k
    with names.renamed():
        check_together(chat)
    return chat, names


def _add(conversation: Conversation, message: InputMessage, path: str) -> None:
    if isinstance(message.content, str):
        conversation.add_text(message.role, message.content, path, join=True)
        return
    for position, block in enumerate(message.content):
        place = f"{path}.content[{position}]"
        if isinstance(block, TextBlock):
            conversation.add_text(message.role, [block.text], place, join=True)
        elif isinstance(block, ToolUseBlock):
            arguments = json.dumps(block.input, ensure_ascii=False)
            conversation.add_call(block.id, block.name, arguments, place, "input")
        elif isinstance(block, ToolResultBlock):
            content = _texts(block.content or "")
            if block.is_error:
                first, *rest = [content] if isinstance(content, str) else content or [""]
                content = [f"Error: {first}", *rest]
            conversation.add_result(block.tool_use_id, content, place)


def _texts(content: str | list[PromptText]) -> str | list[str]:
    return content if isinstance(content, str) else [part.text for part in content]


def _tools(request: CountTokensRequest, names: FieldNames) -> list[Tool] | None:
    if request.tools is None:
        return None
    for index in range(len(request.tools)):
        names.add(f"tools[{index}].function", f"tools[{index}]")
        names.add(f"tools[{index}].function.parameters", f"tools[{index}].input_schema")
    return [
        function_tool(tool.name, tool.description, tool.input_schema, tool.strict)
        for tool in request.tools
    ]


def _tool_choice(request: CountTokensRequest) -> ToolChoice | None:
    match request.tool_choice:
        case NamedTool(name=name):
            return NamedToolChoice(type="function", function=FunctionName(name=name))
        case AnyTool():
            return "required"
        case AutoTool():
            return "auto"
        case NoTool():
            return "none"
        case None:
            return None


def _response_format(request: CountTokensRequest) -> ResponseFormat | None:
    form = request.output_config.format if request.output_config is not None else None
    if form is None:
        return None
    schema = JsonSchemaFormat(name="output", schema=form.schema, strict=True)
    return ResponseFormat(type="json_schema", json_schema=schema)
