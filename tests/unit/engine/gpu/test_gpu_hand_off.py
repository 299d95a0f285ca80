"""KV that a prefill worker's GPU engine wrote is what the decode worker's goes on from."""

from __future__ import annotations

from tests.unit.engine.gpu.gpu_engines import gpu_engine, runner
from tests.unit.engine.tiny_llama import TinyLlama, random_prompt
from tests.unit.workers.worker_pair import WorkerPair


def test_answers_through_a_hand_off_are_those_of_one_engine(tiny_llama: TinyLlama) -> None:
    prefill = gpu_engine(
        tiny_llama.folder, role="prefill", prepare=False, kv_layer_groups=2, max_batched_tokens=20
    )
    decode = gpu_engine(tiny_llama.folder, max_num_seqs=2)
    assert prefill.fingerprint == decode.fingerprint != tiny_llama.engine().fingerprint
    pair = WorkerPair(prefill, decode, layer_groups=2)
    prompts = {"a": random_prompt(25, seed=20), "b": random_prompt(7, seed=21)}
    for name, prompt in prompts.items():
        pair.submit(name, prompt, 4)
    pair.run()
    pair.check_everything_is_free()
    for name, prompt in prompts.items():
        assert pair.tokens(name) == tiny_llama.greedy(prompt, 4)
    assert runner(decode).num_replayed > 0
    assert decode.scheduler.num_prefix_hits == 0
