"""bfloat16 arithmetic for Triton's interpreter, which keeps its bits as uint16 and adds the bits.

Every operation computes in float32 and rounds to nearest even, as a GPU does; so do conversions,
which the interpreter truncates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from triton.runtime import interpreter

_Builder = interpreter.InterpreterBuilder
_Handle = interpreter.TensorHandle


def support_bfloat16() -> None:
    """Replace the interpreter's operations that would take bfloat16 for integers."""
    binary_op, create_dot = _Builder.binary_op, _Builder.create_dot
    cast_impl = _Builder.cast_impl

    def binary(self: Any, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        if lhs.dtype.scalar != tl.bfloat16:
            return binary_op(self, lhs, rhs, op)
        result = op(_floats(lhs), _floats(rhs))
        if result.dtype == np.bool_:
            return _Handle(result, tl.int1)
        return _Handle(_bits(result), tl.bfloat16)

    def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        return create_dot(self, _widened(a), _widened(b), d, *options)

    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return _Handle(_bits(src.data), tl.bfloat16)
        return cast_impl(self, src, dst_type)

    _Builder.binary_op = binary
    _Builder.cast_impl = cast
    _Builder.create_dot = dot


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return _Handle(_floats(handle), tl.float32)


def _floats(handle: Any) -> npt.NDArray[np.float32]:
    bits: npt.NDArray[np.uint32] = handle.data.astype(np.uint32)
    return (bits << 16).view(np.float32)


def _bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    rounded = torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().view(np.uint16)
