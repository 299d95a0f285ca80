"""Entry point of a decode worker's ranks 1, 2, …; rank 0 starts them."""

from __future__ import annotations

import sys

from kvtransfer.ranks.messages import ReceiveCommand
from kvtransfer.ranks.remote_receiver import ReceiverSide
from worker.follower import FollowerRank, run_follower
from worker.kv import NICENESS, make_receiver


def _make_side(rank: FollowerRank) -> ReceiverSide:
    receiver = make_receiver(rank.config, rank.engine, rank.data_plane, rank.epoch, rank.send)
    return ReceiverSide(receiver, rank.data_plane.transport.arrivals_fileno(), rank.tell)


if __name__ == "__main__":
    run_follower(sys.argv[1:], ReceiveCommand, _make_side, NICENESS["decode"])
