"""One sequence's life on the gateway's clock, cut into parts that add up to the whole.

::

    arrived   decoded    tokenised   sent         P's token    D's first token    last    told
       │ receive │ tokenise  │ dispatch │               │              │            │        │
       └─────────┴───────────┴──────────┼───────────────┴──────────────┼────────────┴────────┘
                                        │ queue  prefill  kv_wait      │   decode    respond
                                        │ kv_exposed  decode_queue     │
                                        │ decode (its first step)      │
                                        └ network: what is left of it ─┘

Workers report durations by their own clocks, never times. All those between ``sent`` and D's first
token lie one after the other on the way gateway → P → D → gateway, so what is left of that window
is what nobody counted: the network, and the queues of sockets and event loops. An attempt that
fails turns what it took since the last token into ``retry``.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from mesh.leg_timing import LegTiming

Part = Literal[
    "receive",
    "tokenise",
    "dispatch",
    "retry",
    "queue",
    "prefill",
    "kv_wait",
    "kv_exposed",
    "decode_queue",
    "decode",
    "network",
    "respond",
]
PARTS: tuple[Part, ...] = (
    "receive", "tokenise", "dispatch", "retry", "queue", "prefill", "kv_wait", "kv_exposed",
    "decode_queue", "decode", "network", "respond",
)  # fmt: skip


MAX_KV_BYTES = 1 << 48
"""More is not believed of one transfer."""


class Arrival(NamedTuple):
    """What came before the first attempt, as ``time.monotonic()``."""

    arrived_s: float
    """The request's head was read."""
    decoded_s: float
    """Its body was read and checked."""
    tokenised_s: float
    """Template and tokeniser were done."""


class Timeline:
    """Fed by one generation; read once it has ended."""

    __slots__ = (
        "_arrival",
        "_cursor_s",
        "_first_leg",
        "_has_prefill",
        "_is_open",
        "_parts",
        "hidden_s",
        "kv_bytes",
        "num_attempts",
        "workers",
    )

    def __init__(self, arrival: Arrival) -> None:
        self._arrival = arrival
        self._cursor_s = arrival.tokenised_s
        """Up to here every moment has been given to a part."""
        self._has_prefill = False
        self._is_open = False
        """Whether an attempt's time is not divided yet."""
        self._first_leg: LegTiming | None = None
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._parts["receive"] = arrival.decoded_s - arrival.arrived_s
        self._parts["tokenise"] = arrival.tokenised_s - arrival.decoded_s
        self.hidden_s = 0.0
        """KV moved behind the prefill; no part, since nobody waited for it."""
        self.kv_bytes = 0
        """KV written from prefill to decode workers, over all attempts."""
        self.num_attempts = 0
        self.workers: tuple[str, ...] = ()
        """Of the last attempt: the decode worker, and the prefill worker where it had one."""

    def on_attempt(self, now_s: float, workers: tuple[str, ...]) -> None:
        """An attempt is sent now."""
        self._give("retry" if self.num_attempts else "dispatch", now_s)
        self.num_attempts += 1
        self.workers = workers
        self._has_prefill = len(workers) > 1
        self._first_leg = None
        self._is_open = True

    def on_leg(self, timing: LegTiming, now_s: float) -> bool:
        """A leg's first output came: P's first, where there is one.

        Returns:
            Whether it was D's, after P's: KV went from one to the other.
        """
        if not self._is_open:
            return False
        if self._first_leg is None:
            self._first_leg = timing
            if not self._has_prefill:
                self._close_window(now_s)
            return False  # else D's closes the window
        self.hidden_s += timing.kv_hidden_s
        self.kv_bytes += min(max(0, timing.kv_bytes), MAX_KV_BYTES)
        self._close_window(now_s, timing)
        return True

    def on_attempt_failed(self, last_token_s: float) -> None:
        """The attempt is over; what came after its last token is lost."""
        self._settle(last_token_s)

    def finish(self, last_token_s: float, now_s: float) -> None:
        """The answer is complete, or was given up."""
        self._settle(last_token_s)
        self._give("respond", now_s)

    @property
    def parts(self) -> dict[Part, float]:
        """Seconds of every part; their sum is the time from arrival to ``finish``."""
        return self._parts

    def as_json(self, num_tokens: int, first_s: float, last_s: float) -> dict[str, Any]:
        """The object that clients see; see ``docs/api.md``.

        Args:
            num_tokens: Output tokens.
            first_s: When the first one came.
            last_s: When the last one came.
        """
        arrived_s = self._arrival.arrived_s
        gaps = num_tokens - 1
        return {
            "total_s": sum(self._parts.values()),
            "ttft_s": first_s - arrived_s if num_tokens else None,
            "tpot_s": (last_s - first_s) / gaps if gaps > 0 else None,
            "parts": {f"{part}_s": seconds for part, seconds in self._parts.items()},
            "kv_hidden_s": self.hidden_s,
            "kv_bytes": self.kv_bytes,
            "attempts": self.num_attempts,
            "decode_worker": self.workers[0] if self.workers else None,
            "prefill_worker": self.workers[1] if len(self.workers) > 1 else None,
        }

    def _close_window(self, now_s: float, decode: LegTiming | None = None) -> None:
        first, parts = self._first_leg, self._parts
        assert first is not None
        spans: list[tuple[Part, float]] = [("queue", first.queue_s), ("prefill", first.compute_s)]
        if decode is not None:
            spans += [
                ("kv_wait", decode.kv_wait_s),
                ("kv_exposed", decode.kv_exposed_s),
                ("decode_queue", decode.queue_s),
                ("decode", decode.compute_s),
            ]
        left_s = now_s - self._cursor_s
        for part, seconds in spans:
            # A worker's word is not trusted to be more than the time there was.
            given_s = min(max(0.0, seconds), left_s)
            parts[part] += given_s
            left_s -= given_s
        parts["network"] += left_s
        self._cursor_s = now_s
        self._is_open = False

    def _settle(self, last_token_s: float) -> None:
        """Divide the time until the last token; it may be before the last attempt."""
        if last_token_s <= self._cursor_s:
            return
        if self._is_open and self._first_leg is not None:
            self._close_window(last_token_s)  # it ended at P's token
        else:
            self._give("decode", last_token_s)

    def _give(self, part: Part, until_s: float) -> None:
        self._parts[part] += until_s - self._cursor_s
        self._cursor_s = until_s
