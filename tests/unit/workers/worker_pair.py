"""A prefill and a decode worker in one process, advanced by hand one small turn at a time.

Hot loops, sender, receiver and the in-process data plane are the real ones; the wire and the
queues between hot loop and control loop are deques here, so that a test decides who moves next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import decode_worker.loop as d
import prefill_worker.loop as p
from engine.engine import Engine
from kvtransfer.events import BlocksReleased, Committed, ReceiveFailed, SendFailed
from kvtransfer.memory.layout import BlockLayout
from kvtransfer.memory.pool import BlockMemory
from kvtransfer.outbox import Send
from kvtransfer.receiver.receiver import TransferReceiver
from kvtransfer.sender.sender import TransferSender
from kvtransfer.transports.base import Transport
from kvtransfer.transports.factory import make_transport
from kvtransfer.transports.fault_injection import Faults, FaultySend, FaultyTransport
from kvtransfer.transports.inproc import InprocFabric, InprocTransport
from mesh.errors import TransferFailed
from mesh.kv_heads import Heads
from mesh.messages import (
    DecodeRequest,
    Grant,
    PeerRef,
    PrefillRequest,
    RequestFailed,
    SamplingParams,
    TokenOutput,
    TransferMessage,
)
from worker.commands import Abort, CancelTransfer, Failed, GatewayLost, Tokens

GATEWAY = "g"
P_REF = PeerRef(worker_id="p", epoch=1, endpoint="tcp://nowhere:1")
D_REF = PeerRef(worker_id="d", epoch=1, endpoint="tcp://nowhere:2")
LEASE_S = 10.0


class WorkerPair:
    """What a gateway would have heard is in ``outputs`` and ``failures``, by transfer."""

    def __init__(
        self, prefill: Engine, decode: Engine, *, transport: str = "inproc",
        faults: Faults | None = None, layer_groups: int = 1,
    ) -> None:  # fmt: skip
        self.now_s = 0.0
        self.engines = (prefill, decode)
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.failures: dict[str, list[RequestFailed]] = {}
        self.p_loop, self.d_loop = p.PrefillLoop(prefill, layer_groups), d.DecodeLoop(decode)
        self.p_inbox: deque[p.Command] = deque()
        self.d_inbox: deque[d.Command] = deque()
        self.p_events: deque[p.Event] = deque()
        self.d_events: deque[d.Event] = deque()
        self.to_p: deque[TransferMessage] = deque()
        self.to_d: deque[TransferMessage] = deque()
        fabric = InprocFabric()
        assert prefill.fingerprint == decode.fingerprint
        common: dict[str, Any] = {
            "epoch": 1,
            "fingerprint": prefill.fingerprint,
            "lease_s": LEASE_S,
            "clock": lambda: self.now_s,
        }
        transports: list[Transport] = [
            InprocTransport(_memory(engine), fabric=fabric)
            if transport == "inproc"
            else make_transport(transport, _memory(engine), name, 1)
            for name, engine in (("p", prefill), ("d", decode))
        ]
        sends: list[Send] = [_appending(self.to_d), _appending(self.to_p)]
        if faults is not None:
            transports = [FaultyTransport(inner, faults) for inner in transports]
            sends = [FaultySend(inner, faults) for inner in sends]
        self.transports = transports
        self.sender = TransferSender(
            worker_id="p",
            transport=transports[0],
            send=sends[0],
            layout=_layout(prefill),
            num_parts=layer_groups,
            **common,
        )
        self.receiver = TransferReceiver(
            worker_id="d",
            transport=transports[1],
            send=sends[1],
            layout=_layout(decode),
            **common,
        )
        self.turns: dict[str, Callable[[], None]] = {
            "p step": self.p_step,
            "p event": self.p_event,
            "p poll": self.p_poll,
            "message to p": self.message_to_p,
            "d step": self.d_step,
            "d event": self.d_event,
            "d poll": self.d_poll,
            "message to d": self.message_to_d,
        }

    # ------------------------------------------------------------------ the gateway

    def submit(
        self, name: str, prompt: list[int], max_tokens: int, *, after: str = "", salt: str = "",
        **sampling: Any,
    ) -> None:  # fmt: skip
        """Both legs at once; only D's where ``after`` names a sample whose KV this one shares."""
        fields: dict[str, Any] = {
            "request_id": name,
            "transfer_id": name,
            "token_ids": tuple(prompt),
            "num_prompt_tokens": len(prompt),
            "sampling": SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling}),
            "ttl_s": 3600.0,
            "cache_salt": salt,
        }
        if not after:
            self.sender.expect(name, D_REF.worker_id, fields["ttl_s"])
            self.p_inbox.append(p.Submit(PrefillRequest(**fields, decode=D_REF), GATEWAY))
        decode = DecodeRequest(**fields, prefill=None if after else P_REF, after=after)
        self.d_inbox.append(d.Submit(decode, GATEWAY))

    def abort(self, name: str, *, at_p: bool = True, at_d: bool = True) -> None:
        """The client left; the two workers need not hear of it at the same time."""
        if at_p:
            self.p_inbox.append(Abort(name))
        if at_d:
            self.d_inbox.append(Abort(name))

    def lose_gateway(self) -> None:
        """Nobody waits for any answer any more."""
        self.p_inbox.append(GatewayLost(GATEWAY))
        self.d_inbox.append(GatewayLost(GATEWAY))

    def tokens(self, name: str) -> list[int]:
        """The answer so far; asserts that indices have neither gaps nor repeats."""
        outputs = sorted(self.outputs.get(name, []), key=lambda output: output.index)
        assert [output.index for output in outputs] == list(range(len(outputs)))
        return [token for output in outputs for token in output.token_ids]

    def is_finished(self, name: str) -> bool:
        """Whether an answer's last token came."""
        return any(output.finish_reason for output in self.outputs.get(name, []))

    # ------------------------------------------------------------------ turns

    def p_step(self) -> None:
        while self.p_inbox:
            self.p_loop.handle(self.p_inbox.popleft())
        events, _ = self.p_loop.step()
        self.p_events += events
        self.engines[0].scheduler.pool.check_integrity()

    def d_step(self) -> None:
        while self.d_inbox:
            self.d_loop.handle(self.d_inbox.popleft())
        events, _ = self.d_loop.step()
        self.d_events += events
        self.engines[1].scheduler.pool.check_integrity()

    def p_event(self) -> None:
        if self.p_events:
            sender = self.sender
            match self.p_events.popleft():
                case Tokens() as event:
                    self._heard(event)
                case Failed() as event:
                    self.failures.setdefault(event.message.transfer_id, []).append(event.message)
                case p.SendBlocks() as event:
                    sender.submit(event.transfer_id, event.first_index, event.block_ids, event.part)
                case p.FinishTransfer() as event:
                    sender.finish(
                        event.transfer_id,
                        first_token_id=event.first_token_id,
                        finished=event.finished,
                    )
                case CancelTransfer() as event:
                    sender.cancel(event.transfer_id, "cancelled", "aborted by the gateway")

    def d_event(self) -> None:
        if self.d_events:
            match self.d_events.popleft():
                case Tokens() as event:
                    self._heard(event)
                case Failed() as event:
                    self.failures.setdefault(event.message.transfer_id, []).append(event.message)
                case d.OpenTransfer() as event:
                    self.receiver.open(
                        event.transfer_id, event.prefill, event.block_ids, event.first_index
                    )
                case CancelTransfer() as event:
                    self.receiver.cancel(event.transfer_id)

    def p_poll(self) -> None:
        for event in self.sender.poll():
            why = f"{event.code}: {event.message}" if isinstance(event, SendFailed) else None
            self.p_inbox.append(p.TransferEnded(event.transfer_id, why))

    def d_poll(self) -> None:
        for event in self.receiver.poll():
            match event:
                case Committed():
                    self.d_inbox.append(d.KVCommitted(event.done))
                case ReceiveFailed():
                    self.d_inbox.append(d.KVFailed(event.transfer_id, TransferFailed(event.code)))
                case BlocksReleased():
                    self.d_inbox.append(d.BlocksFreed(event.transfer_id))

    def message_to_p(self) -> None:
        if self.to_p:
            message = self.to_p.popleft()
            if isinstance(message, Grant):
                self.p_inbox.append(p.Granted(message.transfer_id))
            self.sender.on_message("d", message)

    def message_to_d(self) -> None:
        if self.to_d:
            self.receiver.on_message("p", self.to_d.popleft())

    # ------------------------------------------------------------------ to the end

    @property
    def is_idle(self) -> bool:
        """Nothing is queued or open anywhere, and no sequence is live."""
        queues = (
            self.p_inbox, self.d_inbox, self.p_events, self.d_events, self.to_p, self.to_d,
        )  # fmt: skip
        live = [engine.scheduler.live_sequences() for engine in self.engines]
        return not (any(queues) or any(live) or self.sender.num_open or self.receiver.num_open)

    def run(self, max_rounds: int = 3000) -> None:
        """Let everything move until nothing is left to do; a failed leg's other one is aborted."""
        was_idle = False
        for _ in range(max_rounds):
            if was_idle and self.is_idle:
                return  # twice: a poll may still hand over what ended in the last round
            was_idle = self.is_idle
            for turn in self.turns.values():
                turn()
            for name in self.failures:
                self.abort(name)
            self._let_pass(0.01)
            if self._only_aborts_are_left():
                self.p_inbox.clear()
                self.d_inbox.clear()
        raise AssertionError(f"not idle: {self.engines[1].scheduler.live_sequences()}")

    def close(self) -> None:
        """Close both data planes."""
        for transport in self.transports:
            transport.close()

    def check_everything_is_free(self) -> None:
        """No block, job or transfer is left on either side."""
        assert self.is_idle
        for loop, engine in zip((self.p_loop, self.d_loop), self.engines, strict=True):
            loop.step()
            pool = engine.scheduler.pool
            pool.check_integrity()
            assert pool.num_quarantined == 0
            assert pool.num_free == pool.num_blocks
            snapshot = loop.snapshot
            assert (snapshot.running, snapshot.waiting, snapshot.queued_tokens) == (0, 0, 0)
            assert snapshot.kv_blocks_free == snapshot.kv_blocks_total
            assert not loop._jobs

    def _let_pass(self, seconds: float) -> None:
        self.now_s += seconds
        for engine in self.engines:
            for sequence in engine.scheduler.live_sequences():
                sequence.arrival_s -= seconds  # arrivals are stamped by the real clock

    def _only_aborts_are_left(self) -> bool:
        return all(isinstance(command, Abort) for command in (*self.p_inbox, *self.d_inbox))

    def _heard(self, event: Tokens) -> None:
        assert event.gateway_id == GATEWAY
        for output in event.outputs:
            self.outputs.setdefault(output.transfer_id, []).append(output)


def _appending(queue: deque[TransferMessage]) -> Callable[[str, TransferMessage], bool]:
    def send(peer_id: str, message: TransferMessage) -> bool:
        queue.append(message)
        return True

    return send


def _memory(engine: Engine) -> BlockMemory:
    return BlockMemory(
        engine.kv_memory.raw.numpy(),
        num_blocks=engine.kv_spec.num_blocks,
        block_bytes=engine.kv_spec.block_bytes,
        mapping=engine.kv_memory.mapping,
    )


def _layout(engine: Engine) -> BlockLayout:
    spec = engine.kv_spec
    heads = Heads(start=0, stop=spec.num_kv_heads)
    head_bytes = spec.block_size * spec.row_bytes
    return BlockLayout(num_rows=2 * spec.num_layers, heads=heads, head_bytes=head_bytes)
