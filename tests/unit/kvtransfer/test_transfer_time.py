"""Hidden and exposed time of one transfer."""

from __future__ import annotations

from kvtransfer.sender.transfer_time import TransferTime


def test_what_overlaps_the_prefill_is_hidden() -> None:
    time = TransferTime()
    time.resume(1.0)
    time.resume(1.5)  # a second write beside the first
    time.pause(2.0)
    time.pause(3.0)
    time.resume(4.0)
    time.finish(4.25)
    time.pause(5.0)
    assert (time.hidden_s, time.exposed_s) == (1.25, 0.75)


def test_everything_after_the_prefill_is_exposed() -> None:
    time = TransferTime()
    time.finish(1.0)
    time.resume(2.0)
    time.pause(2.5)
    assert (time.hidden_s, time.exposed_s) == (0.0, 0.5)


def test_what_is_told_before_the_end() -> None:
    time = TransferTime()
    time.finish(1.0)
    time.resume(3.0)  # the grant came late
    time.pause(3.5)
    time.resume(4.0)
    assert time.exposed_until(4.25) == 0.75
    assert time.waited_until(4.25) == 2.5
    time.pause(5.0)
    assert (time.exposed_s, time.exposed_until(9.0)) == (1.5, 1.5)
