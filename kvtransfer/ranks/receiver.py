"""A decode worker's receivers, one for each of its ranks, as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from kvtransfer.events import BlocksReleased, ReceiveFailed, ReceiverEvent
from kvtransfer.memory.layout import sources_of_rank
from kvtransfer.ranks.names import member_id, member_of, rank_peer
from kvtransfer.ranks.receive_group import GroupState, RankGroup
from kvtransfer.ranks.sender import split_by_rank
from mesh.kv_heads import Heads
from mesh.messages import PeerRef, TransferMessage


class ReceiverPort(Protocol):
    """What ``TransferReceiver`` and ``RemoteReceiver`` both are."""

    def open(
        self,
        transfer_id: str,
        sender: PeerRef,
        block_ids: Sequence[int],
        first_index: int,
        *,
        rank: int = 0,
        heads: Heads | None = None,
    ) -> None: ...
    def cancel(self, transfer_id: str) -> None: ...
    def on_message(self, sender_id: str, message: TransferMessage) -> None: ...
    def on_peer_up(self, sender_id: str, transports: Sequence[str], host_id: str) -> None: ...
    def on_peer_down(self, sender_id: str, code: str = ..., reason: str = ...) -> None: ...
    def poll(self) -> list[ReceiverEvent]: ...
    @property
    def num_open(self) -> int: ...


class RankedReceiver:
    """Methods as of ``TransferReceiver``; a transfer is one for every pair of ranks with heads.

    Between workers of one rank each it is only passed on.
    """

    def __init__(self, ranks: Sequence[ReceiverPort], *, num_kv_heads: int = 1) -> None:
        """Borrow the receivers of all ranks; ``num_kv_heads`` of the whole model."""
        self._ranks = ranks
        self._num_kv_heads = num_kv_heads
        self._groups: dict[str, RankGroup] = {}
        self._events: list[ReceiverEvent] = []
        self._peers: dict[str, set[str]] = {}
        """Peers that a prefill worker is, by its id: its ranks."""

    def open(
        self, transfer_id: str, sender: PeerRef, block_ids: Sequence[int], first_index: int
    ) -> None:
        """See ``TransferReceiver.open``; the sender says how many ranks it has."""
        worker_id, num_senders, num_ranks = (
            sender.worker_id, sender.tensor_parallel, len(self._ranks),
        )  # fmt: skip
        peers = self._peers.setdefault(worker_id, set())
        if num_senders == num_ranks == 1:
            peers.add(worker_id)
            self._ranks[0].open(transfer_id, sender, block_ids, first_index)
            return
        if transfer_id in self._groups:
            raise ValueError(f"transfer {transfer_id} is already open")
        try:
            sources = [
                (rank, source, heads)
                for rank in range(num_ranks)
                for source, heads in sources_of_rank(
                    rank, num_ranks, num_senders, self._num_kv_heads
                )
            ]
        except ValueError as error:  # no such worker could have started
            self._events += [
                ReceiveFailed(transfer_id, "bad_rank", str(error)),
                BlocksReleased(transfer_id, tuple(block_ids)),
            ]
            return
        by_member = {
            member_id(transfer_id, source, rank): self._ranks[rank] for rank, source, _ in sources
        }
        self._groups[transfer_id] = RankGroup(
            transfer_id, tuple(block_ids), by_member,
            lambda member: by_member[member].cancel(member),
        )  # fmt: skip
        peers.update(rank_peer(worker_id, source) for source in range(num_senders))
        for rank, source, heads in sources:
            peer = msgspec.structs.replace(sender, worker_id=rank_peer(worker_id, source))
            self._ranks[rank].open(
                member_id(transfer_id, source, rank), peer, block_ids, first_index,
                rank=source, heads=heads,
            )  # fmt: skip

    def cancel(self, transfer_id: str) -> None:
        """See ``TransferReceiver.cancel``."""
        group = self._groups.get(transfer_id)
        if group is not None:
            group.cancel()
        else:
            self._ranks[0].cancel(transfer_id)

    def on_message(self, worker_id: str, message: TransferMessage) -> None:
        """A prefill worker's message, for the rank that its transfer id names."""
        for sender_rank, rank, part in split_by_rank(message):
            if rank is None:
                self._ranks[0].on_message(worker_id, part)
            elif rank < len(self._ranks):
                self._ranks[rank].on_message(rank_peer(worker_id, sender_rank), part)

    def on_peer_up(self, worker_id: str, transports: Sequence[str], host_id: str) -> None:
        """See ``TransferReceiver.on_peer_up``; its ranks are all on one host."""
        for peer_id in sorted(self._peers.get(worker_id, {worker_id})):
            for port in self._ranks:
                port.on_peer_up(peer_id, transports, host_id)

    def on_peer_down(self, worker_id: str, code: str = "peer_down", reason: str = "") -> None:
        """See ``TransferReceiver.on_peer_down``."""
        for peer_id in sorted(self._peers.pop(worker_id, {worker_id})):
            for port in self._ranks:
                port.on_peer_down(peer_id, code, reason)

    def poll(self) -> list[ReceiverEvent]:
        """See ``TransferReceiver.poll``."""
        events, self._events = self._events, []
        for port in self._ranks:
            for event in port.poll():
                events += self._joined(event)
        return events

    @property
    def num_open(self) -> int:
        """Transfers of all ranks, each counted."""
        return sum(port.num_open for port in self._ranks)

    def _joined(self, event: ReceiverEvent) -> list[ReceiverEvent]:
        member = member_of(event.transfer_id)
        group = self._groups.get(member[0]) if member else None
        if member is None or group is None:
            return [event]
        events = group.on_event(event)
        if group.state in (GroupState.COMMITTED, GroupState.RELEASED):
            del self._groups[member[0]]
        return events
