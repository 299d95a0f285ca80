"""RMS norm of rows, with and without adding to the residual stream first."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.backends.gpu.tuning import launch_config
from engine.backends.gpu.variant import Variant


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    width,
    stride_x,
    stride_residual,
    stride_out,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row, which it holds in registers: every element is read once."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        residual_ptrs = residual_ptr + row * stride_residual + columns
        x += tl.load(residual_ptrs, mask=inside, other=0.0).to(tl.float32)
        stored = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptrs, stored, mask=inside)
        x = stored.to(tl.float32)  # the norm is that of the stream as later layers see it
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
    normed = x * factor * weight
    out_ptrs = out_ptr + row * stride_out + columns
    tl.store(out_ptrs, normed.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor
) -> torch.Tensor:
    """``x / rms(x) * weight``, statistics in float32.

    Args:
        x: [T, H], unit stride in H.
        weight: [H] float32.
        eps: added to the mean square.
        out: [T, H], unit stride in H; may be x.
    """
    return _launch(x, None, weight, eps, out)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """``residual += x`` in place, then its norm; arguments as those of ``rms_norm``."""
    return _launch(x, residual, weight, eps, out)


def reference(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """The same in plain torch, in x's type; ``residual`` is changed in place."""
    if residual is not None:
        residual += x
        x = residual.to(x.dtype)
    return x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + eps) * weight.to(x.dtype)


def variants() -> list[Variant]:
    """Widths of small and large models, a power of two at a time."""
    return [_variant(add, block) for add in (False, True) for block in (1024, 4096, 16384)]


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> torch.Tensor:
    num_rows, width = x.shape
    assert out.shape == x.shape
    assert weight.shape == (width,)
    assert x.stride(1) == 1
    assert out.stride(1) == 1
    if residual is not None:
        assert residual.shape == x.shape
        assert residual.stride(1) == 1
    if num_rows == 0:
        return out
    block = triton.next_power_of_2(width)
    config = launch_config("rms_norm", block=block)
    stream = x if residual is None else residual
    rms_norm_kernel[(num_rows,)](
        x,
        stream,
        weight,
        out,
        eps,
        width,
        x.stride(0),
        stream.stride(0),
        out.stride(0),
        ADD=residual is not None,
        BLOCK=block,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def _variant(add: bool, block: int) -> Variant:
    config = launch_config("rms_norm", block=block)
    return Variant(
        name=f"{'add, ' if add else ''}width {block}",
        fn=rms_norm_kernel,
        signature={
            "x_ptr": "*bf16:16",
            "residual_ptr": "*bf16:16",
            "weight_ptr": "*fp32:16",
            "out_ptr": "*bf16:16",
            "eps": "fp32",
            "width": "i32:16",
            "stride_x": "i32:16",
            "stride_residual": "i32:16",
            "stride_out": "i32:16",
        },
        constexprs={"ADD": add, "BLOCK": block},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
