"""What the two state machines tell their worker; returned by ``poll``."""

from __future__ import annotations

from dataclasses import dataclass

from mesh.messages import PrefillDone


@dataclass(frozen=True, slots=True)
class Committed:
    """Receiver: every granted block arrived and verified (or ``done.finished``: none will come).

    The blocks now belong to the caller.
    """

    transfer_id: str
    done: PrefillDone
    late_s: float = 0.0
    """From P's first word that all was on its way until it had arrived and was verified."""


@dataclass(frozen=True, slots=True)
class ReceiveFailed:
    """Receiver: the transfer is lost, at most once each. Its blocks are NOT reusable yet."""

    transfer_id: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class BlocksReleased:
    """Receiver: exactly once after a failure or cancel; nobody can write there any more."""

    transfer_id: str
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendDone:
    """Sender: the transfer is over and its blocks may be freed."""

    transfer_id: str
    num_bytes: int = 0
    """As written."""
    hidden_s: float = 0.0
    """Time of moving them while the prompt was still being computed …"""
    exposed_s: float = 0.0
    """… and after it, see ``TransferTime``."""


@dataclass(frozen=True, slots=True)
class SendFailed:
    """Sender: the transfer failed or was cancelled; its blocks may be freed."""

    transfer_id: str
    code: str
    message: str


ReceiverEvent = Committed | ReceiveFailed | BlocksReleased
SenderEvent = SendDone | SendFailed
