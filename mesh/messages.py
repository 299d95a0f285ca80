"""Typed control messages between gateway, prefill and decode workers.

Every message is a frozen msgspec Struct, encoded as a MessagePack array behind a version envelope
(see ``mesh.codec``). Adding an optional field at the end is compatible; anything else bumps
``PROTOCOL_VERSION`` with a line of history in ``docs/transfer-protocol.md``.

Who sends what (each worker binds one ROUTER; gateways dial every worker, D dials P):

    gateway → P   PrefillRequest, AbortRequest, StatusRequest
    gateway → D   DecodeRequest, AbortRequest, StatusRequest
    P, D → gateway   StepOutput, RequestFailed, StatusReply
    D → P         Grant, TransferAck, TransferCancel, LeaseRenew
    P → D         PrefillDone, TransferNack, LeaseRenew
    dialer ↔ worker   Hello, Welcome, Refused, Ping, Pong   (handled inside ``mesh.links``)
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from mesh.leg_timing import LegTiming
from mesh.worker_info import MAX_RANKS, LoadSnapshot, WorkerInfo

PROTOCOL_VERSION = 2

FinishReason = Literal["stop", "length"]
SloClass = Literal["interactive", "batch"]


class Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Base of every message; ``array_like`` keeps field names off the wire."""


# ---------------------------------------------------------------------------- link


