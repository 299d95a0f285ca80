"""Makes the Grant of a transfer."""

from __future__ import annotations

from kvtransfer.memory.layout import BlockLayout
from kvtransfer.receiver.state import Incoming
from mesh.messages import Grant


def make_grant(
    incoming: Incoming, layout: BlockLayout, *, fingerprint: str, epoch: int, lease_s: float,
    transport: str, address: bytes,
) -> Grant:  # fmt: skip
    """Offer the blocks of ``incoming``, in a pool of this layout, at this endpoint."""
    heads = incoming.heads
    return Grant(
        transfer_id=incoming.transfer_id,
        fingerprint=fingerprint,
        epoch=epoch,
        transport=transport,
        address=address,
        first_index=incoming.first_index,
        block_ids=incoming.block_ids,
        lease_s=lease_s,
        heads=heads.bounds if heads else None,
        pool_heads=layout.heads.bounds if heads else None,
        encoding=incoming.encoding,
    )
