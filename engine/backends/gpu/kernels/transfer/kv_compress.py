"""KV compressed for transfer as in ``kvtransfer.memory.compression``: int8, a scale for every 32.

A segment of n elements becomes n int8 and then n / 32 float32 scales. Unlike the CPU's, expanding
is not in place: programs write where others still read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.backends.gpu.variant import Variant

GROUP = 32
_ELEMENTS = tl.constexpr(GROUP)
_GROUPS = 64
"""Groups of one program: 2048 elements, 16 of each thread."""
_NEAREST = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding and subtracting it rounds a float32 below 2^22 to the nearest integer."""
_LEAST = tl.constexpr(1e-36)
"""Below this largest magnitude, 127 / largest would overflow: the group's steps are 0."""
_MOST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _compress_kernel(
    segments_ptr, ids_ptr, codes_ptr, scales_ptr, to_ptr, not_finite_ptr,
    segment_stride, code_stride, scale_stride, num_groups,
    GROUPS: tl.constexpr,
):  # fmt: skip
    source = tl.load(ids_ptr + tl.program_id(0)).to(tl.int64)
    target = tl.load(to_ptr + tl.program_id(0)).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * _ELEMENTS + tl.arange(0, _ELEMENTS)[None, :]
    mask = (group < num_groups)[:, None]
    values = tl.load(segments_ptr + source * segment_stride + at, mask=mask, other=0.0)
    values = values.to(tl.float32)
    magnitudes = tl.abs(values)
    finite = magnitudes <= _MOST  # not so for a NaN, which a maximum may pass over
    if tl.sum(tl.sum(finite.to(tl.int32), axis=1), axis=0) < GROUPS * _ELEMENTS:
        tl.store(not_finite_ptr, 1)
    largest = tl.max(magnitudes, axis=1)
    tl.store(
        scales_ptr + target * scale_stride + group,
        tl.div_rn(largest, tl.full([GROUPS], 127.0, tl.float32)),
        mask=group < num_groups,
    )
    inverse = tl.where(largest >= _LEAST, 127.0 / tl.maximum(largest, _LEAST), 0.0)
    steps = (tl.where(finite, values, 0.0) * inverse[:, None] + _NEAREST) - _NEAREST
    tl.store(codes_ptr + target * code_stride + at, steps.to(tl.int8), mask=mask)


@triton.jit
def _expand_kernel(
    codes_ptr, scales_ptr, ids_ptr, segments_ptr, to_ptr,
    code_stride, scale_stride, segment_stride, num_groups,
    GROUPS: tl.constexpr,
):  # fmt: skip
    source = tl.load(ids_ptr + tl.program_id(0)).to(tl.int64)
    target = tl.load(to_ptr + tl.program_id(0)).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * _ELEMENTS + tl.arange(0, _ELEMENTS)[None, :]
    in_segment = group < num_groups
    scales = tl.load(scales_ptr + source * scale_stride + group, mask=in_segment, other=0.0)
    codes = tl.load(codes_ptr + source * code_stride + at, mask=in_segment[:, None], other=0)
    values = (codes.to(tl.float32) * scales[:, None]).to(segments_ptr.dtype.element_ty)
    tl.store(segments_ptr + target * segment_stride + at, values, mask=in_segment[:, None])


def encoded_bytes(num_elements: int) -> int:
    """Size of a compressed segment.

    Raises:
        ValueError: It is no whole number of groups.
    """
    if num_elements % GROUP:
        raise ValueError(f"a segment of {num_elements} elements has no whole groups of {GROUP}")
    return num_elements // GROUP * (GROUP + 4)


def kv_compress(
    segments: torch.Tensor,
    ids: torch.Tensor,
    encoded: torch.Tensor,
    to: torch.Tensor,
    not_finite: torch.Tensor,
) -> None:
    """Compress segments ``ids`` into rows ``to`` of ``encoded``.

    Args:
        segments: [P, n] floats of any dtype, n a multiple of 32; rows may be strided.
        ids: [N] integers.
        encoded: [E, ``encoded_bytes(n)``] uint8, rows 16-byte aligned; may be the start of other
            segments of the same pool.
        to: [N] integers, each once.
        not_finite: [1] int32, set to 1 where a value is not finite (nothing is usable then), else
            left as it is.
    """
    codes, scales = _parts(segments.shape[1], encoded)
    num_groups = segments.shape[1] // GROUP
    if len(ids) == 0:
        return
    _compress_kernel[(len(ids), triton.cdiv(num_groups, _GROUPS))](
        segments, ids, codes, scales, to, not_finite,
        segments.stride(0), codes.stride(0), scales.stride(0), num_groups,
        GROUPS=_GROUPS, num_warps=4,
    )  # fmt: skip


def kv_expand(
    encoded: torch.Tensor, ids: torch.Tensor, segments: torch.Tensor, to: torch.Tensor
) -> None:
    """Expand rows ``ids`` of ``encoded`` into segments ``to``, which must not overlap them.

    Args:
        encoded: [E, ``encoded_bytes(n)``] uint8, rows 16-byte aligned.
        ids: [N] integers.
        segments: [P, n] floats of any dtype; rows may be strided.
        to: [N] integers, each once.
    """
    codes, scales = _parts(segments.shape[1], encoded)
    num_groups = segments.shape[1] // GROUP
    if len(ids) == 0:
        return
    _expand_kernel[(len(ids), triton.cdiv(num_groups, _GROUPS))](
        codes, scales, ids, segments, to,
        codes.stride(0), scales.stride(0), segments.stride(0), num_groups,
        GROUPS=_GROUPS, num_warps=4,
    )  # fmt: skip


def _parts(num_elements: int, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert encoded.dtype == torch.uint8
    assert encoded.shape[1] == encoded_bytes(num_elements)
    assert encoded.stride(1) == 1
    assert encoded.stride(0) % 4 == 0
    codes = encoded[:, :num_elements].view(torch.int8)
    return codes, encoded[:, num_elements:].view(torch.float32)


def reference(segments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps [P, n] and scales [P, n / 32] of float64 segments."""
    groups = segments.double().view(len(segments), segments.shape[1] // GROUP, GROUP)
    scales = groups.abs().amax(-1) / 127
    steps = groups / torch.where(scales > 0, scales, 1.0)[..., None]
    return steps.round().view(segments.shape), scales


def variants() -> list[Variant]:
    """Both ways, for every width of elements."""
    pointers = {"codes_ptr": "*i8:16", "scales_ptr": "*fp32:16"}
    ids = {"ids_ptr": "*i64:16", "to_ptr": "*i64:16"}
    strides = {"segment_stride": "i32:16", "code_stride": "i32:16", "scale_stride": "i32"}
    common = {**pointers, **ids, **strides, "num_groups": "i32"}
    found = []
    for dtype in ("bf16", "fp32"):
        signature = {**common, "segments_ptr": f"*{dtype}:16"}
        for name, fn in (("compress", _compress_kernel), ("expand", _expand_kernel)):
            own = {"not_finite_ptr": "*i32:16"} if name == "compress" else {}
            found.append(
                Variant(
                    name=f"{name} {dtype}",
                    fn=fn,
                    signature={**signature, **own},
                    constexprs={"GROUPS": _GROUPS},
                )
            )
    return found
