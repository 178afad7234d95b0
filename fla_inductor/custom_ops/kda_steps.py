"""`fla_inductor::_kda_steps` and `_kda_steps_backward`: KDA's recurrence on activated inputs, for the CPU.

A core walks the tokens of a head with the state in its first cache. That is as many multiplications as the products of
the chunk form, without what those write to memory and read again. Private: called from inside the decompositions of the
public operators, which own the gradients. Eager calls take the loops of `reference/kda.py`, compiled ones a C++ kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fla_inductor import _checks
from fla_inductor._library import LIB, NAMESPACE, TAGS
from fla_inductor.custom_ops.kda import specialize_heads
from fla_inductor.reference import kda as reference

LIB.define(
    "_kda_steps(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, Tensor init, Tensor? cu_seqlens) "
    "-> (Tensor o, Tensor final_state)",
    tags=TAGS,
)
LIB.define(
    "_kda_steps_backward(Tensor do, Tensor dht, Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, Tensor init, "
    "Tensor? cu_seqlens) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dinit)",
    tags=TAGS,
)


class Steps(NamedTuple):
    """The arguments of `_kda_steps`, all tensors float32 (or all float64) but the offsets.

    q, k [B, T, H, K], the scale multiplied into q; v [B, T, HV, V]; decay [B, T, HV, K], a factor; beta [B, T, HV, 1],
    or V in place of 1 for a beta of each column; init [N, HV, K, V]; cu_seqlens [N + 1].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor
    init: Tensor
    cu_seqlens: Tensor | None


def _check(op: str, x: Steps, **more: Tensor) -> None:
    floats = {name: t for name, t in x._asdict().items() if name != "cu_seqlens"} | more
    for name, t in floats.items():
        if t.dtype not in (torch.float32, torch.float64) or t.dtype != x.q.dtype:
            _checks.fail(op, name, "float32, or float64 as `q`", t.dtype, TypeError)
    _checks.check_same_device(op, **floats, cu_seqlens=x.cu_seqlens)
    _checks.check_shape(op, "q", x.q, (None,) * 4, "[B, T, H, K]")
    B, T, H, K = x.q.shape
    _checks.check_shape(op, "k", x.k, (B, T, H, K), "[B, T, H, K]")
    _checks.check_shape(op, "v", x.v, (B, T, None, None), "[B, T, HV, V]")
    HV, V = x.v.shape[2:]
    if HV % H != 0:
        _checks.fail(op, "v", f"HV (dim 2) a multiple of the H = {H} heads of `q`", HV)
    _checks.check_shape(op, "decay", x.decay, (B, T, HV, K), "[B, T, HV, K]")
    _checks.check_shape(op, "beta", x.beta, (B, T, HV, 1 if x.beta.shape[-1] == 1 else V), "[B, T, HV, 1 or V]")
    _checks.check_cu_seqlens(op, x.cu_seqlens, B, T)
    N = B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    _checks.check_shape(op, "init", x.init, (N, HV, K, V), "[N, HV, K, V]")


def _check_backward(do: Tensor, dht: Tensor, x: Steps) -> None:
    op = "_kda_steps_backward"
    _check(op, x, do=do, dht=dht)
    _checks.check_shape(op, "do", do, x.v.shape, "[B, T, HV, V]")
    _checks.check_shape(op, "dht", dht, x.init.shape, "[N, HV, K, V]")


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    x = Steps(*args)
    _check("_kda_steps", x)
    return reference.steps(*x)


def _backward(do: Tensor, dht: Tensor, *args: Any) -> tuple[Tensor, ...]:
    x = Steps(*args)
    _check_backward(do, dht, x)
    return reference.steps_backward(do, dht, *x)


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    x = Steps(*args)
    _check("_kda_steps", x)
    specialize_heads(x)
    return x.v.new_empty(x.v.shape), x.init.new_empty(x.init.shape)


def _backward_fake(do: Tensor, dht: Tensor, *args: Any) -> tuple[Tensor, ...]:
    x = Steps(*args)
    _check_backward(do, dht, x)
    specialize_heads(x)
    per_head = x.decay.shape
    shapes = (per_head, per_head, x.v.shape, per_head, x.beta.shape, x.init.shape)
    return tuple(x.v.new_empty(shape) for shape in shapes)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Nothing is saved: the gradient belongs to the operators that call these."""


def _not_differentiable(ctx: Any, *grads: Tensor) -> NoReturn:
    raise RuntimeError("_kda_steps is not differentiable: the operator that calls it defines the gradient")


for _name, _implementation, _fake_kernel in (
    ("_kda_steps", _forward, _fake),
    ("_kda_steps_backward", _backward, _backward_fake),
):
    LIB.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake_kernel, lib=LIB)
    torch.library.register_autograd(f"{NAMESPACE}::{_name}", _not_differentiable, setup_context=_setup_context, lib=LIB)
