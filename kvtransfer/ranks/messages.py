"""What rank 0 and a follower tell each other about the follower's transfers.

Rank 0 has the links to other workers and decides; each rank moves its own memory.

    rank 0 → P's follower    Expect, SubmitBlocks, FinishSend, CancelSend
    rank 0 → D's follower    OpenReceive, CancelReceive, PeerUp
    rank 0 → either          Deliver, PeerDown
    follower → rank 0        Outgoing, and what its sender or receiver reports
"""

from __future__ import annotations

import msgspec

from mesh.messages import PeerRef, PrefillDone, TransferMessage


class _RankMessage(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Both ends are of one version: no compatibility is needed."""


class Deliver(_RankMessage, frozen=True, tag="deliver"):
    """A peer's message, for this rank."""

    peer_id: str
    message: TransferMessage


class PeerUp(_RankMessage, frozen=True, tag="up"):
    """As ``TransferReceiver.on_peer_up``."""

    peer_id: str
    transports: tuple[str, ...]
    host_id: str


class PeerDown(_RankMessage, frozen=True, tag="down"):
    """As ``on_peer_down`` of sender and receiver."""

    peer_id: str
    code: str = "peer_down"
    reason: str = ""


class Expect(_RankMessage, frozen=True, tag="expect"):
    """As ``TransferSender.expect``."""

    transfer_id: str
    receiver_id: str
    ttl_s: float


class SubmitBlocks(_RankMessage, frozen=True, tag="submit"):
    """As ``TransferSender.submit``, once this rank has computed as much."""

    transfer_id: str
    first_index: int
    block_ids: tuple[int, ...]
    part: int | None
    step: int
    """Number of the step that computed the blocks last."""


class FinishSend(_RankMessage, frozen=True, tag="finish"):
    """As ``TransferSender.finish``."""

    transfer_id: str
    first_token_id: int
    finished: bool


class CancelSend(_RankMessage, frozen=True, tag="cancel-send"):
    """As ``TransferSender.cancel``."""

    transfer_id: str
    code: str
    message: str


class OpenReceive(_RankMessage, frozen=True, tag="open"):
    """As ``TransferReceiver.open``."""

    transfer_id: str
    sender: PeerRef
    block_ids: tuple[int, ...]
    first_index: int
    rank: int
    heads: tuple[int, int]


class CancelReceive(_RankMessage, frozen=True, tag="cancel-receive"):
    """As ``TransferReceiver.cancel``."""

    transfer_id: str


class Outgoing(_RankMessage, frozen=True, tag="outgoing"):
    """A message for a peer."""

    peer_id: str
    message: TransferMessage


class Congested(_RankMessage, frozen=True, tag="congested"):
    """As ``TransferSender.congested_receivers``; told when it changes."""

    receiver_ids: tuple[str, ...]


class SendEnded(_RankMessage, frozen=True, tag="send-ended"):
    """SendDone, or SendFailed where there is a code."""

    transfer_id: str
    num_bytes: int = 0
    hidden_s: float = 0.0
    exposed_s: float = 0.0
    code: str = ""
    message: str = ""


class ReceiveCommitted(_RankMessage, frozen=True, tag="committed"):
    """Committed."""

    transfer_id: str
    done: PrefillDone
    late_s: float


class ReceiveLost(_RankMessage, frozen=True, tag="receive-failed"):
    """ReceiveFailed."""

    transfer_id: str
    code: str
    message: str


class ReceiveReleased(_RankMessage, frozen=True, tag="released"):
    """BlocksReleased."""

    transfer_id: str
    block_ids: tuple[int, ...]


SendCommand = Deliver | PeerDown | Expect | SubmitBlocks | FinishSend | CancelSend
SendReport = Outgoing | Congested | SendEnded
ReceiveCommand = Deliver | PeerUp | PeerDown | OpenReceive | CancelReceive
ReceiveReport = Outgoing | ReceiveCommitted | ReceiveLost | ReceiveReleased
