"""`rms_norm_gated`: RMS normalisation of x + residual, times an activated gate.

The operator is composite: it is gone before Inductor sees the graph, so norm, gate and what stands beside them fuse.
Its autograd formulas sum the gradients of `weight` and `bias` in float32, whatever their dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_inductor import _checks
from fla_inductor._library import LIB, TAGS
from fla_inductor.contract import OpContract, Sample, register
from fla_inductor.reference import rms_norm_gated as reference

_NAME = "rms_norm_gated"
_ACTIVATIONS = ("swish", "silu", "sigmoid")

LIB.define(
    f"{_NAME}(Tensor x, Tensor g, Tensor? weight, Tensor? bias, str? activation='swish', Tensor? residual=None, "
    "bool prenorm=False, bool residual_in_fp32=False, float eps=1e-06) -> (Tensor y, Tensor total)",
    tags=TAGS,
)


def _check(
    x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, activation: str | None, residual: Tensor | None
) -> None:
    _checks.check_given(_NAME, x=x, g=g)
    tensors = {"x": x, "g": g, "weight": weight, "bias": bias, "residual": residual}
    _checks.check_float(_NAME, **tensors)
    _checks.check_same_device(_NAME, **tensors)
    _checks.check_choice(_NAME, "activation", activation, _ACTIVATIONS)
    if x.dim() == 0:
        _checks.fail(_NAME, "x", "shape [..., D]", list(x.shape))
    _checks.check_shape(_NAME, "g", g, x.shape, "that of `x`")
    if residual is not None:
        _checks.check_shape(_NAME, "residual", residual, x.shape, "that of `x`")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            _checks.check_shape(_NAME, name, parameter, x.shape[-1:], "[D]")


def _rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str | None = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    _check(x, g, weight, bias, activation, residual)
    total = x.float()
    if residual is not None:
        total = total + residual.float()
    y = total * torch.rsqrt((total * total).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    y = y * (torch.sigmoid(g.float()) if activation == "sigmoid" else F.silu(g.float()))
    y = y.to(x.dtype).contiguous()
    if not prenorm:
        return y, x.new_empty(0)
    total_dtype = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x.dtype
    # an output never aliases an input: the sum is `x` itself if there is nothing to add and nothing to cast
    return y, total.to(total_dtype, copy=True, memory_format=torch.contiguous_format)


LIB.impl(_NAME, _rms_norm_gated, "CompositeImplicitAutograd")


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise x + residual by its root mean square and multiply by an activated gate, in float32.

    s = x + residual;  y = (s / sqrt(mean(s^2) + eps) * weight + bias) * act(g), with act(g) = g sigmoid(g) for "swish"
    and "silu", and sigmoid(g) for "sigmoid".

    Args:
        x: [..., D], float32, bfloat16 or float16.
        g: the shape of `x`, raw gate, any of the three dtypes.
        weight: [D], any of the three dtypes, or None.
        bias: [D], any of the three dtypes, or None.
        activation: "swish", "silu" or "sigmoid".
        residual: the shape of `x`, any of the three dtypes, or None.
        prenorm: also return s.
        residual_in_fp32: return s as float32 if there is no `residual`, whose dtype decides otherwise.
        eps: added to the mean of squares.

    Returns:
        y: shape and dtype of `x`, contiguous; with `prenorm` a pair of y and s, where s has the dtype of `residual`, or
        without one float32 or that of `x`.

    Raises:
        TypeError: a dtype that is not float32, bfloat16 or float16.
        ValueError: an unknown activation, wrong shapes, or devices that differ.

    Source: `fla.modules.fused_norm_gate.rms_norm_gated`.
    """
    y, total = torch.ops.fla_inductor.rms_norm_gated(
        x, g, weight, bias, activation, residual, prenorm, residual_in_fp32, eps
    )
    return (y, total) if prenorm else y


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    D = 24

    def inputs(*shape: int, **more: Any) -> dict[str, Any]:
        x, g = torch.randn(2, *shape, D, device=device).to(dtype)
        return {"x": x, "g": g, "weight": weight(), "bias": None, **more}

    def weight(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(D, device=device).to(dtype)

    def residual(dtype: torch.dtype) -> Tensor:
        return torch.randn(2, 9, D, device=device).to(dtype)

    tokens = {"x": 1, "g": 1}
    yield Sample("swish", inputs(2, 37), ("x", "g", "weight"), tokens)
    yield Sample("silu", inputs(2, 9, 3, bias=weight(), activation="silu"), ("x", "g", "weight", "bias"))
    yield Sample("sigmoid", inputs(2, 37, activation="sigmoid"), ("x", "g", "weight"), tokens)
    yield Sample("no_weight", inputs(2, 9, weight=None), ("x", "g"))
    yield Sample("bias_only", inputs(2, 9, weight=None, bias=weight(), eps=0.1), ("x", "g", "bias"))
    low = {"weight": weight(dtype), "bias": weight(dtype)}
    yield Sample("low_precision_weight", inputs(2, 9, **low), ("x", "g", "weight", "bias"))
    yield Sample("residual", inputs(2, 9, residual=residual(dtype)), ("x", "g", "weight", "residual"))
    wide = {"residual": residual(torch.float32), "prenorm": True}
    yield Sample("prenorm_residual", inputs(2, 9, **wide), ("x", "g", "weight", "residual"))
    yield Sample("prenorm", inputs(2, 9, prenorm=True), ("x", "g", "weight"))
    yield Sample("prenorm_float32", inputs(2, 9, prenorm=True, residual_in_fp32=True), ("x", "g", "weight"))
    permuted = {name: torch.randn(D, 2, 9, device=device).to(dtype).permute(1, 2, 0) for name in ("x", "g", "residual")}
    yield Sample("permuted", inputs(2, 9, **permuted, prenorm=True), ("x", "g", "weight", "residual"))
    fused = torch.randn(2, 9, 3 * D, device=device).to(dtype)
    yield Sample("slices", inputs(2, 9, x=fused[..., :D], g=fused[..., D:-D]), ("x", "g", "weight"))
    one = torch.randn(1, 9, D, device=device).to(dtype).expand(2, 9, D)
    yield Sample("expanded", inputs(2, 9, g=one, activation="sigmoid"), ("x", "g", "weight"))
    yield Sample("no_tokens", inputs(2, 0, prenorm=True), ("x", "g", "weight"))


CONTRACT = register(
    OpContract(
        name=_NAME,
        public=rms_norm_gated,
        reference=reference.rms_norm_gated,
        samples=_samples,
        tolerances={
            torch.float32: {"default": 1e-5},
            torch.bfloat16: {"default": 5e-3},
            torch.float16: {"default": 1e-3},
        },
        outputs=("y", "total"),
        features=frozenset({"backward", "composite"}),
        fla_name=f"fla.modules.fused_norm_gate.{_NAME}",
        hf_names=("RMSNormGated",),
        lowering="decomposition",
    )
)
