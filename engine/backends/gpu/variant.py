"""One specialisation of a kernel that the product launches, as the compile check builds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, frozen=True, kw_only=True)
class Variant:
    """What Triton's launcher would compile for one kind of call.

    Types are Triton's (``*bf16``, ``i32``, ``fp32``) with its hints: ``*bf16:16`` and ``i32:16``
    are multiples of 16 (an aligned pointer; a stride that allows wide loads), ``i32:1`` is the
    constant 1, as a launch would see it. Without its hints a kernel compiles to narrow loads.
    """

    name: str
    """Unique in its kernel's file; a row of the compile table."""
    fn: Any
    """The ``@triton.jit`` function."""
    signature: dict[str, str]
    """Type of every argument that is no constexpr."""
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
