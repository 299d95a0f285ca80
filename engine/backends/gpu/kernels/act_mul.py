"""``activation(gate) * up`` of a gated MLP."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.backends.gpu.tuning import launch_config
from engine.backends.gpu.variant import Variant
from engine.model_config import HiddenAct


@triton.jit
def act_mul_kernel(
    gate_up_ptr,
    out_ptr,
    width,
    stride_gate_up,
    stride_out,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Both activations are ``x * sigmoid(f(x))``: f is x (SiLU) or GELU's tanh argument doubled."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate_ptrs = gate_up_ptr + row * stride_gate_up + columns
    gate = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + width, mask=inside, other=0.0).to(tl.float32)
    inner = gate
    if GELU:
        # 2 * sqrt(2 / pi) * (x + 0.044715 x^3)
        inner *= 1.5957691216057308 + 0.07135481282747632 * gate * gate
    # exp2 is one instruction, exp is two; at 2^126 the quotient is 0 for any 16-bit output
    power = tl.minimum(inner * -1.4426950408889634, 126.0)
    product = gate / (1.0 + tl.exp2(power)) * up
    out_ptrs = out_ptr + row * stride_out + columns
    tl.store(out_ptrs, product.to(out_ptr.dtype.element_ty), mask=inside)


def act_mul(gate_up: torch.Tensor, activation: HiddenAct, *, out: torch.Tensor) -> torch.Tensor:
    """Activate the first half of each row and multiply by the second, in float32.

    Args:
        gate_up: [T, 2 I], unit stride in I.
        activation: of the gate.
        out: [T, I], unit stride in I.
    """
    num_rows, width = out.shape
    assert gate_up.shape == (num_rows, 2 * width)
    assert gate_up.stride(1) == 1
    assert out.stride(1) == 1
    if num_rows == 0:
        return out
    config = launch_config("act_mul")
    block = config.meta["BLOCK"]
    act_mul_kernel[(num_rows, triton.cdiv(width, block))](
        gate_up,
        out,
        width,
        gate_up.stride(0),
        out.stride(0),
        GELU=activation == "gelu_tanh",
        BLOCK=block,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def reference(gate_up: torch.Tensor, activation: HiddenAct) -> torch.Tensor:
    """The same in plain torch, in the argument's type."""
    gate, up = gate_up.chunk(2, dim=1)
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    return torch.nn.functional.silu(gate) * up


def variants() -> list[Variant]:
    """Both activations; the block does not depend on the width."""
    config = launch_config("act_mul")
    return [
        Variant(
            name="gelu_tanh" if gelu else "silu",
            fn=act_mul_kernel,
            signature={
                "gate_up_ptr": "*bf16:16",
                "out_ptr": "*bf16:16",
                "width": "i32:16",
                "stride_gate_up": "i32:16",
                "stride_out": "i32:16",
            },
            constexprs={"GELU": gelu, "BLOCK": config.meta["BLOCK"]},
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        for gelu in (False, True)
    ]
