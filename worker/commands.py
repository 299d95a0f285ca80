"""Commands and events that both roles' hot loops exchange with their control loops."""

from __future__ import annotations

from dataclasses import dataclass

from mesh.messages import RequestFailed, TokenOutput


@dataclass(slots=True, frozen=True)
class Abort:
    """Command: a gateway gave an attempt up."""

    transfer_id: str


@dataclass(slots=True, frozen=True)
class GatewayLost:
    """Command: nobody waits for this gateway's requests any more."""

    gateway_id: str


@dataclass(slots=True, frozen=True)
class CancelTransfer:
    """Event: the sequence is gone; stop its transfer. A command follows once that has happened."""

    transfer_id: str


@dataclass(slots=True, frozen=True)
class Tokens:
    """Event: outputs of one step for one gateway."""

    gateway_id: str
    outputs: tuple[TokenOutput, ...]


@dataclass(slots=True, frozen=True)
class Failed:
    """Event: this leg is over."""

    gateway_id: str
    message: RequestFailed
