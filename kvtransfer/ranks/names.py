"""Names of ranks and of the transfers between them.

Between workers of one rank each, peers and transfers are called as they are. Where either has more,
every pair of ranks has a transfer of its own, and every rank is a peer of its own:

    worker ``prefill-0``, rank 1   ``prefill-0/1``          worker ids have no slash
    transfer ``t``, P's 1 to D's 0 ``t/1-0``
"""

from __future__ import annotations

import re

from kvtransfer.outbox import Send
from mesh.messages import TransferMessage

_MEMBER = re.compile(r"(.+)/(\d{1,3})-(\d{1,3})", re.ASCII | re.DOTALL)


def rank_peer(worker_id: str, rank: int) -> str:
    """A rank as a peer."""
    return f"{worker_id}/{rank}"


def worker_of(peer_id: str) -> str:
    """The worker whose link leads to a peer."""
    return peer_id.partition("/")[0]


def member_id(transfer_id: str, sender_rank: int, rank: int) -> str:
    """Transfer id of one pair of ranks."""
    return f"{transfer_id}/{sender_rank}-{rank}"


def member_of(transfer_id: str) -> tuple[str, int, int] | None:
    """The whole hand-off's id, the sender's rank and the receiver's; None of a plain id."""
    match = _MEMBER.fullmatch(transfer_id)
    return None if match is None else (match[1], int(match[2]), int(match[3]))


def by_worker(send: Send) -> Send:
    """Send to a rank by way of its worker."""

    def send_to_worker(peer_id: str, message: TransferMessage) -> bool:
        return send(worker_of(peer_id), message)

    return send_to_worker
