"""The router's choice: only pairs that fit, and never more load where less would do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.router import (
    MAX_WAITING_PER_SEQ,
    Candidate,
    Need,
    Pair,
    Unseen,
    choose,
    has_pair,
)
from mesh.errors import ContextTooLong, Overloaded, Unavailable
from mesh.worker_info import LoadSnapshot, Role, WorkerInfo

NEED = Need(num_prompt_tokens=100, num_total_tokens=200)


def candidate(
    name: str,
    role: Role,
    *,
    fingerprint: str = "a",
    transport: str = "tcp",
    max_model_len: int = 8192,
    blocks: int = 1000,
    free: int | None = None,
    running: int = 0,
    waiting: int = 0,
    queued_tokens: int = 0,
    tokens_per_s: float = 100.0,
    draining: bool = False,
    unseen: Unseen | None = None,
    load: bool = True,
) -> Candidate:
    info = WorkerInfo(
        worker_id=name,
        role=role,
        epoch=1,
        endpoint="tcp://h:1",
        http_endpoint="http://h:2",
        fingerprint=fingerprint,
        model="m",
        max_model_len=max_model_len,
        block_size=16,
        kv_blocks_total=blocks,
        max_num_seqs=8,
        transport=transport,
    )
    snapshot = LoadSnapshot(
        kv_blocks_total=blocks,
        kv_blocks_free=blocks if free is None else free,
        kv_blocks_quarantined=0,
        open_transfers=0,
        running=running,
        waiting=waiting,
        queued_tokens=queued_tokens,
        step_time_s=0.01,
        tokens_per_s=tokens_per_s,
        draining=draining,
    )
    return Candidate(info=info, load=snapshot if load else None, unseen=unseen or Unseen())


workers = st.lists(
    st.builds(
        candidate,
        st.uuids().map(str),
        st.sampled_from(["prefill", "decode"]),
        fingerprint=st.sampled_from("ab"),
        transport=st.sampled_from(["tcp", "ucx", "auto"]),
        max_model_len=st.sampled_from([150, 8192]),
        blocks=st.sampled_from([2, 10, 1000]),
        running=st.integers(0, 8),
        waiting=st.integers(0, 100),
        queued_tokens=st.integers(0, 10_000),
        tokens_per_s=st.floats(0, 1e4),
        draining=st.booleans(),
        load=st.booleans(),
    ),
    max_size=8,
)


@given(workers, st.integers(1, 200), st.integers(0, 100))
def test_a_chosen_pair_can_serve_the_request(
    candidates: list[Candidate], num_prompt: int, num_output: int
) -> None:
    need = Need(num_prompt, num_prompt + num_output)
    by_id = {c.info.worker_id: c for c in candidates}
    try:
        pair = choose(candidates, need)
    except (Unavailable, ContextTooLong, Overloaded):
        return
    prefill, decode = by_id[pair.prefill_id], by_id[pair.decode_id]
    assert (prefill.info.role, decode.info.role) == ("prefill", "decode")
    assert prefill.info.fingerprint == decode.info.fingerprint
    transports = {prefill.info.transport, decode.info.transport}
    assert len(transports) == 1 or "auto" in transports
    for worker, tokens in ((prefill, num_prompt), (decode, need.num_total_tokens)):
        assert tokens <= worker.info.max_model_len
        assert tokens <= worker.info.kv_blocks_total * 16
        assert worker.load is None or not worker.load.draining


@given(workers, st.sets(st.integers(0, 7)))
def test_avoided_workers_are_taken_only_where_nothing_else_is_left(
    candidates: list[Candidate], avoided: set[int]
) -> None:
    avoid = {c.info.worker_id for i, c in enumerate(candidates) if i in avoided}
    try:
        pair = choose(candidates, NEED, avoid)
    except (Unavailable, ContextTooLong, Overloaded):
        return
    if pair.decode_id in avoid:
        try:
            others = choose([c for c in candidates if c.info.worker_id not in avoid], NEED)
        except (Unavailable, ContextTooLong, Overloaded):
            return
        # Left over only if its partner would have to be avoided too: not with a free pair.
        pytest.fail(f"{others} was free")


@given(st.permutations(range(4)), st.lists(st.integers(0, 900), min_size=4, max_size=4))
def test_the_emptiest_decode_worker_wins(order: list[int], free: list[int]) -> None:
    decodes = [candidate(f"d{i}", "decode", free=free[i]) for i in order]
    pair = choose([candidate("p", "prefill"), *decodes], NEED)
    assert free[int(pair.decode_id[1:])] == max(free)


@pytest.mark.parametrize(
    ("fields", "wins"),
    [
        ({"running": 4}, "idle"),
        ({"waiting": 1}, "idle"),
        ({"free": 500}, "idle"),
        ({"queued_tokens": 500}, "idle"),
        ({"unseen": Unseen(tokens=100, blocks=7, sequences=1)}, "idle"),
    ],
)
def test_each_kind_of_decode_load_counts(fields: dict[str, object], wins: str) -> None:
    busy = candidate("busy", "decode", **fields)
    idle = candidate("idle", "decode")
    prefill = candidate("p", "prefill")
    assert choose([busy, idle, prefill], NEED).decode_id == wins
    assert choose([idle, busy, prefill], NEED).decode_id == wins


@pytest.mark.parametrize(
    "fields",
    [{"queued_tokens": 50}, {"unseen": Unseen(tokens=50)}, {"tokens_per_s": 50.0}],
)
def test_prefill_is_chosen_by_time_to_compute(fields: dict[str, object]) -> None:
    decode = candidate("d", "decode")
    busy, idle = candidate("busy", "prefill", **fields), candidate("idle", "prefill")
    assert choose([busy, idle, decode], NEED).prefill_id == "idle"


def test_own_requests_spread_between_two_snapshots() -> None:
    unseen = {"d0": 0, "d1": 0, "d2": 0}
    for _ in range(30):
        decodes = [
            candidate(name, "decode", unseen=Unseen(tokens=100 * n, blocks=7 * n, sequences=n))
            for name, n in unseen.items()
        ]
        unseen[choose([*decodes, candidate("p", "prefill")], NEED).decode_id] += 1
    assert set(unseen.values()) == {10}


def test_avoided_workers_lose_to_loaded_ones() -> None:
    candidates = [
        candidate("p0", "prefill"),
        candidate("p1", "prefill", queued_tokens=5000),
        candidate("d0", "decode"),
        candidate("d1", "decode", free=10, running=8, waiting=3),
    ]
    assert choose(candidates, NEED) == ("p0", "d0")
    assert choose(candidates, NEED, {"p0", "d0"}) == ("p1", "d1")
    assert choose(candidates, NEED, {"p0", "p1", "d0", "d1"}) == ("p0", "d0")


def test_refusals() -> None:
    prefill, decode = candidate("p", "prefill"), candidate("d", "decode")
    with pytest.raises(Unavailable):
        choose([], NEED)
    with pytest.raises(Unavailable):
        choose([prefill, candidate("d", "decode", fingerprint="b")], NEED)
    with pytest.raises(ContextTooLong):
        choose([prefill, decode], Need(100, 9000))
    with pytest.raises(ContextTooLong):
        choose([candidate("p", "prefill", blocks=2), decode], NEED)
    full = candidate("d", "decode", waiting=8 * MAX_WAITING_PER_SEQ + 1)
    with pytest.raises(Overloaded):
        choose([prefill, full], NEED)
    assert choose([prefill, full, decode], NEED).decode_id == "d"


def test_ready_needs_a_matching_pair() -> None:
    prefill = candidate("p", "prefill")
    assert has_pair([prefill, candidate("d", "decode")])
    assert not has_pair([prefill])
    assert not has_pair([prefill, candidate("d", "decode", fingerprint="b")])
    assert not has_pair([prefill, candidate("d", "decode", transport="ucx")])
    assert not has_pair([prefill, candidate("d", "decode", draining=True)])


def test_pairs_that_refused_each_other_are_not_chosen_again() -> None:
    p0, p1 = candidate("p0", "prefill"), candidate("p1", "prefill", queued_tokens=1000)
    d0, d1 = candidate("d0", "decode"), candidate("d1", "decode", running=5)
    everyone = [p0, p1, d0, d1]
    assert choose(everyone, NEED) == ("p0", "d0")
    assert choose(everyone, NEED, incompatible={Pair("p0", "d0")}) == ("p1", "d0")
    refused = {Pair("p0", "d0"), Pair("p1", "d0")}
    assert choose(everyone, NEED, incompatible=refused) == ("p0", "d1")
    assert has_pair([p0, d0, d1], refused)
    assert not has_pair([p0, d0], refused)
    with pytest.raises(Unavailable):
        choose([p0, d0], NEED, incompatible=refused)
