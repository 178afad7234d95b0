"""`fla_inductor::_chunk_scan`: the state recurrence over chunks, the one sequential piece of the CPU path.

Private: called from inside forward and backward implementations, which own the gradients.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from fla_inductor import _checks
from fla_inductor._library import LIB, NAMESPACE, TAGS

_NAME = "_chunk_scan"
_DTYPES = (torch.float32, torch.float64)

LIB.define(
    f"{_NAME}(Tensor decay, Tensor x, Tensor y, Tensor z, Tensor init, Tensor restart, bool reverse) -> Tensor",
    tags=TAGS,
)


def _check(decay: Tensor, x: Tensor, y: Tensor, z: Tensor, init: Tensor, restart: Tensor) -> None:
    floats = {"decay": decay, "x": x, "y": y, "z": z, "init": init}
    if decay.dtype not in _DTYPES:
        _checks.fail(_NAME, "decay", "dtype float32 or float64", decay.dtype, TypeError)
    for name, tensor in floats.items():
        if tensor.dtype != decay.dtype:
            _checks.fail(_NAME, name, f"dtype {decay.dtype} (that of `decay`)", tensor.dtype, TypeError)
    if restart.dtype != torch.int64:
        _checks.fail(_NAME, "restart", "dtype int64", restart.dtype, TypeError)
    _checks.check_same_device(_NAME, **floats, restart=restart)
    _checks.check_shape(_NAME, "decay", decay, (None, None, None), "[P, NC, K]")
    heads, chunks, keys = decay.shape
    _checks.check_shape(_NAME, "x", x, (heads, chunks, None, keys), "[P, NC, C, K]")
    _checks.check_shape(_NAME, "y", y, (heads, chunks, x.shape[2], keys), "[P, NC, C, K]")
    _checks.check_shape(_NAME, "z", z, (heads, chunks, keys, None), "[P, NC, K, V]")
    _checks.check_shape(_NAME, "init", init, (heads, None, keys, z.shape[3]), "[P, R, K, V]")
    _checks.check_shape(_NAME, "restart", restart, (chunks,), "[NC]")


def _implementation(
    decay: Tensor, x: Tensor, y: Tensor, z: Tensor, init: Tensor, restart: Tensor, reverse: bool
) -> Tensor:
    """Two batched products for each chunk, every state written straight into its slot of the output."""
    _check(decay, x, y, z, init, restart)
    rows = restart.tolist()
    if any(row >= init.shape[1] for row in rows):
        _checks.fail(_NAME, "restart", f"indices below R = {init.shape[1]}", rows)
    out = z.new_empty(z.shape)
    state = z.new_zeros((z.shape[0], *z.shape[2:]))
    for chunk in reversed(range(len(rows))) if reverse else range(len(rows)):
        if rows[chunk] >= 0:
            state = init[:, rows[chunk]]
        product = torch.bmm(y[:, chunk], state)
        base = torch.addcmul(z[:, chunk], decay[:, chunk, :, None], state)
        state = torch.baddbmm(base, x[:, chunk].mT, product, alpha=-1, out=out[:, chunk])
    return out


def _fake(decay: Tensor, x: Tensor, y: Tensor, z: Tensor, init: Tensor, restart: Tensor, reverse: bool) -> Tensor:
    _check(decay, x, y, z, init, restart)
    return z.new_empty(z.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Nothing is saved: the gradient belongs to the operators that call this one."""


def _backward(ctx: Any, grad: Tensor) -> NoReturn:
    raise RuntimeError(f"{NAMESPACE}::{_NAME} is not differentiable: the operator that calls it defines the gradient")


LIB.impl(_NAME, _implementation, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::{_NAME}", _fake, lib=LIB)
torch.library.register_autograd(f"{NAMESPACE}::{_NAME}", _backward, setup_context=_setup_context, lib=LIB)


def chunk_scan(
    decay: Tensor, x: Tensor, y: Tensor, z: Tensor, init: Tensor, restart: Tensor, reverse: bool = False
) -> Tensor:
    """The state at the end of every chunk, chunks taken one after the other.

    For each p, over c = 0 .. NC-1 (or NC-1 .. 0 if `reverse`):

        S      = init[p, restart[c]] if restart[c] >= 0, else the S of the chunk before (zeros for the first)
        S      = decay[p, c, :, None] * S - x[p, c]^T @ (y[p, c] @ S) + z[p, c]
        out[p, c] = S

    Args:
        decay: [P, NC, K], float32 or float64, a factor (not a logarithm). The other floats have its dtype.
        x, y: [P, NC, C, K], any strides.
        z: [P, NC, K, V], any strides.
        init: [P, R, K, V], the states to restart from; R may be 0.
        restart: [NC], int64, a row of `init` below R, or negative to continue.
        reverse: walk the chunks from the last to the first.

    Returns:
        [P, NC, K, V], contiguous.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or device does not fit, or `restart` points past `init` (RuntimeError in compiled code).
        RuntimeError: the result is differentiated.

    Source: the chunk-level recurrence of Kimi Delta Attention; FLA's `chunk_gated_delta_rule_fwd_h` plays this part.
    """
    return torch.ops.fla_inductor._chunk_scan.default(decay, x, y, z, init, restart, reverse)
