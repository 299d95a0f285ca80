"""What is measured for attention can be launched, and answers what its launchers ask."""

from __future__ import annotations

import torch

from engine.backends.gpu import tuning
from engine.backends.gpu.kernels.attention.attention_tuning import tuning_cases


def test_cases_launch_and_name_what_their_launcher_asks_for() -> None:
    sizes = {"batch": 2, "context": 40, "num_kv_heads": 1}
    cases = list(tuning_cases(torch.device("cpu"), head_dims=(16,), **sizes))
    assert [case.kernel for case in cases] == (["paged_decode"] + ["varlen_prefill"] * 4) * 2
    for case in cases:
        case.launch(case.candidates[0])
        key = {"head_dim": 16, "kv": "bf16", "dot": "bf16", "rows": 128, "plain": 1}
        default = tuning.config_of_card(None, case.kernel, **key)
        for candidate in case.candidates:
            assert candidate.meta.keys() == default.meta.keys()
        for when in case.whens:
            assert when.keys() <= key.keys()
