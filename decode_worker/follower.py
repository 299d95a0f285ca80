"""Entry point of a decode worker's ranks 1, 2, …; rank 0 starts them."""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec

from decode_worker.kv_import import NICENESS, make_receiver, open_rank
from engine.engine import Engine
from engine.tensor_parallel.step_progress import StepProgress
from kvtransfer.ranks.messages import Outgoing, ReceiveCommand
from kvtransfer.ranks.remote_receiver import ReceiverSide
from mesh.messages import TransferMessage
from worker.followers.follower import run_follower
from worker.followers.rank_setup import RankSetup


def _make_side(
    setup: RankSetup,
    engine: Engine,
    progress: StepProgress,
    tell: Callable[[msgspec.Struct], object],
) -> ReceiverSide:
    data_plane = open_rank(setup.config, engine, setup.epoch)

    def send(peer_id: str, message: TransferMessage) -> bool:
        return bool(tell(Outgoing(peer_id=peer_id, message=message)))

    receiver = make_receiver(setup.config, engine, data_plane, setup.epoch, send)
    return ReceiverSide(receiver, data_plane.transport.arrivals_fileno(), tell)


if __name__ == "__main__":
    run_follower(sys.argv[1:], ReceiveCommand, _make_side, NICENESS)
