"""What every worker process has around its hot loop: control socket, registry entry, /metrics.

The host answers StatusRequest by itself; every other message goes to the role's control loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from aiohttp import web

from engine.device import cpu_level
from engine.engine import Engine
from mesh.config import WorkerConfig
from mesh.links.listen import WorkerServer
from mesh.messages import AnyMessage, DataPlaneOffer, StatusReply, StatusRequest
from mesh.model_text.model_files import resolve_model
from mesh.registry.registration import Registration
from mesh.service import HttpServer, metrics_handler, serve_http
from mesh.telemetry import metrics
from mesh.worker_info import LoadSnapshot, WorkerInfo
from worker.placement import show_gpus
from worker.profiling import ProfileEndpoint

_logger = logging.getLogger(__name__)


class WorkerHost:
    """Owns the process's sockets; ``close`` leaves the registry first, then frees the ports."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        *,
        epoch: int,
        offer: DataPlaneOffer,
        load: Callable[[], LoadSnapshot],
        on_message: Callable[[str, AnyMessage], None],
        on_peer_down: Callable[[str], None],
    ) -> None:
        """Prepare; nothing is bound before ``start``.

        Args:
            config: this worker's configuration.
            engine: for capacities and the fingerprint.
            epoch: this start of the worker.
            offer: its data plane, told to decode workers.
            load: the current load; called in the event loop, must not block.
            on_message: (peer id, message) for all but status requests.
            on_peer_down: a gateway or decode worker vanished.
        """
        self._config = config
        self._engine = engine
        self._load = load
        self._on_message = on_message
        self._epoch = epoch
        self.server = WorkerServer(
            bind=f"tcp://{config.host}:{config.control_port}",
            worker_id=config.worker_id,
            epoch=epoch,
            fingerprint=engine.fingerprint,
            offer=offer,
            on_message=self._dispatch,
            on_peer_down=on_peer_down,
        )
        self._http: HttpServer | None = None
        self._registration: Registration | None = None
        self._info: WorkerInfo | None = None

    async def start(self) -> None:
        """Bind the sockets and register.

        Raises:
            ConfigError: a port is taken.
        """
        config, engine = self._config, self._engine
        await self.server.start()
        self._http = await serve_http(
            config.host,
            config.http_port,
            {"/metrics": self._metrics, "/health": self._health, "/ready": self._ready},
            {"/debug/profile": ProfileEndpoint(config, engine).handle},
        )
        self._info = WorkerInfo(
            worker_id=config.worker_id,
            role=config.role,
            epoch=self._epoch,
            endpoint=config.advertised(self.server.endpoint),
            http_endpoint=config.advertised(self._http.endpoint),
            fingerprint=engine.fingerprint,
            model=config.served_model_name or resolve_model(config.model).name,
            max_model_len=engine.max_sequence_tokens,
            block_size=engine.kv_spec.block_size,
            kv_blocks_total=engine.kv_spec.num_blocks,
            max_num_seqs=config.max_num_seqs,
            transport=config.transport,
            tensor_parallel=config.tensor_parallel,
            device=engine.placement.device,
            gpus=engine.placement.worker_gpus(),
            cpu_level=cpu_level(engine.placement.device),
        )
        show_gpus(self._info.gpus)
        metrics.identify(self._info.model, config.worker_id)
        self._registration = Registration(config.redis_url, self._info, self._load)
        await self._registration.start()
        _logger.info(
            "serving role=%s endpoint=%s transport=%s device=%s kv_blocks=%d weight_mib=%d",
            config.role, self._info.endpoint, config.transport, self._info.device,
            self._info.kv_blocks_total, engine.model.num_weight_bytes >> 20,
        )  # fmt: skip

    async def close(self) -> None:
        """Leave the registry, then close every socket."""
        if self._registration is not None:
            await self._registration.close()
        if self._http is not None:
            await self._http.close()
        await self.server.close()

    def _dispatch(self, peer_id: str, message: AnyMessage) -> None:
        if isinstance(message, StatusRequest):
            if self._info is not None:
                reply = StatusReply(seq=message.seq, info=self._info, load=self._load())
                self.server.send(peer_id, reply)
        else:
            self._on_message(peer_id, message)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, request: web.Request) -> web.Response:
        if self._load().draining:
            return web.Response(status=503, text="draining\n")
        return web.Response(text="ok\n")

    async def _metrics(self, request: web.Request) -> web.Response:
        load = self._load()
        used = load.kv_blocks_total - load.kv_blocks_free
        metrics.gauge(metrics.NUM_REQUESTS_RUNNING, "Sequences computing.").set(load.running)
        metrics.gauge(metrics.NUM_REQUESTS_WAITING, "Sequences waiting.").set(load.waiting)
        metrics.gauge(metrics.KV_CACHE_USAGE, "Share of KV blocks in use, 0 to 1.").set(
            used / load.kv_blocks_total
        )
        metrics.gauge("pdmesh:kv_blocks_quarantined", "Blocks withheld after a transfer.").set(
            load.kv_blocks_quarantined
        )
        for name, documentation, value in (
            ("pdmesh:kv_blocks", "Blocks of the KV pool.", load.kv_blocks_total),
            ("pdmesh:kv_blocks_free", "Blocks free or evictable.", load.kv_blocks_free),
            ("pdmesh:open_transfers", "KV transfers not ended.", load.open_transfers),
            ("pdmesh:queued_tokens", "Prompt tokens not computed yet.", load.queued_tokens),
            ("pdmesh:step_time_seconds", "Smoothed engine step time.", load.step_time_s),
            ("pdmesh:step_tokens_per_second", "Smoothed speed of steps.", load.tokens_per_s),
        ):
            metrics.gauge(name, documentation).set(value)
        scheduler = self._engine.scheduler
        metrics.gauge(
            "pdmesh:kv_slots_used_perc", "Computed tokens over all slots of the pool, 0 to 1."
        ).set(scheduler.num_kv_tokens / (load.kv_blocks_total * scheduler.block_size))
        for name, documentation, value in (
            (metrics.NUM_PREEMPTIONS, "Preemptions.", scheduler.num_preemptions),
            (
                "pdmesh:grammar_masks_late",
                "Tokens put off because the mask of their grammar was late.",
                self._engine.grammars.num_late,
            ),
            (
                metrics.PREFIX_CACHE_QUERIES,
                "Tokens looked up in the prefix cache.",
                scheduler.num_prefix_queries,
            ),
            (
                metrics.PREFIX_CACHE_HITS,
                "Tokens found in the prefix cache.",
                scheduler.num_prefix_hits,
            ),
        ):
            metrics.count_to(name, documentation, value)
        return await metrics_handler(request)
