"""Entry point of a prefill worker's ranks 1, 2, …; rank 0 starts them."""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec

from engine.engine import Engine
from engine.tensor_parallel.step_progress import StepProgress
from kvtransfer.ranks.messages import Outgoing, SendCommand
from kvtransfer.ranks.remote_sender import SenderSide
from mesh.messages import TransferMessage
from prefill_worker.export import NICENESS, make_sender, open_rank
from worker.followers.follower import run_follower
from worker.followers.rank_setup import RankSetup


def _make_side(
    setup: RankSetup,
    engine: Engine,
    progress: StepProgress,
    tell: Callable[[msgspec.Struct], object],
) -> SenderSide:
    data_plane = open_rank(setup.config, engine, setup.epoch)

    def send(peer_id: str, message: TransferMessage) -> bool:
        return bool(tell(Outgoing(peer_id=peer_id, message=message)))

    sender = make_sender(setup.config, engine, data_plane, setup.epoch, send)
    fileno = data_plane.transport.connections_fileno()
    return SenderSide(sender, progress.has_reached, fileno, tell)


if __name__ == "__main__":
    run_follower(sys.argv[1:], SendCommand, _make_side, NICENESS)
