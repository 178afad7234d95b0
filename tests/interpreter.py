"""Triton's interpreter on the CPU, with its bfloat16 arithmetic mended; import before any kernel module.

Checked on triton 3.6.0: its dots multiply bfloat16 operands as raw integers, and its float32 to bfloat16 casts truncate
where the hardware rounds to nearest even.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def install() -> None:
    """Patch the interpreter; safe to call twice."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "fla_inductor_patched", False):
        return
    create_dot, cast_impl = builder.create_dot, builder.cast_impl

    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        wide = [self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return create_dot(self, *wide, d, *rest)

    def cast(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return interpreter.TensorHandle(_round_to_bfloat16(source.data), tl.bfloat16)
        return cast_impl(self, source, target)

    builder.create_dot = dot
    builder.cast_impl = cast
    builder.create_fp_trunc = lambda self, source, target: self.cast_impl(source, target)
    builder.fla_inductor_patched = True


install()
