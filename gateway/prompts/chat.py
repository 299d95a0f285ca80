"""A conversation as the tokens that the model reads."""

from __future__ import annotations

from contextlib import suppress

from gateway.prompts.chat_template import MAX_RENDER_S, TemplateTimeout
from gateway.prompts.served_model import ServedModel
from gateway.prompts.text_threads import MAX_INLINE_CHARS, TextThreads
from gateway.request.schema import ChatRequest
from gateway.tools.prompt import described_turns, native_turns, tools_variable
from mesh.errors import InvalidRequest

_INLINE_RENDER_S = 0.01


async def chat_tokens(model: ServedModel, threads: TextThreads, request: ChatRequest) -> list[int]:
    """Token ids of the rendered conversation.

    A template that does not finish in a moment begins anew on a thread: however it loops, the event
    loop goes on.

    Raises:
        InvalidRequest: no template, or the template refuses the messages.
    """
    num_chars = sum(len(message.text) for message in request.messages)
    if request.tools:
        num_chars += len(str(request.tools))
    if num_chars <= MAX_INLINE_CHARS and not request.chat_template_kwargs:
        with suppress(TemplateTimeout):
            return encode_chat(model, request, time_s=_INLINE_RENDER_S)
    return await threads.run(lambda: encode_chat(model, request, time_s=MAX_RENDER_S))


def encode_chat(model: ServedModel, request: ChatRequest, *, time_s: float) -> list[int]:
    """As ``chat_tokens``, here and now, with ``time_s`` for the template.

    Raises:
        TemplateTimeout: it took longer.
        InvalidRequest: no template, or the template refuses the messages.
    """
    if model.chat_template is None:
        raise InvalidRequest("the model has no chat template", param="messages")
    template, tools = model.chat_template, request.callable_tools
    variables = request.chat_template_kwargs or {}
    if template.knows_tools:
        turns = native_turns(request.messages)
        variables = variables | {"tools": tools_variable(tools)} if tools else variables
    else:
        turns = described_turns(request.messages, tools)
    generate = request.add_generation_prompt
    text = template.render(
        turns,
        add_generation_prompt=not request.continue_final_message if generate is None else generate,
        continue_final_message=request.continue_final_message,
        variables=variables,
        time_s=time_s,
    )
    ids = model.tokenizer.encode(text, add_special_tokens=request.add_special_tokens)
    if not ids:
        raise InvalidRequest("the prompt is empty", param="messages")
    return ids
