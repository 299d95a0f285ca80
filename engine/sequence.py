"""A sequence: the engine's token state for one request."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from engine.grammar_state import GrammarState
from mesh.messages import FinishReason, SamplingParams, SloClass
from mesh.transitions import between_states

_PATIENCE_S: dict[SloClass, float] = {"interactive": 0.0, "batch": 60.0}
"""Batch work yields to interactive work that arrives up to this much later."""
_PROMPT_TOKEN_S = 0.002
"""Slack per prompt token; of the order of its computing time on a CPU, far above it on a GPU."""


class SequenceState(enum.Enum):
    """Where a sequence is in its life.

    ::

        WAITING ──schedule──▶ RUNNING ──▶ FINISHED
           ▲                    │
           └──────preempt───────┘
        WAITING ──blocks reserved──▶ WAITING_FOR_KV ──commit──▶ RUNNING    (KV from another worker)
        RUNNING ──first token──▶ SENDING ──▶ FINISHED   (prefill worker, blocks pinned for transfer)
        any ──abort──▶ FINISHED
    """

    WAITING = enum.auto()
    WAITING_FOR_KV = enum.auto()
    RUNNING = enum.auto()
    SENDING = enum.auto()
    FINISHED = enum.auto()


_S = SequenceState

_TRANSITIONS = between_states(
    {
        _S.WAITING: (_S.RUNNING, _S.WAITING_FOR_KV, _S.FINISHED),
        _S.WAITING_FOR_KV: (_S.RUNNING, _S.FINISHED),
        _S.RUNNING: (_S.WAITING, _S.SENDING, _S.FINISHED),
        _S.SENDING: (_S.FINISHED,),
    }
)


@dataclass(slots=True, eq=False)
class Sequence:
    """Token state of one request on one worker. The block pool owns the blocks; this holds ids."""

    request_id: str
    transfer_id: str
    token_ids: list[int]
    """Prompt and output tokens; grows by one at each sampled token."""
    num_prompt_tokens: int
    """The client's prompt; what follows was generated, possibly by an earlier attempt."""
    sampling: SamplingParams
    deadline_s: float
    """``time.monotonic()`` at which the request expires."""
    arrival_s: float
    priority: int = 0
    slo_class: SloClass = "interactive"
    cache_salt: str = ""
    has_receiver: bool = True
    """False on a prefill worker until a decode worker has room for the KV (its Grant came)."""
    is_remote: bool = False
    """True while it waits for room for KV that a prefill worker computes."""
    is_backpressured: bool = False
    """True on a prefill worker while the link to its decode worker carries all that it can."""
    state: SequenceState = SequenceState.WAITING
    block_table: list[int] = field(default_factory=list)
    """Logical block index → physical block id."""
    num_computed_tokens: int = 0
    """Leading tokens whose KV is in the cache, or will be when the launched steps are done."""
    num_cached_tokens: int = 0
    """Tokens found in the prefix cache at first scheduling."""
    num_registered_blocks: int = 0
    """Leading full blocks already published to the prefix cache."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Hash chain over full blocks of ``token_ids``; filled lazily by the prefix cache."""
    first_step_s: float = 0.0
    """``time.monotonic()`` when its first step began; 0 before."""
    num_preemptions: int = 0
    num_passed: int = 0
    """Less urgent sequences that were admitted while blocks were too few for this one."""
    finish_reason: FinishReason | None = None
    grammar_state: GrammarState | None = None
    """Its place in the grammar it must follow; None: free text."""
    num_pending_tokens: int = 0
    """Tokens that launched steps sample and nobody has read yet; they follow ``token_ids``."""
    pending_row: int = 0
    """Which sampled row of the last launched step holds the last pending token."""

    def move(self, state: SequenceState) -> None:
        """Change state.

        Raises:
            IllegalTransition: the transition table has no such edge.
        """
        self.state = _TRANSITIONS.next(self.state, state)

    @property
    def urgency(self) -> tuple[int, float]:
        """Sort key: priority, then a virtual deadline; the least runs first, the largest yields.

        The deadline allows for the class's patience and for the prompt's own length, so short
        prompts pass long ones, and whatever has waited long enough passes everything newer.
        """
        slack_s = _PATIENCE_S[self.slo_class] + self.num_prompt_tokens * _PROMPT_TOKEN_S
        return (self.priority, self.arrival_s + slack_s)

    @property
    def num_tokens(self) -> int:
        """Prompt plus output tokens so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, over all attempts."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def next_output_index(self) -> int:
        """Index of the output token that the next step to be launched would sample."""
        return self.num_output_tokens + self.num_pending_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that no launched step computes the KV of; 1 while decoding."""
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens

    @property
    def is_running(self) -> bool:
        """Whether it still wants what steps compute for it; false once aborted or handed off."""
        return self.state is SequenceState.RUNNING

    @property
    def is_answering(self) -> bool:
        """Whether it wants another token."""
        return self.is_running and self.finish_reason is None

    @property
    def awaits_grammar(self) -> bool:
        """Whether its grammar is not ready: no step may sample it."""
        return self.grammar_state is not None and self.grammar_state.is_busy

    def append(self, token_id: int) -> None:
        """Add a sampled token and set ``finish_reason`` if it ends the answer."""
        self.token_ids.append(token_id)
        sampling = self.sampling
        # A grammar lets stop tokens pass only where it ends, and it may end before min_tokens.
        may_stop = bool(sampling.grammar) or self.num_output_tokens > sampling.min_tokens
        if token_id in sampling.stop_token_ids and may_stop:
            self.finish_reason = "stop"
        elif self.num_output_tokens >= sampling.max_tokens:
            self.finish_reason = "length"
