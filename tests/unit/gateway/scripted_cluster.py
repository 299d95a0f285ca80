"""Scripted workers behind real links: they speak the real messages and follow a given answer.

Output token ``i`` of every request is ``answer[i]``, wherever a request (re)starts, so that a
replay on another pair continues the same output.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from aiohttp import web

from gateway.app import build_app
from gateway.main import build_runner
from gateway.prompts.served_model import ServedModel
from gateway.routing.cluster import Cluster
from gateway.server_state import ServerState
from mesh.links.listen import WorkerServer
from mesh.messages import (
    AbortRequest,
    AnyMessage,
    DecodeRequest,
    PrefillRequest,
    RequestFailed,
    StatusReply,
    StatusRequest,
    StepOutput,
    TokenLogprobs,
    TokenOutput,
)
from mesh.registry.view import WorkerEntry
from mesh.worker_info import LoadSnapshot, Role, WorkerInfo

_epochs = itertools.count(1)

Tamper = Callable[[TokenOutput], Sequence[TokenOutput]]


async def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Poll ``condition`` until it holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@dataclass
class Script:
    """How a worker behaves."""

    answer: Sequence[int] = (5,)
    """Output token ids, repeated when they run out."""
    answers: Mapping[int, Sequence[int]] | None = None
    """Instead: the answer by the prompt's first token."""
    delay_s: float = 0.0
    """Pause before each token."""
    first_delay_s: float = 0.0
    fail: RequestFailed | None = None
    """Answer every request with this (ids are filled in)."""
    fail_at: int | None = None
    """Fail, or die with ``die``, instead of making the output token of this index."""
    die: bool = False
    tamper: Tamper | None = None
    """Replaces an output on its way."""
    silent_status: bool = False
    silent: bool = False
    """Take requests and answer nothing."""
    num_cached_tokens: int = 0
    burst: int = 1
    """Decode tokens per message."""


@dataclass
class Seen:
    """What a worker got."""

    requests: list[PrefillRequest | DecodeRequest] = field(default_factory=list)
    aborts: list[tuple[str, float]] = field(default_factory=list)
    """(transfer id, ``time.monotonic()``)."""


class ScriptedWorker:
    def __init__(
        self,
        role: Role,
        script: Script,
        *,
        name: str = "",
        fingerprint: str = "fp",
        model: str = "scripted",
        max_model_len: int = 8192,
    ) -> None:
        self.role = role
        self.script = script
        self.seen = Seen()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.server = WorkerServer(
            bind="tcp://127.0.0.1:0",
            worker_id=name or f"{role}-{next(_epochs)}",
            epoch=next(_epochs),
            fingerprint=fingerprint,
            on_message=self._on_message,
            on_peer_down=self._on_peer_down,
        )
        self._fields = {"fingerprint": fingerprint, "model": model, "max_model_len": max_model_len}

    @property
    def id(self) -> str:
        return self.info.worker_id

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    async def start(self) -> None:
        await self.server.start()
        self.info = WorkerInfo(
            worker_id=self.server._worker_id,
            role=self.role,
            epoch=self.server._epoch,
            endpoint=self.server.endpoint,
            http_endpoint="http://127.0.0.1:1",
            block_size=16,
            kv_blocks_total=4096,
            max_num_seqs=64,
            transport="tcp",
            cpu_level="avx2",
            **self._fields,
        )

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self.server.close()

    def load(self) -> LoadSnapshot:
        return LoadSnapshot(
            kv_blocks_total=4096,
            kv_blocks_free=4096 - len(self._tasks),
            kv_blocks_quarantined=0,
            open_transfers=0,
            running=len(self._tasks),
            waiting=0,
            queued_tokens=0,
            step_time_s=0.01,
            tokens_per_s=1000.0,
        )

    def _on_peer_down(self, peer_id: str) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _on_message(self, peer_id: str, message: AnyMessage) -> None:
        match message:
            case PrefillRequest() | DecodeRequest():
                self.seen.requests.append(message)
                task = asyncio.create_task(self._serve(peer_id, message))
                self._tasks[message.transfer_id] = task
                task.add_done_callback(lambda _: self._tasks.pop(message.transfer_id, None))
            case AbortRequest():
                self.seen.aborts.append((message.transfer_id, time.monotonic()))
                if message.transfer_id in self._tasks:
                    self._tasks[message.transfer_id].cancel()
            case StatusRequest() if not self.script.silent_status:
                self.server.send(
                    peer_id, StatusReply(seq=message.seq, info=self.info, load=self.load())
                )

    async def _serve(self, peer_id: str, request: PrefillRequest | DecodeRequest) -> None:
        script = self.script
        if script.silent:
            await asyncio.sleep(3600)
        if script.first_delay_s:
            await asyncio.sleep(script.first_delay_s)
        if script.fail is not None:
            self._fail(peer_id, request, script.fail)
            return
        index = len(request.token_ids) - request.num_prompt_tokens
        if self.role == "prefill":
            await self._send(peer_id, request, index, 1)
            return
        if isinstance(request, DecodeRequest) and request.prefill is not None:
            if self._reason(request, index) is not None:
                return  # the answer ended at the prefill worker's token
            index += 1
        while await self._send(peer_id, request, index, script.burst):
            index += script.burst

    async def _send(
        self, peer_id: str, request: PrefillRequest | DecodeRequest, index: int, count: int
    ) -> bool:
        """Send tokens ``index`` … ; False when it was the end."""
        script = self.script
        if script.delay_s:
            await asyncio.sleep(script.delay_s)
        if script.fail_at is not None and index >= script.fail_at:
            if script.die:
                await self.server.close()
            else:
                code = "transfer_failed"
                failed = RequestFailed(
                    request_id="", transfer_id="", code=code, message="scripted", retryable=True
                )
                self._fail(peer_id, request, failed)
            return False
        outputs = []
        for position in range(index, index + count):
            outputs.append(self._output(request, position))
            if outputs[-1].finish_reason is not None:
                break
        sent: list[TokenOutput] = []
        for output in outputs:
            sent += [output] if script.tamper is None else script.tamper(output)
        await wait_until(lambda: self.server.send(peer_id, StepOutput(outputs=tuple(sent))))
        return outputs[-1].finish_reason is None

    def _fail(
        self, peer_id: str, request: PrefillRequest | DecodeRequest, as_: RequestFailed
    ) -> None:
        failed = RequestFailed(
            request_id=request.request_id,
            transfer_id=request.transfer_id,
            code=as_.code,
            message=as_.message,
            retryable=as_.retryable,
        )
        self.server.send(peer_id, failed)

    def _token(self, request: PrefillRequest | DecodeRequest, index: int) -> int:
        answers = self.script.answers
        answer = self.script.answer if answers is None else answers[request.token_ids[0]]
        return answer[index % len(answer)]

    def _reason(self, request: PrefillRequest | DecodeRequest, index: int) -> str | None:
        sampling = request.sampling
        if (
            self._token(request, index) in sampling.stop_token_ids
            and index + 1 > sampling.min_tokens
        ):
            return "stop"
        return "length" if index + 1 >= sampling.max_tokens else None

    def _output(self, request: PrefillRequest | DecodeRequest, index: int) -> TokenOutput:
        token = self._token(request, index)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if request.sampling.num_logprobs >= 0:
            top = tuple((token + i, -0.5 - i) for i in range(request.sampling.num_logprobs))
            logprobs = (TokenLogprobs(token_id=token, logprob=-0.5, top=top),)
        return TokenOutput(
            request_id=request.request_id,
            transfer_id=request.transfer_id,
            index=index,
            token_ids=(token,),
            finish_reason=self._reason(request, index),
            num_cached_tokens=self.script.num_cached_tokens,
            logprobs=logprobs,
        )


