"""What the fields of one request say about each other."""

from __future__ import annotations

from gateway.errors import UnsupportedParameter
from gateway.request.schema import ChatMessage, ChatRequest, CompletionRequest, GenerationFields
from gateway.request.tool_fields import check_tools
from mesh.errors import InvalidRequest

_OWN_VARIABLES = {"messages", "add_generation_prompt", "continue_final_message"}


def check_together(request: GenerationFields) -> None:
    """Check what one field says about another.

    Raises:
        InvalidRequest: they contradict each other.
    """
    if request.best_of is not None:
        if request.best_of < (request.n or 1):
            raise InvalidRequest("best_of is less than n", param="best_of")
        if request.stream and request.best_of > (request.n or 1):
            raise InvalidRequest("best_of over n cannot be streamed", param="best_of")
    if request.stream_options is not None:
        if not request.stream:
            raise InvalidRequest("stream_options needs stream", param="stream_options")
        if request.stream_options.include_obfuscation:
            param = "stream_options.include_obfuscation"
            raise UnsupportedParameter(f"{param} is not supported", param=param)
    if request.truncate_prompt_tokens == 0:
        raise InvalidRequest("truncate_prompt_tokens is 0", param="truncate_prompt_tokens")
    if isinstance(request, ChatRequest):
        check_tools(request.tools, request.tool_choice)
        _check_messages(request.messages)
        if request.top_logprobs is not None and not request.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs", param="top_logprobs")
        for name in _OWN_VARIABLES & (request.chat_template_kwargs or {}).keys():
            raise InvalidRequest(
                f"{name} is a field of its own", param=f"chat_template_kwargs.{name}"
            )
        if request.continue_final_message:
            if request.add_generation_prompt:
                raise InvalidRequest(
                    "continue_final_message and add_generation_prompt exclude each other",
                    param="continue_final_message",
                )
            if not request.messages[-1].text.strip():
                raise InvalidRequest("the final message is empty", param="continue_final_message")
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        raise InvalidRequest("echo with logprobs is not supported", param="logprobs")


def _check_messages(messages: list[ChatMessage]) -> None:
    for index, message in enumerate(messages):
        if message.tool_calls and message.role != "assistant":
            param = f"messages[{index}].tool_calls"
            raise InvalidRequest(f"{param}: only an assistant calls tools", param=param)
        if (message.tool_call_id is None) == (message.role == "tool"):
            param = f"messages[{index}].tool_call_id"
            raise InvalidRequest(f"{param}: needed by role tool, and by no other", param=param)
