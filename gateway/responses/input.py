"""A request of the Responses API as the chat request that runs."""

from __future__ import annotations

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
from gateway.responses.schema import (
    Content,
    FunctionChoice,
    InputItem,
    ResponsesRequest,
    TextFormat,
)
from mesh.errors import InvalidRequest

_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
}


def responses_to_chat(request: ResponsesRequest) -> tuple[ChatRequest, FieldNames]:
    """Turn one into the other; the names lead back from the fields of the chat request.

    Raises:
        InvalidRequest: the fields contradict each other; it names the client's field.
    """
    names = FieldNames(dict(_NAMES))
    conversation = Conversation(names)
    if request.instructions:
        conversation.add_text("system", request.instructions, "instructions")
    if isinstance(request.input, str):
        conversation.add_text("user", request.input, "input")
    else:
        for index, item in enumerate(request.input):
            _add(conversation, item, f"input[{index}]")
    if not conversation.messages:
        raise InvalidRequest("input: nothing but reasoning", param="input")
    form = request.text.format if request.text is not None else None
    wants_logprobs = "message.output_text.logprobs" in (request.include or ())
    chat = ChatRequest(
        model=request.model,
        messages=conversation.messages,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        tools=_tools(request, names),
        tool_choice=_tool_choice(request),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=None if form is None else _response_format(form),
        stream=request.stream,
        logprobs=wants_logprobs,
        top_logprobs=request.top_logprobs if wants_logprobs else None,
        service_tier=request.service_tier,
    )
    with names.renamed():
        check_together(chat)
    return chat, names


def _add(conversation: Conversation, item: InputItem, path: str) -> None:
    if item.type == "message":
        assert item.role is not None
        content = _texts(item.content)
        conversation.add_text(item.role, content, path, join=item.role == "assistant")
    elif item.type == "function_call":
        assert item.call_id is not None
        assert item.name is not None
        assert item.arguments is not None
        conversation.add_call(item.call_id, item.name, item.arguments, path, "arguments")
    elif item.type == "function_call_output":
        assert item.call_id is not None
        conversation.add_result(item.call_id, _texts(item.output), path)


def _texts(content: Content | None) -> str | list[str]:
    if isinstance(content, list):
        return [part.text for part in content]
    return content or ""


def _tools(request: ResponsesRequest, names: FieldNames) -> list[Tool] | None:
    if request.tools is None:
        return None
    for index in range(len(request.tools)):
        names.add(f"tools[{index}].function", f"tools[{index}]")
    return [
        function_tool(tool.name, tool.description, tool.parameters, tool.strict)
        for tool in request.tools
    ]


def _tool_choice(request: ResponsesRequest) -> ToolChoice | None:
    choice = request.tool_choice
    if isinstance(choice, FunctionChoice):
        return NamedToolChoice(type="function", function=FunctionName(name=choice.name))
    return choice


def _response_format(form: TextFormat) -> ResponseFormat:
    if form.type != "json_schema":
        return ResponseFormat(type=form.type)
    assert form.name is not None
    schema = JsonSchemaFormat(name=form.name, schema=form.schema, strict=form.strict)
    return ResponseFormat(type="json_schema", json_schema=schema)
