"""Argument checks shared by all operators: each raises before any launch and names argument, expected and given.

The checks run inside the operator's implementation (eager) and inside its fake kernel or composite body (tracing), so
that a bad call fails with the same exception type and the same text in eager mode and under `torch.compile`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from fla_inductor import _compat

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int32, torch.int64)


def fail(op: str, argument: str, expected: str, got: object, kind: type[Exception] = ValueError) -> NoReturn:
    """Raise `kind` with a text that names the operator, the argument, what was expected and what was given."""
    message = f"{op}: argument `{argument}`: expected {expected}, got {got}"
    raise _compat.traceable_error(kind)(message)


def check_given(op: str, **tensors: Tensor | None) -> None:
    """No required tensor is missing: the dispatcher takes None for a tensor."""
    for name, x in tensors.items():
        if x is None:
            fail(op, name, "a torch.Tensor", None, TypeError)


def check_float(op: str, **tensors: Tensor | None) -> None:
    """Every given tensor is float32, bfloat16 or float16."""
    for name, x in tensors.items():
        if x is None:
            continue
        if not isinstance(x, Tensor):
            fail(op, name, "a torch.Tensor", type(x).__name__, TypeError)
        if x.dtype not in FLOAT_DTYPES:
            fail(op, name, "dtype float32, bfloat16 or float16", x.dtype, TypeError)


def check_output_dtype(op: str, dtype: object) -> None:
    """The argument `output_dtype` is a float dtype that the operators produce."""
    if dtype not in FLOAT_DTYPES:
        fail(op, "output_dtype", "float32, bfloat16 or float16", dtype, TypeError)


def check_choice(op: str, name: str, value: object, choices: Sequence[str | None]) -> None:
    """`value` is one of the choices."""
    if value not in choices:
        fail(op, name, f"one of {', '.join(map(repr, choices))}", repr(value))


def check_shape(op: str, name: str, x: Tensor, shape: Sequence[int | torch.SymInt | None], spec: str) -> None:
    """`x` has exactly this shape; None stands for any size. `spec` is the symbolic form, such as "[B, T, H, K]"."""
    wanted = ", ".join("*" if s is None else str(s) for s in shape)
    if x.dim() != len(shape):
        fail(op, name, f"shape {spec} = [{wanted}]", list(x.shape))
    for have, want in zip(x.shape, shape, strict=True):
        if want is not None and have != want:
            fail(op, name, f"shape {spec} = [{wanted}]", list(x.shape))


def check_same_device(op: str, **tensors: Tensor | None) -> None:
    """All given tensors live on the device of the first one."""
    first_name, first = next((n, x) for n, x in tensors.items() if x is not None)
    for name, x in tensors.items():
        if x is not None and x.device != first.device:
            fail(op, name, f"device {first.device} (that of `{first_name}`)", x.device)


def check_cu_seqlens(op: str, cu_seqlens: Tensor | None, batch: int | torch.SymInt, tokens: int | torch.SymInt) -> None:
    """`cu_seqlens` is an int32 or int64 tensor [N + 1] and the batch size is 1; values are checked on the CPU only."""
    if cu_seqlens is None:
        return
    if cu_seqlens.dtype not in INDEX_DTYPES:
        fail(op, "cu_seqlens", "dtype int32 or int64", cu_seqlens.dtype, TypeError)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        fail(op, "cu_seqlens", "shape [N + 1]", list(cu_seqlens.shape))
    if batch != 1:
        fail(op, "cu_seqlens", "batch size 1 when `cu_seqlens` is given (flatten the sequences)", f"batch size {batch}")
    if cu_seqlens.device.type == "cpu" and not _compat.is_fake(cu_seqlens):
        offsets = cu_seqlens.tolist()
        if offsets[0] != 0 or offsets[-1] > tokens or any(a > b for a, b in itertools.pairwise(offsets)):
            fail(op, "cu_seqlens", f"non-decreasing offsets from 0 up to at most T = {tokens}", offsets)