class DataPlaneOffer(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a worker can move KV over, told in the handshake."""

    transports: tuple[str, ...]
    """Best first."""
    host_id: str
    """Equal for workers that can share memory; empty for those that can't."""


class Hello(Message, frozen=True, tag="hello"):
    """First message on a link, from the dialer."""

    peer_id: str
    epoch: int
    """One start of the sending process; a larger epoch with the same id is a restart."""
    fingerprint: str = ""
    """KV layout fingerprint of a dialing decode worker; gateways leave it empty."""
    offer: DataPlaneOffer | None = None
    """A dialing decode worker's data plane."""


class Welcome(Message, frozen=True, tag="welcome"):
    """The worker accepts the link."""

    worker_id: str
    epoch: int
    offer: DataPlaneOffer | None = None
    """A prefill worker's data plane."""


class Refused(Message, frozen=True, tag="refused"):
    """The worker does not accept the link (version, fingerprint, transports).

    The reason reaches the router, which does not pair these two again.
    """

    code: str
    message: str


class Ping(Message, frozen=True, tag="ping"):
    """Link liveness probe, answered with the same ``seq``."""

    seq: int


class Pong(Message, frozen=True, tag="pong"):
    """Answer to Ping; ``epoch`` tells a restarted peer from the old one."""

    seq: int
    epoch: int


# ---------------------------------------------------------------------------- requests


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How one request's tokens are chosen. The gateway validates and fills every field."""

    max_tokens: int
    """Output tokens of the whole request, including those emitted by earlier attempts."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """64-bit; minted by the gateway when the client gave none, so that replays go on with it."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    """Stop tokens are masked until this many output tokens exist."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends at any of these (the model's EOS ids included, unless ignored)."""
    num_logprobs: int = -1
    """-1 none; 0 the sampled token's only; k the top k as well."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these are ever chosen; empty allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the output never contains."""
    grammar: str = ""
    """What the output must follow, as ``mesh.model_text.grammar`` takes it; stop tokens end the
    answer where it is complete, and nowhere else. "" is free text."""


class PeerRef(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Names one start of one worker and where its control ROUTER listens."""

    worker_id: str
    epoch: int
    endpoint: str
    tensor_parallel: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1
    """Ranks among which it divides its KV heads."""


class PrefillRequest(Message, frozen=True, tag="prefill"):
    """Compute the KV of ``token_ids``, sample one token, hand the KV to ``decode``."""

    request_id: str
    transfer_id: str
    """New for every attempt; names the hand-off on both workers."""
    token_ids: tuple[int, ...]
    """Prompt plus output tokens of earlier attempts."""
    num_prompt_tokens: int
    """``token_ids[num_prompt_tokens:]`` are outputs already sent to the client."""
    sampling: SamplingParams
    ttl_s: float
    """Seconds from receipt until the request's deadline."""
    decode: PeerRef
    priority: int = 0
    """Lower runs first."""
    cache_salt: str = ""
    """Prefixes are shared only between requests of equal salt."""
    slo_class: SloClass = "interactive"
    """Interactive work is favoured for latency, batch work fills what is left."""
    traceparent: str = ""
    """W3C trace context of this attempt; empty: it is not traced."""


class DecodeRequest(Message, frozen=True, tag="decode"):
    """Continue ``token_ids`` after P's first token; with ``prefill=None`` D prefills by itself."""

    request_id: str
    transfer_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    ttl_s: float
    prefill: PeerRef | None
    priority: int = 0
    cache_salt: str = ""
    slo_class: SloClass = "interactive"
    after: str = ""
    """Transfer id of a sibling on this worker whose KV shares this one's prompt: wait for it."""
    traceparent: str = ""
    """As in PrefillRequest."""


class AbortRequest(Message, frozen=True, tag="abort"):
    """The client left or the other leg failed: free everything of this attempt. Idempotent."""

    request_id: str
    transfer_id: str


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Log-probabilities at one output position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), most likely first."""


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """New tokens of one request. P sends exactly one (its first token); D sends the rest."""

    request_id: str
    transfer_id: str
    index: int
    """Position of ``token_ids[0]`` in the whole request's output; gaps and repeats are errors."""
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    """Set on the last token; ``stop`` when it is in ``stop_token_ids``."""
    num_cached_tokens: int = 0
    """Prompt tokens taken from a prefix cache; on a leg's first output only."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    timing: LegTiming | None = None
    """On a leg's first output only."""


class StepOutput(Message, frozen=True, tag="step"):
    """All outputs of one engine step for one gateway."""

    outputs: tuple[TokenOutput, ...]


class RequestFailed(Message, frozen=True, tag="failed"):
    """This attempt is over on the sender, and everything it held is freed or quarantined."""

    request_id: str
    transfer_id: str
    code: str
    """A ``mesh.errors`` code."""
    message: str
    retryable: bool


# ---------------------------------------------------------------------------- status


class StatusRequest(Message, frozen=True, tag="status?"):
    """Ask a worker directly (census, or when Redis is lost)."""

    seq: int


class StatusReply(Message, frozen=True, tag="status"):
    """Live answer, assembled by the worker's control loop."""

    seq: int
    info: WorkerInfo
    load: LoadSnapshot


# ---------------------------------------------------------------------------- transfer


class Grant(Message, frozen=True, tag="grant"):
    """D offers blocks: the sequence's block ``first_index + i`` goes to ``block_ids[i]``."""

    transfer_id: str
    fingerprint: str
    epoch: int
    """D's epoch; echoed in every chunk header, fences writes to an earlier start."""
    transport: str
    address: bytes
    """Data-plane address of the agent that D keeps for this sender (opaque, ≤ 64 KiB)."""
    first_index: int
    """Leading blocks D already has from its prefix cache."""
    block_ids: tuple[int, ...]
    lease_s: float
    heads: tuple[int, int] | None = None
    """KV heads (start, stop) that this sender should write; None: all of them."""
    pool_heads: tuple[int, int] | None = None
    """KV heads that D's rank holds, where they are not the sender's."""
    encoding: str = ""
    """``int8``: send the KV compressed; empty: as it is."""


class ChunkHeader(Message, frozen=True, tag="chunk"):
    """Travels with the data as the write's notification: blocks are visible when it is read."""

    transfer_id: str
    epoch: int
    """The epoch in the Grant."""
    sender_epoch: int
    rank: int
    """Tensor-parallel rank of the sender; 0 without tensor parallelism."""
    seq: int
    """0, 1, 2 … within the transfer."""
    first_index: int
    """Logical index of the first block of this chunk."""
    num_blocks: int
    num_bytes: int
    """As written, all blocks together."""
    checksum: int
    """xxh3-64 over the written bytes: blocks in logical order, segments in pool order."""
    stride: int
    """Distance of the segments that were written, which divides D's blocks; see ``kvtransfer``."""
    part: int
    """Which run of rows (layers) of the blocks: 0 … num_parts - 1."""
    num_parts: int
    encoding: str = ""
    """As granted."""


class PrefillDone(Message, frozen=True, tag="prefill-done"):
    """Everything is on its way: the first token and how many chunks. P's last word once quiet."""

    transfer_id: str
    first_token_id: int
    finished: bool
    """The answer ended at this token: nothing is transferred, D drops its reservation."""
    num_chunks: int
    sender_epoch: int = 0
    """Which start of P says so: it speaks for its own writes only."""
    is_quiet: bool = True
    """No write is in flight any more. Before that D may commit if all has arrived, and no more."""
    wait_s: float = 0.0
    """Prompt computed, but no grant or no room on the link: until this was first said …"""
    hidden_s: float = 0.0
    """… time of moving KV while the prompt was computed …"""
    exposed_s: float = 0.0
    """… and after it, see ``TransferTime``."""
    num_bytes: int = 0
    """KV as written, until this was first said."""


class TransferAck(Message, frozen=True, tag="ack"):
    """D committed (or no longer needs) the transfer; P frees its blocks."""

    transfer_id: str


class TransferCancel(Message, frozen=True, tag="cancel"):
    """D gives up; P stops, answers TransferNack(code="cancelled") when no write is in flight."""

    transfer_id: str


class TransferNack(Message, frozen=True, tag="nack"):
    """P will not write (any more): unknown, expired, out of epoch, incompatible, cancelled, failed.

    After it, no write of this start of P is in flight for the transfer: D may reuse the blocks.
    """

    transfer_id: str
    code: str
    message: str
    sender_epoch: int = 0
    """As in PrefillDone."""


class LeaseRenew(Message, frozen=True, tag="lease"):
    """The sender of this message still works on these transfers."""

    transfer_ids: tuple[str, ...]


TransferMessage = Grant | PrefillDone | TransferAck | TransferCancel | TransferNack | LeaseRenew
LinkMessage = Hello | Welcome | Refused | Ping | Pong
RequestMessage = PrefillRequest | DecodeRequest | AbortRequest
ReplyMessage = StepOutput | RequestFailed
StatusMessage = StatusRequest | StatusReply
AnyMessage = (
    LinkMessage | RequestMessage | ReplyMessage | StatusMessage | TransferMessage | ChunkHeader
)
