"""Bodies of /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from gateway.request.checks import check_together
from gateway.request.decoding import decode_body
from gateway.request.schema import ChatMessage, ChatRequest, TokenId
from gateway.request.tool_fields import ToolList

MAX_DETOKENIZED = 1 << 18
"""Token ids of one /detokenize request."""


class TokenizePromptRequest(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize with a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatRequest(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize with a conversation."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    model: str | None = None
    add_generation_prompt: bool | None = None
    """Not given: true, unless the final message is continued."""
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: ToolList | None = None
    return_token_strs: bool | None = None

    not_served: ClassVar[tuple[str, ...]] = (
        *("chat_template", "mm_processor_kwargs", "media_io_kwargs"),
    )

    def as_chat(self) -> ChatRequest:
        """The chat request with the same prompt.

        Raises:
            InvalidRequest: fields contradict each other.
        """
        request = ChatRequest(
            messages=self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            add_special_tokens=self.add_special_tokens,
            chat_template_kwargs=self.chat_template_kwargs,
            tools=self.tools,
        )
        check_together(request)
        return request


class TokenizeAnswer(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_DETOKENIZED)]
    model: str | None = None


class DetokenizeAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Answer of POST /detokenize."""

    prompt: str


_any_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_prompt_decoder = msgspec.json.Decoder(TokenizePromptRequest)
_chat_decoder = msgspec.json.Decoder(TokenizeChatRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


def decode_tokenize_request(body: bytes) -> TokenizePromptRequest | TokenizeChatRequest:
    """Decode and validate; ``messages`` tells the one from the other.

    Raises:
        InvalidRequest: not JSON, a wrong type or value, or a field that is not served.
    """
    try:
        is_chat = "messages" in _any_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        is_chat = False  # decoded again below, which says what is wrong
    if is_chat:
        return decode_body(body, _chat_decoder, TokenizeChatRequest)
    return decode_body(body, _prompt_decoder, TokenizePromptRequest)


def decode_detokenize_request(body: bytes) -> DetokenizeRequest:
    """As ``decode_tokenize_request``, for /detokenize."""
    return decode_body(body, _detokenize_decoder, DetokenizeRequest)
