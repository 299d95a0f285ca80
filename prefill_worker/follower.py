"""Entry point of a prefill worker's ranks 1, 2, …; rank 0 starts them."""

from __future__ import annotations

import sys

from kvtransfer.ranks.messages import SendCommand
from kvtransfer.ranks.remote_sender import SenderSide
from worker.follower import FollowerRank, run_follower
from worker.kv import NICENESS, make_sender


def _make_side(rank: FollowerRank) -> SenderSide:
    sender = make_sender(rank.config, rank.engine, rank.data_plane, rank.epoch, rank.send)
    fileno = rank.data_plane.transport.connections_fileno()
    return SenderSide(sender, rank.progress.has_reached, fileno, rank.tell)


if __name__ == "__main__":
    run_follower(sys.argv[1:], SendCommand, _make_side, NICENESS["prefill"])
