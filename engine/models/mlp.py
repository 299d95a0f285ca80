"""The two kinds of MLP: dense and mixture of experts, both gated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from engine.backend import Backend, Linear
from engine.model_config import HiddenAct

WrapLinear = Callable[[Linear, str, int | None], Linear]
"""Makes another product of one, given its name and its layer (None: of the whole model)."""


@dataclass(slots=True, frozen=True)
class GatedMlp:
    """``down(act(gate(x)) * up(x))``, gate and up stacked in one product."""

    backend: Backend
    activation: HiddenAct
    gate_up: Linear
    down: Linear

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, H] → [T, H]."""
        return self.down(self.backend.act_mul(self.gate_up(hidden), self.activation))

    def instrumented(self, backend: Backend, wrap: WrapLinear, layer: int) -> GatedMlp:
        """See ``Decoder.instrumented``."""
        gate_up, down = wrap(self.gate_up, "gate_up", layer), wrap(self.down, "down", layer)
        return replace(self, backend=backend, gate_up=gate_up, down=down)

    def linears(self) -> list[Linear]:
        """Every weight matrix."""
        return [self.gate_up, self.down]


@dataclass(slots=True, frozen=True)
class MoeMlp:
    """Each token runs through its top k experts (Shazeer et al., arXiv:1701.06538)."""

    router: Callable[[torch.Tensor], torch.Tensor]
    """[T, H] → [T, num_experts] float32."""
    experts: list[GatedMlp]
    num_experts_per_tok: int
    norm_topk_prob: bool

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, H] → [T, H]; one pass per expert that any token chose."""
        probabilities = torch.softmax(self.router(hidden), dim=-1)
        weights, chosen = torch.topk(probabilities, self.num_experts_per_tok, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(hidden)
        for expert in torch.unique(chosen).tolist():
            tokens, rank = torch.where(chosen == expert)
            result = self.experts[expert](hidden[tokens])
            out.index_add_(0, tokens, (result * weights[tokens, rank, None]).to(out.dtype))
        return out

    def instrumented(self, backend: Backend, wrap: WrapLinear, layer: int) -> MoeMlp:
        """See ``Decoder.instrumented``."""
        experts = [expert.instrumented(backend, wrap, layer) for expert in self.experts]
        return replace(self, experts=experts)

    def linears(self) -> list[Linear]:
        """Every quantisable weight matrix."""
        return [linear for expert in self.experts for linear in expert.linears()]
