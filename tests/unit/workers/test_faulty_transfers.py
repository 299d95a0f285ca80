"""A thousand transfers of which every twentieth step goes wrong: no wrong token, nothing leaked."""

from __future__ import annotations

import random
import resource

import pytest

from kvtransfer.transports.fault_injection import Faults
from tests.unit.engine.tiny_llama import TinyLlama, random_prompt
from tests.unit.workers.worker_pair import WorkerPair

PROMPTS = [random_prompt(length, seed=70 + length) for length in (5, 16, 33, 47, 60)]
NUM_TOKENS = 4
MAX_ATTEMPTS = 30


class Client:
    """Runs requests in batches and tries again under a new transfer id, as a gateway does."""

    def __init__(self, tiny_llama: TinyLlama, pair: WorkerPair) -> None:
        self.pair = pair
        self.expected = [tiny_llama.greedy(prompt, NUM_TOKENS) for prompt in PROMPTS]
        self.num_attempts = 0

    def serve(self, kinds: list[int]) -> None:
        open_ = list(enumerate(kinds))
        for _ in range(MAX_ATTEMPTS):
            names = {}
            for number, kind in open_:
                name = f"a{self.num_attempts}"
                names[name] = (number, kind)
                # A salt of its own: no prefix cache saves the transfer.
                self.pair.submit(name, PROMPTS[kind], NUM_TOKENS, salt=name)
                self.num_attempts += 1
            self.pair.run(max_rounds=20_000)
            open_ = []
            for name, (number, kind) in names.items():
                # D's tokens are right even where the gateway would have given the attempt up.
                for output in self.pair.outputs.get(name, []):
                    index = output.index
                    expected = self.expected[kind][index : index + len(output.token_ids)]
                    assert list(output.token_ids) == expected, "a wrong token"
                if not self.pair.is_finished(name):
                    assert self.pair.failures.get(name), "neither an answer nor an error"
                    open_.append((number, kind))
            self.pair.outputs.clear()
            self.pair.failures.clear()
            if not open_:
                return
        raise AssertionError(f"{len(open_)} requests failed {MAX_ATTEMPTS} times")


@pytest.mark.parametrize(
    ("transport", "num_transfers", "layer_groups"),
    [("inproc", 1000, 1), ("inproc", 200, 2), ("shm", 200, 1), ("tcp", 200, 1)],
)
def test_five_percent_faults(
    tiny_llama: TinyLlama, transport: str, num_transfers: int, layer_groups: int
) -> None:
    faults = Faults(0.05, seed=num_transfers)
    pair = WorkerPair(
        tiny_llama.engine(role="prefill", max_batched_tokens=40, kv_layer_groups=layer_groups),
        tiny_llama.engine(kv_blocks=24),
        transport=transport, faults=faults, layer_groups=layer_groups,
    )  # fmt: skip
    client = Client(tiny_llama, pair)
    choose = random.Random(num_transfers)
    memory_kib = []
    while client.num_attempts < num_transfers:
        client.serve([choose.randrange(len(PROMPTS)) for _ in range(4)])
        pair.check_everything_is_free()
        memory_kib.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert sum(faults.counts.values()) > num_transfers / 10
    assert memory_kib[-1] - memory_kib[len(memory_kib) // 4] < 20_000, "memory grows"
    pair.close()
