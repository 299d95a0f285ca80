"""What chat and text completions answer with, typed for the OpenAPI document."""

from __future__ import annotations

from typing import Literal

import msgspec

from gateway.answer_schema import AnswerBody, TokenLogprob
from gateway.generation.choice import EndReason
from mesh.messages import FinishReason


class CachedTokens(AnswerBody):
    """Details of ``prompt_tokens``."""

    cached_tokens: int
    """Found in a prefix cache."""


class Usage(AnswerBody):
    """Token counts; a prompt counts once for all its samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class ChatLogprobs(AnswerBody):
    """Log-probabilities of a chat choice."""

    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobLists(AnswerBody):
    """Log-probabilities of a completion choice: one item a token in each list."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class AssistantFunction(AnswerBody):
    """A function and its arguments, JSON text."""

    name: str
    arguments: str


class AssistantCall(AnswerBody):
    """A call that the model made."""

    id: str
    type: Literal["function"]
    function: AssistantFunction


class AssistantMessage(AnswerBody):
    """The model's turn."""

    role: Literal["assistant"]
    content: str | None
    """None: nothing but calls."""
    tool_calls: list[AssistantCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(AnswerBody):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: EndReason
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class TimingParts(AnswerBody):
    """Seconds of each part, one after the other; their sum is ``total_s``."""

    receive_s: float
    """Reading and checking the body, its grammar included."""
    tokenise_s: float
    """Chat template and tokeniser."""
    dispatch_s: float
    """Choosing the workers, until the first attempt was sent."""
    retry_s: float
    """Lost with attempts that failed."""
    queue_s: float
    """On the prefill worker, until it began to compute."""
    prefill_s: float
    """Computing the prompt and the first token."""
    kv_wait_s: float
    """After that: the KV could not be moved, mostly because the decode worker had no room."""
    kv_exposed_s: float
    """After the prefill: moving KV."""
    decode_queue_s: float
    """KV in place, until a decode step took the sequence up."""
    decode_s: float
    """Decode steps until the last token."""
    network_s: float
    """Between processes: what no process counted until the decode worker's first token."""
    respond_s: float
    """After the last token."""


class Timing(AnswerBody):
    """Where the time of one choice went; with the header ``X-Pdmesh-Timing: 1``."""

    index: int
    total_s: float
    """Arrival until the answer was complete."""
    ttft_s: float | None
    """Arrival to first token."""
    tpot_s: float | None
    """Mean gap between tokens; null for one token."""
    parts: TimingParts
    kv_hidden_s: float
    """KV moved while the prompt was computed: nobody waited for it."""
    kv_bytes: int
    """KV written from prefill to decode worker."""
    attempts: int
    decode_worker: str | None
    prefill_worker: str | None


class ChatAnswer(AnswerBody):
    """Answer of POST /v1/chat/completions without ``stream``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    pdmesh_timing: list[Timing] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class FunctionDelta(AnswerBody):
    """What is new of a call's function: the name once, then pieces of the arguments."""

    arguments: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class ToolCallDelta(AnswerBody):
    """What a token adds to a call; the first one has id, type and name."""

    index: int
    function: FunctionDelta
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(AnswerBody):
    """What a token adds to the message; the first one has the role."""

    content: str | None
    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallDelta] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(AnswerBody):
    """One token of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: EndReason | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(AnswerBody):
    """One event of a streamed chat answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    pdmesh_timing: list[Timing] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(AnswerBody):
    """One answer."""

    index: int
    text: str
    logprobs: CompletionLogprobLists | None
    finish_reason: FinishReason
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionAnswer(AnswerBody):
    """Answer of POST /v1/completions without ``stream``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    pdmesh_timing: list[Timing] | msgspec.UnsetType = msgspec.UNSET


class CompletionChunkChoice(CompletionChoice):
    """One token of one answer."""

    finish_reason: FinishReason | None  # type: ignore[assignment]


class CompletionChunk(AnswerBody):
    """One event of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    pdmesh_timing: list[Timing] | msgspec.UnsetType = msgspec.UNSET
