"""A step's batch arrives as it was, and a follower knows how far it has come."""

from __future__ import annotations

import socket
import struct
import threading

import numpy as np
import pytest

from engine.batch import BatchInputs
from engine.tensor_parallel.step_progress import StepProgress
from engine.tensor_parallel.step_wire import StepReceiver, StepSender

_FIELDS = BatchInputs.__slots__


def _batch(tokens: int, seqs: int, width: int, samples: int) -> BatchInputs:
    rng = np.random.default_rng()

    def ints(kind: type, *shape: int) -> np.ndarray:
        return rng.integers(-(1 << 30), 1 << 30, shape).astype(kind)

    return BatchInputs(
        token_ids=ints(np.int64, tokens),
        token_sources=ints(np.int32, tokens),
        positions=ints(np.int32, tokens),
        slot_mapping=ints(np.int64, tokens),
        query_starts=ints(np.int32, seqs + 1),
        context_lens=ints(np.int32, seqs),
        block_tables=ints(np.int32, seqs, width),
        sample_rows=ints(np.int64, samples),
    )


def test_batches_arrive_as_they_were_at_every_follower() -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    send = StepSender([end for end, _ in pairs])
    batches = [_batch(1, 1, 1, 1), _batch(40, 3, 7, 0), _batch(8192, 600, 90, 600)]

    def send_all() -> None:
        for batch in batches:
            send(batch, len(batch.sample_rows) // 2)

    sender = threading.Thread(target=send_all)  # more than the sockets hold
    sender.start()
    receivers = [StepReceiver(end) for _, end in pairs]
    for sent in batches:
        for receiver in receivers:
            got = receiver.next(10.0)
            assert got is not None
            assert got.graph_rows == len(sent.sample_rows) // 2
            for name in _FIELDS:
                ours, theirs = getattr(sent, name), getattr(got.batch, name)
                assert ours.dtype == theirs.dtype
                assert np.array_equal(ours, theirs)
                assert theirs.flags.writeable
    sender.join()
    assert receivers[0].next(0.0) is None
    for end, other in pairs:
        end.close()
        other.close()


@pytest.mark.parametrize("num_bytes", [0, 5, 20, 100])
def test_rank_0_is_gone(num_bytes: int) -> None:
    data = struct.pack("<5I", 100, 1, 1, 1, 0) + bytes(1000)
    end, other = socket.socketpair()
    with end, other:
        end.send(data[:num_bytes])
        end.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError):
            StepReceiver(other).next(None)


def test_sizes_are_capped() -> None:
    end, other = socket.socketpair()
    with end, other:
        end.send(struct.pack("<5I", 1 << 28, 1, 1, 1, 0))
        with pytest.raises(ValueError, match="a step of"):
            StepReceiver(other).next(None)


def test_progress() -> None:
    progress = StepProgress()
    num_changes = []
    progress.on_change = lambda: num_changes.append(1)
    assert progress.has_reached(0, None)
    progress.begin()
    assert not progress.has_reached(1, 0)
    progress.group_done(0)
    assert progress.has_reached(1, 0)
    assert not progress.has_reached(1, 1)
    assert not progress.has_reached(1, None)
    progress.group_done(1)
    progress.end()
    assert progress.has_reached(1, None)
    progress.begin()
    assert progress.has_reached(1, 1)
    assert not progress.has_reached(2, 0)
    assert not progress.has_reached(2, None)
    assert len(num_changes) == 3


def test_a_step_begins_before_the_one_before_it_ends() -> None:
    progress = StepProgress()
    progress.begin()
    progress.begin()
    assert not progress.has_reached(1, None)
    progress.end()
    assert progress.has_reached(1, None)
    assert not progress.has_reached(2, None)
    progress.end()
    assert progress.has_reached(2, None)
