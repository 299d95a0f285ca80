"""What a sender accepts as a Grant. It names another process's memory, so all of it is checked."""

from __future__ import annotations

from dataclasses import replace

from kvtransfer.errors import BadAddress
from kvtransfer.memory.layout import MAX_GRANT_BLOCKS, BlockLayout, WritePlan, plan_write
from kvtransfer.transports.address import MAX_ADDRESS_BYTES, unpack_address
from kvtransfer.transports.base import Transport
from mesh.kv_heads import Heads
from mesh.messages import Grant


def grant_fault(grant: Grant, fingerprint: str, transport: Transport) -> tuple[str, str] | None:
    """Code and text of why this sender can't write into a grant, or None if it can."""
    if grant.fingerprint != fingerprint:
        return "fingerprint_mismatch", "the KV layouts differ"
    if grant.transport not in transport.names:
        return "transport_mismatch", f"this worker writes over {', '.join(transport.names)}"
    num_blocks = len(grant.block_ids)
    if num_blocks > MAX_GRANT_BLOCKS or len(grant.address) > MAX_ADDRESS_BYTES:
        return "bad_grant", "too large"
    if grant.first_index < 0 or len(set(grant.block_ids)) != num_blocks:
        return "bad_grant", "negative index or repeated block"
    try:
        address = unpack_address(grant.address, transport=grant.transport)
    except BadAddress as error:
        return error.code, str(error)
    if num_blocks and not 0 <= min(grant.block_ids) <= max(grant.block_ids) < address.num_blocks:
        return "bad_grant", "a block is outside the receiver's pool"
    return None


def plan_grant(grant: Grant, layout: BlockLayout, num_parts: int) -> WritePlan | None:
    """How to write into a grant without a fault; None where the two pools do not go together."""
    pool = Heads(start=grant.pool_heads[0], stop=grant.pool_heads[1]) if grant.pool_heads else None
    receiver = layout if pool is None else replace(layout, heads=pool)
    wanted = grant.heads or (layout.heads.start, layout.heads.stop)
    heads = Heads(start=wanted[0], stop=wanted[1])
    if not (layout.heads.holds(heads) and receiver.heads.holds(heads)):
        return None
    address = unpack_address(grant.address, transport=grant.transport)
    if address.block_bytes != receiver.block_bytes:
        return None
    return plan_write(layout, receiver, heads, num_parts)
