"""Fills in the tokens that the step before has drawn and the host has not seen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.backends.gpu.variant import Variant

_BLOCK = 256


@triton.jit(do_not_specialize=["num_tokens"])
def _take_tokens_kernel(token_ids_ptr, sources_ptr, drawn_ptr, num_tokens, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources_ptr + token, mask=token < num_tokens, other=-1)
    is_pending = source >= 0
    drawn = tl.load(drawn_ptr + source, mask=is_pending, other=0)
    tl.store(token_ids_ptr + token, drawn.to(tl.int64), mask=is_pending)


def take_tokens(token_ids: torch.Tensor, sources: torch.Tensor, drawn: torch.Tensor) -> None:
    """``token_ids[i] = drawn[sources[i]]`` where a source is not -1.

    Args:
        token_ids: [T] int64, changed in place.
        sources: [T] int32, -1 or an index into ``drawn``.
        drawn: [N] integers.
    """
    num_tokens = token_ids.shape[0]
    assert token_ids.stride(0) == sources.stride(0) == drawn.stride(0) == 1
    if num_tokens:
        _take_tokens_kernel[(triton.cdiv(num_tokens, _BLOCK),)](
            token_ids, sources, drawn, num_tokens, BLOCK=_BLOCK, num_warps=4
        )


def reference(token_ids: torch.Tensor, sources: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """The tokens afterwards."""
    taken = drawn[sources.clamp(min=0).long()].to(token_ids.dtype)
    return torch.where(sources >= 0, taken, token_ids)


def variants() -> list[Variant]:
    """The only one."""
    return [
        Variant(
            name="take_tokens",
            fn=_take_tokens_kernel,
            signature={
                "token_ids_ptr": "*i64:16", "sources_ptr": "*i32:16", "drawn_ptr": "*i32:16",
                "num_tokens": "i32",
            },
            constexprs={"BLOCK": _BLOCK},
        )
    ]  # fmt: skip
