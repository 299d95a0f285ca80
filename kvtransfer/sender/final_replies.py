"""What a sender says at the end of a transfer: done, or not, and to its worker how it went."""

from __future__ import annotations

import msgspec

from kvtransfer.events import SendDone, SenderEvent, SendFailed
from kvtransfer.lease import Clock
from kvtransfer.outbox import Outbox
from kvtransfer.sender.not_open import NotOpen
from kvtransfer.sender.state import Outgoing, SendState
from mesh.messages import PrefillDone, TransferNack


class FinalReplies:
    """Posts them, and has them remembered for whoever asks later."""

    def __init__(self, outbox: Outbox, not_open: NotOpen, epoch: int, clock: Clock) -> None:
        self._clock = clock
        self._outbox = outbox
        self._not_open = not_open
        self._epoch = epoch

    def announce(self, outgoing: Outgoing) -> None:
        """Tell once that all that is left is on its way, so that D commits when it has come."""
        done = outgoing.done
        if done is None or done.finished or outgoing.is_announced or outgoing.pending:
            return
        if outgoing.state is SendState.WRITING and outgoing.has_written_all():
            self.say_done(outgoing, done, is_quiet=False)

    def say_done(self, outgoing: Outgoing, done: PrefillDone, *, is_quiet: bool = True) -> None:
        """Send PrefillDone; quiet: no write of it is in flight."""
        if not outgoing.is_announced:  # from here on D counts
            now_s, time = self._clock(), outgoing.time
            done = msgspec.structs.replace(
                done, wait_s=time.waited_until(now_s), hidden_s=time.hidden_s,
                exposed_s=time.exposed_until(now_s),
                num_bytes=outgoing.num_bytes,
            )  # fmt: skip
        outgoing.is_announced = True
        outgoing.done = msgspec.structs.replace(
            done, num_chunks=outgoing.next_seq, is_quiet=is_quiet
        )
        self._outbox.post(outgoing.receiver_id, outgoing.done)

    def refuse(self, receiver_id: str, transfer_id: str, code: str, message: str) -> None:
        """Send a Nack."""
        self._outbox.post(receiver_id, self._nack(transfer_id, code, message))

    def close(self, outgoing: Outgoing) -> SenderEvent:
        """The transfer is over: what the worker hears of it."""
        transfer_id = outgoing.transfer_id
        if outgoing.failure is None:
            assert outgoing.done is not None
            done = msgspec.structs.replace(outgoing.done, is_quiet=True)
            self._not_open.add_last_word(transfer_id, done)
            return SendDone(
                transfer_id,
                num_bytes=outgoing.num_bytes,
                hidden_s=outgoing.time.hidden_s,
                exposed_s=outgoing.time.exposed_s,
            )
        code, message = outgoing.failure
        nack = self._nack(transfer_id, code, message)
        self._not_open.add_last_word(transfer_id, nack)
        if outgoing.grant is not None and code != "peer_down":
            self._outbox.post(outgoing.receiver_id, nack)
        return SendFailed(transfer_id, code, message)

    def _nack(self, transfer_id: str, code: str, message: str) -> TransferNack:
        return TransferNack(
            transfer_id=transfer_id, code=code, message=message, sender_epoch=self._epoch
        )
