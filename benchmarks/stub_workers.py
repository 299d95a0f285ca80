"""Workers that compute nothing, for the gateway's cost: ``python -m benchmarks.stub_workers``.

One process with a prefill and a decode worker, registered and linked like real ones. The prefill
worker answers a request with its first token at once; the decode worker then sends a token of every
running sequence once a step, all of a step's tokens in one message, as a real one does.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mesh.links.listen import WorkerServer
from mesh.messages import (
    AbortRequest,
    AnyMessage,
    DecodeRequest,
    FinishReason,
    PrefillRequest,
    StepOutput,
    TokenOutput,
)
from mesh.model_text.model_files import resolve_model
from mesh.model_text.tokenizer import load_tokenizer
from mesh.parent_watch import die_with_parent
from mesh.registry.registration import Registration
from mesh.service import process_epoch, run_service
from mesh.worker_info import LoadSnapshot, Role, WorkerInfo

_TEXT = (
    "The quick brown fox jumps over the lazy dog, and a token is one word or a piece of it. "
    "Some of them, naïve ones, carry bytes of 日本語 and parts of emoji 😀.\n"
)
_FINGERPRINT = "stub"
_MAX_MODEL_LEN = 8192
_BLOCK_SIZE = 16
_NUM_BLOCKS = 1 << 16


class StubConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is told, as JSON in its first argument."""

    redis_url_variable: str
    """Environment variable with the registry's URL."""
    parent_pid: int
    served_model_name: str
    step_s: float
    """Between two tokens of a sequence."""
    stamps_file: str
    """Gets a line ``request_id received_s sent_s`` (``time.monotonic()``) per first token."""


@dataclass(slots=True)
class _Sequence:
    peer_id: str
    request: DecodeRequest
    next_index: int


class StubWorker:
    """What both roles have in common: a link server and an entry in the registry."""

    def __init__(self, role: Role, config: StubConfig) -> None:
        self.role: Role = role
        self.config = config
        self.epoch = process_epoch()
        self.server = WorkerServer(
            bind="tcp://127.0.0.1:0",
            worker_id=f"stub-{role}",
            epoch=self.epoch,
            fingerprint=_FINGERPRINT,
            on_message=self.on_message,
            on_peer_down=self.on_peer_down,
        )
        tokenizer = load_tokenizer(resolve_model(""))
        self._answer = tokenizer.encode(_TEXT, add_special_tokens=False)

    async def start(self) -> Registration:
        """Listen and register; the caller closes both."""
        await self.server.start()
        info = WorkerInfo(
            worker_id=f"stub-{self.role}",
            role=self.role,
            epoch=self.epoch,
            endpoint=self.server.endpoint,
            http_endpoint="http://127.0.0.1:1",
            fingerprint=_FINGERPRINT,
            model=self.config.served_model_name,
            max_model_len=_MAX_MODEL_LEN,
            block_size=_BLOCK_SIZE,
            kv_blocks_total=_NUM_BLOCKS,
            max_num_seqs=256,
            transport="tcp",
        )
        registration = Registration(os.environ[self.config.redis_url_variable], info, self.load)
        await registration.start()
        return registration

    @property
    def num_running(self) -> int:
        """Sequences in this worker."""
        return 0

    def load(self) -> LoadSnapshot:
        """See ``Registration``."""
        return LoadSnapshot(
            kv_blocks_total=_NUM_BLOCKS,
            kv_blocks_free=_NUM_BLOCKS - self.num_running,
            kv_blocks_quarantined=0,
            open_transfers=0,
            running=self.num_running,
            waiting=0,
            queued_tokens=0,
            step_time_s=self.config.step_s,
            tokens_per_s=100_000.0,
        )

    def on_message(self, peer_id: str, message: AnyMessage) -> None:
        """A gateway asks."""
        raise NotImplementedError

    def on_peer_down(self, peer_id: str) -> None:
        """A gateway is gone."""

    def output(self, request: PrefillRequest | DecodeRequest, index: int) -> TokenOutput:
        """Output token ``index`` of a request; the text repeats."""
        last = index + 1 >= request.sampling.max_tokens
        reason: FinishReason | None = "length" if last else None
        return TokenOutput(
            request_id=request.request_id,
            transfer_id=request.transfer_id,
            index=index,
            token_ids=(self._answer[index % len(self._answer)],),
            finish_reason=reason,
        )


class StubPrefill(StubWorker):
    """Makes first tokens and writes down when."""

    def __init__(self, config: StubConfig) -> None:
        super().__init__("prefill", config)
        self._stamps = Path(config.stamps_file).open("a", buffering=1)  # noqa: SIM115

    def on_message(self, peer_id: str, message: AnyMessage) -> None:
        """See ``StubWorker``."""
        received_s = time.monotonic()
        if isinstance(message, PrefillRequest):
            step = StepOutput(outputs=(self.output(message, 0),))
            sent_s = time.monotonic()
            self.server.send(peer_id, step)
            self._stamps.write(f"{message.request_id} {received_s} {sent_s}\n")


class StubDecode(StubWorker):
    """Steps all sequences at once."""

    def __init__(self, config: StubConfig) -> None:
        super().__init__("decode", config)
        self._sequences: dict[str, _Sequence] = {}

    @property
    def num_running(self) -> int:
        """See ``StubWorker``."""
        return len(self._sequences)

    def on_message(self, peer_id: str, message: AnyMessage) -> None:
        """See ``StubWorker``."""
        if isinstance(message, DecodeRequest) and message.sampling.max_tokens > 1:
            self._sequences[message.transfer_id] = _Sequence(peer_id, message, 1)
        elif isinstance(message, AbortRequest):
            self._sequences.pop(message.transfer_id, None)

    def on_peer_down(self, peer_id: str) -> None:
        """See ``StubWorker``."""
        self._sequences = {k: s for k, s in self._sequences.items() if s.peer_id != peer_id}

    async def run(self) -> None:
        """Step until cancelled; time lost by a late step is not made up for."""
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            next_s = max(next_s + self.config.step_s, loop.time())
            await asyncio.sleep(next_s - loop.time())
            self._step()

    def _step(self) -> None:
        by_peer = sorted(self._sequences.values(), key=lambda sequence: sequence.peer_id)
        for peer_id, group in itertools.groupby(by_peer, key=lambda sequence: sequence.peer_id):
            stepped = list(group)
            outputs = tuple(self.output(s.request, s.next_index) for s in stepped)
            if not self.server.send(peer_id, StepOutput(outputs=outputs)):
                continue  # its queue is full: the same tokens again at the next step
            for sequence, output in zip(stepped, outputs, strict=True):
                sequence.next_index += 1
                if output.finish_reason is not None:
                    del self._sequences[output.transfer_id]


async def _serve(config: StubConfig, stop: asyncio.Event) -> None:
    prefill, decode = StubPrefill(config), StubDecode(config)
    registrations = [await prefill.start(), await decode.start()]
    steps = asyncio.create_task(decode.run())
    await stop.wait()
    steps.cancel()
    for registration in registrations:
        await registration.close()
    for worker in (prefill, decode):
        await worker.server.close()


def main() -> None:
    """Serve until SIGTERM."""
    config = msgspec.json.decode(sys.argv[1], type=StubConfig)
    die_with_parent(config.parent_pid)
    run_service(lambda stop: _serve(config, stop))


if __name__ == "__main__":
    main()
