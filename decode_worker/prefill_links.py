"""The decode worker's links to prefill workers, dialed when a transfer first needs one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from mesh.errors import PdmeshError
from mesh.links.dial import WorkerLink
from mesh.messages import AnyMessage, DataPlaneOffer, PeerRef, TransferMessage

_MAX_UNSENT = 1024
"""Messages kept while a link is being dialed; more are refused."""

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Dialed:
    remote: PeerRef
    link: WorkerLink
    dialing: asyncio.Task[None] | None = None
    unsent: list[TransferMessage] = field(default_factory=list)


class PrefillLinks:
    """One link per prefill worker; a newer epoch of the same worker replaces the old link."""

    def __init__(
        self,
        *,
        worker_id: str,
        epoch: int,
        fingerprint: str,
        offer: DataPlaneOffer,
        on_message: Callable[[str, AnyMessage], None],
        on_up: Callable[[str, DataPlaneOffer], None],
        on_down: Callable[[str, PdmeshError], None],
    ) -> None:
        self._worker_id = worker_id
        self._epoch = epoch
        self._fingerprint = fingerprint
        self._offer = offer
        self._on_message = on_message
        self._on_up = on_up
        self._on_down = on_down
        self._links: dict[str, _Dialed] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def ensure(self, remote: PeerRef) -> None:
        """Have a link to this start of the worker, dialing it if need be."""
        dialed = self._links.get(remote.worker_id)
        if dialed is not None:
            if dialed.remote.epoch >= remote.epoch:
                return
            self._drop(remote.worker_id)
        worker_id = remote.worker_id
        link = WorkerLink(
            peer_id=self._worker_id,
            epoch=self._epoch,
            remote=remote,
            fingerprint=self._fingerprint,
            offer=self._offer,
            on_message=lambda message: self._on_message(worker_id, message),
            on_down=lambda error: self._went_down(remote, error),
        )
        dialed = _Dialed(remote, link)
        self._links[worker_id] = dialed
        dialed.dialing = asyncio.create_task(self._dial(dialed))

    def send(self, worker_id: str, message: TransferMessage) -> bool:
        """Queue a message; False when there is no link or too much is waiting."""
        dialed = self._links.get(worker_id)
        if dialed is None:
            return False
        if dialed.link.is_up and not dialed.unsent:
            return dialed.link.send(message)
        if len(dialed.unsent) >= _MAX_UNSENT:
            return False
        dialed.unsent.append(message)
        return True

    async def close(self) -> None:
        """Close every link without calling ``on_down``."""
        for worker_id in list(self._links):
            self._drop(worker_id)
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def _dial(self, dialed: _Dialed) -> None:
        try:
            await dialed.link.connect()
        except PdmeshError as error:
            self._went_down(dialed.remote, error)
            return
        unsent, dialed.unsent = dialed.unsent, []
        for message in unsent:
            dialed.link.send(message)
        if dialed.link.remote_offer is not None:
            self._on_up(dialed.remote.worker_id, dialed.link.remote_offer)

    def _went_down(self, remote: PeerRef, error: PdmeshError) -> None:
        dialed = self._links.get(remote.worker_id)
        if dialed is None or dialed.remote is not remote:
            return
        _logger.warning(
            "lost prefill worker=%s code=%s reason=%s", remote.worker_id, error.code, error
        )
        self._drop(remote.worker_id)
        self._on_down(remote.worker_id, error)

    def _drop(self, worker_id: str) -> None:
        dialed = self._links.pop(worker_id)
        task = asyncio.create_task(dialed.link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
