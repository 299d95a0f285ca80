"""Both workers through random orders of turns, aborts and lost links.

Whoever moves when, and whatever is given up at which moment: both pools end up all free, no
transfer stays open, and every answer that was not disturbed is that of one engine.
"""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mesh.messages import RequestFailed
from tests.unit.engine.tiny_llama import TinyLlama, random_prompt
from tests.unit.workers.worker_pair import LEASE_S, WorkerPair

PROMPTS = [random_prompt(length, seed=50) for length in (1, 15, 17, 32, 40)]
MAX_REQUESTS = 5
TURNS = ["p step", "p event", "p poll", "message to p", "d step", "d event", "d poll"]
TURNS += ["message to d"]
SUBMIT = st.tuples(st.just("submit"), st.integers(0, len(PROMPTS) - 1), st.integers(1, 4))
MOVE = st.tuples(st.sampled_from(TURNS), st.integers(1, 3), st.just(0))
ROUND = st.tuples(st.just("round"), st.integers(1, 3), st.just(0))
ABORT = st.tuples(
    st.sampled_from(["abort", "abort at p", "abort at d"]),
    st.integers(0, MAX_REQUESTS - 1),
    st.just(0),
)
FAULT = st.tuples(
    st.sampled_from(["p loses d", "d loses p", "gateway lost", "time passes"]),
    st.just(0),
    st.just(0),
)
ACTIONS = st.lists(st.one_of(SUBMIT, MOVE, MOVE, MOVE, ROUND, ROUND, ABORT), max_size=40)
FAULTY_ACTIONS = st.lists(st.one_of(SUBMIT, MOVE, MOVE, MOVE, ROUND, ABORT, FAULT), max_size=40)
SETTINGS = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
Action = tuple[str, int, int]


class Story:
    """Applies actions to a pair of workers with small pools and remembers who was disturbed."""

    def __init__(self, tiny_llama: TinyLlama, overlap: bool) -> None:
        self.tiny_llama = tiny_llama
        groups = 2 if overlap else 1  # what leaves during the forward does so late, too
        self.pair = WorkerPair(
            tiny_llama.engine(
                overlap=overlap, role="prefill", kv_blocks=9, max_batched_tokens=20,
                kv_layer_groups=groups,
            ),
            tiny_llama.engine(overlap=overlap, kv_blocks=6, max_num_seqs=3),
            layer_groups=groups,
        )  # fmt: skip
        self.requests: dict[str, tuple[list[int], int]] = {}
        self.disturbed: set[str] = set()

    def apply(self, action: Action) -> None:
        kind, number, count = action
        pair, name = self.pair, f"r{number}"
        match kind:
            case "submit":
                if len(self.requests) < MAX_REQUESTS:
                    name = f"r{len(self.requests)}"
                    self.requests[name] = (PROMPTS[number], count)
                    pair.submit(name, PROMPTS[number], count)
            case "round":
                for _ in range(number):
                    for turn in pair.turns.values():
                        turn()
            case "abort" | "abort at p" | "abort at d":
                if name in self.requests:
                    self.disturbed.add(name)
                    pair.abort(name, at_p=kind != "abort at d", at_d=kind != "abort at p")
            case "p loses d":
                self.disturbed |= set(self.requests)
                pair.sender.on_peer_down("d")
            case "d loses p":
                self.disturbed |= set(self.requests)
                pair.receiver.on_peer_down("p")
            case "gateway lost":
                self.disturbed |= set(self.requests)
                pair.lose_gateway()
            case "time passes":
                self.disturbed |= set(self.requests)
                pair.now_s += LEASE_S * 0.7
            case _:
                for _ in range(number):
                    pair.turns[kind]()

    def end(self) -> None:
        pair = self.pair
        for name in self.disturbed:
            pair.abort(name)  # a gateway gives the other leg up, too
        pair.run()
        pair.check_everything_is_free()
        for name, (prompt, count) in self.requests.items():
            expected = self.tiny_llama.greedy(prompt, count)
            failures = pair.failures.get(name, [])
            assert all(is_expected(failure) for failure in failures)
            tokens = [
                (output.index, token)
                for output in pair.outputs.get(name, [])
                for token in output.token_ids
            ]
            assert len(set(tokens)) == len(tokens)
            assert all(expected[index] == token for index, token in tokens)
            if name not in self.disturbed and not failures:
                assert pair.tokens(name) == expected
                assert pair.is_finished(name)


def is_expected(failure: RequestFailed) -> bool:
    """What a gateway may retry on other workers."""
    return failure.code == "transfer_failed" and failure.retryable


@SETTINGS
@given(ACTIONS, st.booleans())
def test_aborts_at_any_moment_leave_nothing_behind(
    tiny_llama: TinyLlama, actions: list[Action], overlap: bool
) -> None:
    story = Story(tiny_llama, overlap)
    for action in actions:
        story.apply(action)
    story.end()


@SETTINGS
@given(FAULTY_ACTIONS, st.booleans())
def test_lost_links_gateways_and_leases_leave_nothing_behind(
    tiny_llama: TinyLlama, actions: list[Action], overlap: bool
) -> None:
    story = Story(tiny_llama, overlap)
    for action in actions:
        story.apply(action)
    story.end()
