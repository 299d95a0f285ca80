"""The OpenAI request bodies, typed.

Fields follow the OpenAI API plus vLLM's sampling extensions. Only what cannot change an answer
(``user``, ``metadata``, cache hints) is taken without effect; those fields say so.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.request.structured_fields import (
    ChoiceList,
    GrammarText,
    JsonSchema,
    ResponseFormat,
    StructuredOutputs,
)
from gateway.request.tool_fields import Tool, ToolCallList, ToolChoice, ToolList
from mesh.messages import SloClass

MAX_STOP_STRINGS = 4
_MAX_SEED = (1 << 63) - 1

StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
StopList = Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
ServiceTier = Literal[
    "auto", "default", "priority", "scale", "fast", "interactive", "flex", "batch"
]
"""OpenAI's tiers, and the two classes by their own names."""
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
BadWord = Annotated[str, Meta(min_length=1, max_length=64)]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stream carries besides tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Only false: chunks are never padded."""


class GenerationFields(msgspec.Struct, kw_only=True):
    """The fields that both endpoints take; None is "not given"."""

    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-_MAX_SEED, le=_MAX_SEED)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    """Make this many answers and return the ``n`` of the highest mean log-probability a token."""
    stop: StopString | StopList | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=64)] | None = None
    """Matched as tokens: as tokenised alone, and after a space."""
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=1024)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    """The ``guided_`` fields are vLLM's older names of those in ``structured_outputs``."""
    guided_regex: GrammarText | None = None
    guided_choice: ChoiceList | None = None
    guided_grammar: GrammarText | None = None
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool | None = None
    """Tokens in logprobs are written ``token_id:17``."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    """Keep only the last tokens of the prompt; -1: as many as fit."""
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] = 0
    service_tier: ServiceTier | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    user: str | None = None
    """No effect, as the next ones: nothing is stored, and every prefix is cached for all."""
    metadata: Metadata | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory"] | None = None
    parallel_tool_calls: bool | None = None
    """No effect without tools."""

    @property
    def num_samples(self) -> int:
        """Answers to make for each prompt."""
        return self.best_of or self.n or 1

    @property
    def slo_class(self) -> SloClass:
        """Whether latency or throughput counts; ``flex`` and ``batch`` name the latter."""
        return "batch" if self.service_tier in ("flex", "batch") else "interactive"


class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn; fields of earlier answers that clients send back are accepted empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: ToolCallList | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    parsed: Any = None
    """Left by the ``openai`` package; not read."""

    @property
    def text(self) -> str:
        """The content as one string."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class ChatRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    tools: ToolList | None = None
    tool_choice: ToolChoice | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools or []


class CompletionRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[Any]
    """A string, token ids, or a list of either."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    add_special_tokens: bool = True
