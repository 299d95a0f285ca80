"""Both ends of a control link, recording what they are told."""

from mesh.errors import PdmeshError
from mesh.links.dial import WorkerLink
from mesh.links.listen import WorkerServer
from mesh.messages import AnyMessage, DataPlaneOffer, PeerRef

EPOCH = 7


class Server:
    """A WorkerServer that records what it is told."""

    def __init__(
        self, *, worker_id: str = "w0", epoch: int = EPOCH, offer: DataPlaneOffer | None = None
    ) -> None:
        self.messages: list[tuple[str, AnyMessage]] = []
        self.down: list[str] = []
        self.links = WorkerServer(
            bind="tcp://127.0.0.1:0",
            worker_id=worker_id,
            epoch=epoch,
            fingerprint="layout-a",
            offer=offer,
            on_message=lambda peer, message: self.messages.append((peer, message)),
            on_peer_down=self.down.append,
        )

    @property
    def ref(self) -> PeerRef:
        return PeerRef(worker_id="w0", epoch=EPOCH, endpoint=self.links.endpoint)


class Dialer:
    """A WorkerLink that records what it is told."""

    def __init__(
        self, remote: PeerRef, *, peer_id: str = "g0", epoch: int = 1, fingerprint: str = "",
        offer: DataPlaneOffer | None = None,
    ) -> None:  # fmt: skip
        self.messages: list[AnyMessage] = []
        self.down: list[PdmeshError] = []
        self.link = WorkerLink(
            peer_id=peer_id,
            epoch=epoch,
            remote=remote,
            fingerprint=fingerprint,
            offer=offer,
            on_message=self.messages.append,
            on_down=self.down.append,
        )
