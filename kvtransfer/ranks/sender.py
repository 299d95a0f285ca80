"""A prefill worker's senders, one for each of its ranks, as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtransfer.events import SenderEvent, SendFailed
from kvtransfer.memory.layout import sources_of_rank
from kvtransfer.ranks.names import member_id, member_of, rank_peer, worker_of
from kvtransfer.ranks.remote_sender import RemoteSender
from kvtransfer.ranks.send_group import SendGroup
from mesh.messages import LeaseRenew, PeerRef, TransferMessage


class SenderPort(Protocol):
    """What ``TransferSender`` and ``RemoteSender`` both are."""

    def expect(self, transfer_id: str, receiver_id: str, ttl_s: float) -> None: ...
    def submit(
        self, transfer_id: str, first_index: int, block_ids: Sequence[int], part: int | None = None
    ) -> None: ...
    def finish(self, transfer_id: str, *, first_token_id: int, finished: bool) -> None: ...
    def cancel(self, transfer_id: str, code: str, message: str) -> None: ...
    def on_message(self, receiver_id: str, message: TransferMessage) -> None: ...
    def on_peer_down(self, receiver_id: str) -> None: ...
    def poll(self) -> list[SenderEvent]: ...
    @property
    def num_open(self) -> int: ...
    def congested_receivers(self) -> frozenset[str]: ...


class RankedSender:
    """Methods as of ``TransferSender``; a transfer is one for every pair of ranks with heads.

    Between workers of one rank each it is only passed on.
    """

    def __init__(
        self, local: SenderPort, remotes: Sequence[RemoteSender] = (), *, num_kv_heads: int = 1
    ) -> None:
        """Borrow the senders.

        Args:
            local: Of rank 0, in this process.
            remotes: Of the ranks 1, 2, …
            num_kv_heads: Of the whole model.
        """
        self._ranks: list[SenderPort] = [local, *remotes]
        self._remotes = remotes
        self._num_kv_heads = num_kv_heads
        self._members: dict[str, list[tuple[SenderPort, str]]] = {}
        self._groups: dict[str, SendGroup] = {}
        self._events: list[SenderEvent] = []
        self._peers: dict[str, set[str]] = {}
        """Ranks of a decode worker that were heard of, by its id."""

    def expect(self, transfer_id: str, receiver: PeerRef, ttl_s: float) -> None:
        """See ``TransferSender.expect``; the receiver says how many ranks it has."""
        worker_id = receiver.worker_id
        num_receivers = receiver.tensor_parallel
        if len(self._ranks) == num_receivers == 1:
            self._ranks[0].expect(transfer_id, worker_id, ttl_s)
            return
        if transfer_id in self._groups:
            raise ValueError(f"transfer {transfer_id} is already expected")
        try:
            pairs = [
                (source, rank)
                for rank in range(num_receivers)
                for source, _ in sources_of_rank(
                    rank, num_receivers, len(self._ranks), self._num_kv_heads
                )
            ]
        except ValueError as error:  # no such worker could have started
            self._events.append(SendFailed(transfer_id, "bad_rank", str(error)))
            return
        members = [(self._ranks[s], member_id(transfer_id, s, rank)) for s, rank in pairs]
        by_member = {member: port for port, member in members}
        self._members[transfer_id] = members
        self._groups[transfer_id] = SendGroup(
            transfer_id, by_member, lambda member, *why: by_member[member].cancel(member, *why)
        )
        for (port, member), (_, rank) in zip(members, pairs, strict=True):
            peer_id = rank_peer(worker_id, rank)
            self._peers.setdefault(worker_id, set()).add(peer_id)
            port.expect(member, peer_id, ttl_s)

    def submit(
        self,
        transfer_id: str,
        first_index: int,
        block_ids: Sequence[int],
        part: int | None = None,
        *,
        step: int = 0,
    ) -> None:
        """See ``TransferSender.submit``; ``step`` is the number of the one that computed them."""
        for remote in self._remotes:
            remote.step = step
        for port, member in self._of(transfer_id):
            port.submit(member, first_index, block_ids, part)

    def finish(self, transfer_id: str, *, first_token_id: int, finished: bool) -> None:
        """See ``TransferSender.finish``."""
        for port, member in self._of(transfer_id):
            port.finish(member, first_token_id=first_token_id, finished=finished)

    def cancel(self, transfer_id: str, code: str, message: str) -> None:
        """See ``TransferSender.cancel``."""
        for port, member in self._of(transfer_id):
            port.cancel(member, code, message)

    def on_message(self, worker_id: str, message: TransferMessage) -> None:
        """A decode worker's message, for the rank that its transfer id names."""
        for rank, receiver_rank, part in split_by_rank(message):
            if receiver_rank is None:
                self._ranks[0].on_message(worker_id, part)
            else:
                peer_id = rank_peer(worker_id, receiver_rank)
                self._peers.setdefault(worker_id, set()).add(peer_id)
                known = rank if rank < len(self._ranks) else 0  # which refuses what it can't know
                self._ranks[known].on_message(peer_id, part)

    def on_peer_down(self, worker_id: str) -> None:
        """The link to a decode worker, or to another peer, is gone."""
        self._ranks[0].on_peer_down(worker_id)
        for peer_id in sorted(self._peers.pop(worker_id, ())):
            for port in self._ranks:
                port.on_peer_down(peer_id)

    def poll(self) -> list[SenderEvent]:
        """See ``TransferSender.poll``."""
        events, self._events = self._events, []
        for port in self._ranks:
            for event in port.poll():
                joined = self._joined(event)
                if joined is not None:
                    events.append(joined)
        return events

    @property
    def num_open(self) -> int:
        """Transfers of all ranks, each counted."""
        return sum(port.num_open for port in self._ranks)

    def congested_receivers(self) -> frozenset[str]:
        """Workers with a rank for which no more prompts should be begun now."""
        congested = [peer for port in self._ranks for peer in port.congested_receivers()]
        return frozenset(map(worker_of, congested))

    def _of(self, transfer_id: str) -> list[tuple[SenderPort, str]]:
        plain = [(self._ranks[0], transfer_id)] if len(self._ranks) == 1 else []
        return self._members.get(transfer_id, plain)

    def _joined(self, event: SenderEvent) -> SenderEvent | None:
        member = member_of(event.transfer_id)
        group = self._groups.get(member[0]) if member else None
        if member is None or group is None:
            return event
        over = group.on_event(event)
        if over is not None:
            del self._groups[member[0]], self._members[member[0]]
        return over


def split_by_rank(
    message: TransferMessage,
) -> list[tuple[int, int | None, TransferMessage]]:
    """A message by the pairs of ranks it is about.

    Returns:
        The sender's rank, the receiver's (None: the transfer's id is plain), and its part.
    """
    if not isinstance(message, LeaseRenew):
        member = member_of(message.transfer_id)
        return [(0, None, message) if member is None else (member[1], member[2], message)]
    by_pair: dict[tuple[int, int | None], list[str]] = {}
    for transfer_id in message.transfer_ids:
        member = member_of(transfer_id)
        pair = (0, None) if member is None else (member[1], member[2])
        by_pair.setdefault(pair, []).append(transfer_id)
    return [(*pair, LeaseRenew(transfer_ids=tuple(ids))) for pair, ids in by_pair.items()]
