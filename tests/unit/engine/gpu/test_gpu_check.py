"""The check of a GPU machine, as far as it goes without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
import torch

from benchmarks.gpu import (
    attention_cases,
    decode_step,
    engine_check,
    product_cases,
    small_cases,
    transfer_cases,
)
from benchmarks.gpu.case import Case
from benchmarks.gpu.decode_step import DecodeStep, RandomSource, shape_8b
from benchmarks.gpu.kernel_tables import error_rows, speed_rows
from benchmarks.gpu.stopwatch import Floors, Stopwatch, measure_floors
from benchmarks.gpu_check import main
from engine.backends.gpu.device import HostDevice
from engine.model_config import ModelConfig
from engine.weights.expected_tensors import check_tensors
from engine.weights.open import open_model
from mesh.model_text.model_files import resolve_model
from tests.unit.engine.tiny_llama import TinyLlama, random_prompt

CPU = torch.device("cpu")


def test_the_interpreted_check_passes_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--interpret", "--only", "take_tokens|rms_norm 5 x 96 fp32"]) == 0
    table = capsys.readouterr().out
    assert table.count("| ok |") == 3
    assert "take_tokens" in table


def test_a_pattern_that_matches_nothing_is_no_success() -> None:
    assert main(["--interpret", "--only", "no such kernel"]) == 1


def test_every_kind_of_case_holds_its_bound() -> None:
    kind = attention_cases.Geometry(num_q_heads=4, num_kv_heads=2, head_dim=32, kv="int8")
    cases = [
        attention_cases.decode_case(CPU, kind, (40, 0, 1), num_splits=2),
        attention_cases.prefill_case(CPU, kind, [(17, 5)]),
        attention_cases.write_case(CPU, kind, 5),
        product_cases.packed_case(CPU, 8, 3, 48, 128, activation="fp32"),
        product_cases.packed_case(CPU, 4, 3, 48, 128, activation="fp32"),
        small_cases.sample_case(CPU, 3, 200, is_cut=True),
        transfer_cases.move_case(CPU, "bf16", 2, 1, (1, 2)),
        transfer_cases.compress_case(CPU, torch.float32, 2, 64),
    ]
    rows = error_rows(cases)
    assert [row[-1] for row in rows] == ["ok"] * len(cases)
    assert all(case.num_bytes or case.num_flops for case in cases)


@pytest.mark.parametrize("wrong", [lambda out: out + 1e-3, lambda out: out * float("nan")])
def test_a_wrong_result_is_told(wrong: Callable[[torch.Tensor], torch.Tensor]) -> None:
    right = torch.ones(4)
    error = small_cases.relative_error(lambda: wrong(right), lambda: right.double())
    case = Case(kernel="k", inputs="i", run=lambda: right, error=error, bound=1e-4)
    assert error_rows([case])[0][-1] == "WRONG"
    assert speed_rows([case], Stopwatch(CPU), Floors(1e9, 1e9))[0][-1] == "WRONG"


def test_speed_is_judged_by_the_floor() -> None:
    case = small_cases.take_case(CPU, 3)
    watch = Stopwatch(CPU)
    verdicts = [
        speed_rows([replace(case, target=target)], watch, Floors(bytes_per_s, 1.0))[0][-1]
        for target, bytes_per_s in ((0.5, 1e15), (0.0, 1e15), (0.5, 1.0))
    ]
    assert verdicts == ["SLOW", "ok", "ok"]


def test_the_floor_is_the_longer_of_moving_and_computing() -> None:
    floors = Floors(bytes_per_s=100.0, flops_per_s=1000.0)
    assert floors.seconds(num_bytes=200, num_flops=1000) == 2.0
    assert floors.seconds(num_bytes=20, num_flops=1000) == 1.0
    measured = measure_floors(Stopwatch(CPU), CPU, copy_bytes=1 << 20, gemm_size=64)
    assert measured.bytes_per_s > 1e6
    assert measured.flops_per_s > 1e6


def test_a_decode_step_runs_in_a_graph_and_without() -> None:
    config = _small_shape()
    step = DecodeStep(config, "fp32", HostDevice(), max_batch=2, max_context=64)
    assert step.seconds(2, 40, num_steps=2) > 0
    assert step._runner.num_replayed == 0
    step.capture()
    assert step.seconds(2, 40, num_steps=2) > 0
    assert step._runner.num_replayed == 5


def test_the_table_of_steps_has_all_columns() -> None:
    (row,) = decode_step.measure("fp32", [(1, 32)], 1e9, config=_small_shape(), device=HostDevice())
    assert len(row) == len(decode_step.HEADINGS)


def test_the_plain_decoder_is_transformers(tiny_llama: TinyLlama) -> None:
    tokens = random_prompt(20, seed=1)
    config, source = open_model(resolve_model(str(tiny_llama.folder)))
    with source:
        logits = engine_check.reference(config, source, tokens)
    torch.testing.assert_close(logits.float(), tiny_llama.logits(tokens), atol=1e-3, rtol=0)
    answer = tiny_llama.greedy(tokens, 3)
    assert engine_check.loss_of(tiny_llama.folder, tokens, answer) < 1e-3
    worse = [*answer[:2], (answer[2] + 1) % 96]
    assert engine_check.loss_of(tiny_llama.folder, tokens, worse) > 0.1


def test_random_weights_are_what_the_shape_calls_for() -> None:
    config = _small_shape()
    source = RandomSource(config, CPU)
    check_tensors(config, source)
    assert all(source.get(name).shape == source.shape(name) for name in source.names())
    assert shape_8b().num_layers == 32


def _small_shape() -> ModelConfig:
    return msgspec.structs.replace(
        shape_8b(1), vocab_size=64, hidden_size=32, intermediate_size=32, num_heads=2,
        num_kv_heads=1, head_dim=16, query_scale=0.25,
    )  # fmt: skip
