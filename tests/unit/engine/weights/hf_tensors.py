"""A transformers model's weights under the names its checkpoint has."""

from __future__ import annotations

from typing import Any

import torch


def hf_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The state dict by checkpoint names: experts apart, no tied head."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem, _, last = name.rpartition(".")
        if stem.endswith("mlp.experts"):
            for expert, matrix in enumerate(tensor):
                parts = (
                    dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
                    if last == "gate_up_proj"
                    else {"down_proj": matrix}
                )
                for part, weight in parts.items():
                    tensors[f"{stem}.{expert}.{part}.weight"] = weight
        else:
            tensors[name] = tensor
    return tensors