class StaticView:
    """Stands where ``ClusterView`` does; the test says which workers there are."""

    def __init__(self) -> None:
        self.entries: list[WorkerEntry] = []

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def workers(self) -> list[WorkerEntry]:
        return self.entries

    def show(self, *workers: ScriptedWorker) -> None:
        now = time.monotonic()
        self.entries = [WorkerEntry(info=w.info, load=w.load(), updated_s=now) for w in workers]


class ScriptedCluster:
    """A real gateway over HTTP in front of scripted workers."""

    def __init__(
        self, model: ServedModel, *, request_timeout_s: float = 30.0, idle_timeout_s: float = 75.0
    ) -> None:
        self.model = model
        self.view = StaticView()
        self.workers: list[ScriptedWorker] = []
        self.cluster = Cluster(gateway_id="gateway-test", epoch=next(_epochs), model=model.name)
        self.server = ServerState(
            model=model,
            cluster=self.cluster,
            request_timeout_s=request_timeout_s,
            max_body_bytes=1 << 20,
        )
        self.runner = build_runner(build_app(self.server, self.view), idle_timeout_s=idle_timeout_s)
        self.url = ""

    async def add(self, worker: ScriptedWorker) -> ScriptedWorker:
        await worker.start()
        self.workers.append(worker)
        return worker

    async def pair(self, script: Script, **fields: object) -> tuple[ScriptedWorker, ScriptedWorker]:
        """One prefill and one decode worker that follow ``script``."""
        name = self.model.name
        prefill = await self.add(ScriptedWorker("prefill", script, model=name, **fields))
        decode = await self.add(ScriptedWorker("decode", script, model=name, **fields))
        return prefill, decode

    async def start(self) -> None:
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        await self.show_all()

    async def show_all(self) -> None:
        """Make all workers known and wait for their links."""
        self.view.show(*self.workers)
        self.cluster.refresh()
        await wait_until(lambda: all(w.is_up for w in self.cluster.workers))

    async def show_all_registered(self) -> None:
        """Make all workers known, also those that died."""
        self.view.show(*self.workers)
        self.cluster.refresh()

    async def close(self) -> None:
        await self.runner.cleanup()
        for worker in self.workers:
            await worker.close()
