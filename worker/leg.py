"""A sequence together with the gateway that waits for it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.engine import Engine
from engine.sampler import SampledToken
from engine.sequence import Sequence
from mesh.errors import ContextTooLong, PdmeshError
from mesh.leg_timing import LegTiming
from mesh.messages import (
    DecodeRequest,
    PrefillDone,
    PrefillRequest,
    RequestFailed,
    TokenOutput,
)


@dataclass(slots=True, eq=False)
class Job:
    """One leg of one attempt."""

    sequence: Sequence
    gateway_id: str
    ready_s: float
    """When it was received; on a decode worker, when its KV was committed."""
    transfer: PrefillDone | None = None
    """The hand-off that made it ready."""
    transfer_late_s: float = 0.0
    """As in ``Committed``."""
    has_reported: bool = False
    """Its first output was made."""


def make_sequence(request: PrefillRequest | DecodeRequest) -> Sequence:
    """Token state for a request that just arrived."""
    now_s = time.monotonic()
    return Sequence(
        request_id=request.request_id,
        transfer_id=request.transfer_id,
        token_ids=list(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        deadline_s=now_s + request.ttl_s,
        arrival_s=now_s,
        priority=request.priority,
        slo_class=request.slo_class,
        cache_salt=request.cache_salt,
    )


def check_fits(engine: Engine, request: PrefillRequest | DecodeRequest, num_tokens: int) -> None:
    """Refuse what could never run here, or would index outside the vocabulary.

    Raises:
        ContextTooLong: ``num_tokens`` KV slots are more than this worker can ever give.
        PdmeshError: the request is malformed (a gateway's bug or another model).
    """
    if num_tokens > engine.max_sequence_tokens:
        raise ContextTooLong(
            f"the request needs {num_tokens} tokens of KV cache, "
            f"this worker holds at most {engine.max_sequence_tokens} per request"
        )
    vocab_size = engine.model_config.vocab_size
    tokens = request.token_ids
    sampling = request.sampling
    if not tokens or not 0 < request.num_prompt_tokens <= len(tokens):
        raise PdmeshError("malformed request: no prompt tokens")
    named = (
        *sampling.stop_token_ids,
        *(token for token, _ in sampling.logit_bias),
        *sampling.allowed_token_ids,
        *(token for word in sampling.bad_words for token in word),
    )
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise PdmeshError("malformed request: token id outside the vocabulary")
    if not all(sampling.bad_words):
        raise PdmeshError("malformed request: an empty bad word")
    if named and (min(named) < 0 or max(named) >= vocab_size):
        raise PdmeshError("malformed request: token id outside the vocabulary")


def failure(request_id: str, transfer_id: str, error: PdmeshError) -> RequestFailed:
    """The message that tells a gateway of an error."""
    return RequestFailed(
        request_id=request_id,
        transfer_id=transfer_id,
        code=error.code,
        message=str(error),
        retryable=error.retryable,
    )


def token_output(job: Job, token: SampledToken) -> TokenOutput:
    """The message for a token just appended to the job's sequence."""
    sequence = job.sequence
    found = min(sequence.num_cached_tokens, sequence.num_prompt_tokens)
    cached, timing = 0, None
    if not job.has_reported:
        job.has_reported = True
        cached, timing = found, _timing(job)
    return TokenOutput(
        request_id=sequence.request_id,
        transfer_id=sequence.transfer_id,
        index=sequence.num_output_tokens - 1,
        token_ids=(token.token_id,),
        finish_reason=sequence.finish_reason,
        num_cached_tokens=cached,
        logprobs=(token.logprobs,) if token.logprobs else (),
        timing=timing,
    )


def _timing(job: Job) -> LegTiming:
    started_s, transfer = job.sequence.first_step_s, job.transfer
    queue_s, compute_s = started_s - job.ready_s, time.monotonic() - started_s
    if transfer is None:
        return LegTiming(queue_s=queue_s, compute_s=compute_s)
    return LegTiming(
        queue_s=queue_s,
        compute_s=compute_s,
        kv_wait_s=transfer.wait_s,
        kv_hidden_s=transfer.hidden_s,
        kv_exposed_s=transfer.exposed_s + job.transfer_late_s,
        kv_bytes=transfer.num_bytes,
    )
