"""`fused_kda_gate`: from the raw gate projection of KDA to the natural-log decay of each channel.

The operator is composite: it is gone before Inductor sees the graph, so the gate fuses with what stands beside it. Its
autograd formulas sum the gradients of `A_log` and `dt_bias` in float32, whatever the dtypes of the arguments.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_inductor import _checks
from fla_inductor._library import LIB, TAGS
from fla_inductor.contract import OpContract, Sample, register
from fla_inductor.reference import kda_gate as reference

_NAME = "fused_kda_gate"

LIB.define(
    f"{_NAME}(Tensor g, Tensor? A_log=None, Tensor? dt_bias=None, float? lower_bound=None, "
    "ScalarType output_dtype=float) -> Tensor",
    tags=TAGS,
)


def _check(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, output_dtype: torch.dtype) -> None:
    _checks.check_given(_NAME, g=g)
    _checks.check_float(_NAME, g=g, A_log=A_log, dt_bias=dt_bias)
    _checks.check_same_device(_NAME, g=g, A_log=A_log, dt_bias=dt_bias)
    _checks.check_output_dtype(_NAME, output_dtype)
    if g.dim() < 2:
        _checks.fail(_NAME, "g", "shape [..., HV, K]", list(g.shape))
    heads, channels = g.shape[-2:]
    if A_log is not None and A_log.numel() != heads:
        _checks.fail(_NAME, "A_log", f"HV = {heads} elements", f"shape {list(A_log.shape)}")
    if dt_bias is not None and dt_bias.numel() != heads * channels:
        _checks.fail(_NAME, "dt_bias", f"HV * K = {heads * channels} elements", f"shape {list(dt_bias.shape)}")


def _fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    _check(g, A_log, dt_bias, output_dtype)
    heads, channels = g.shape[-2:]
    x = g.float()
    if dt_bias is not None:
        x = x + dt_bias.float().reshape(heads, channels)
    scale = None if A_log is None else A_log.float().exp().reshape(heads, 1)
    if lower_bound is not None:
        y = lower_bound * torch.sigmoid(x if scale is None else scale * x)
    else:
        # softplus selects its linear branch above 20, forward and backward, so no infinite exponential is multiplied
        softplus = F.softplus(x)
        y = -softplus if scale is None else -scale * softplus
    return y.to(output_dtype).contiguous()


LIB.impl(_NAME, _fused_kda_gate, "CompositeImplicitAutograd")


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compute the log decay of KDA from its raw gate, in float32.

    y = -exp(A_log) softplus(g + dt_bias), or with a bound y = lower_bound sigmoid(exp(A_log) (g + dt_bias)).
    Without `A_log` the scale exp(A_log) is 1, bitwise as with an `A_log` of zeros, gradients included.

    The gradients of `A_log` and `dt_bias` are float32 sums over all tokens; under `torch.compile` their order is
    Inductor's choice, so a graph with a static T and one with a dynamic T can differ by rounding.

    Args:
        g: [..., HV, K], raw gate, float32, bfloat16 or float16.
        A_log: HV elements in any shape, natural log of each head's scale, float32, bfloat16 or float16.
        dt_bias: HV * K elements in any shape, one for each channel, float32, bfloat16 or float16.
        lower_bound: the value that y stays above (a negative number), in natural-log units.
        output_dtype: dtype of the result.

    Returns:
        y: [..., HV, K], natural-log decay (at most 0), contiguous.

    Raises:
        TypeError: a dtype that is not float32, bfloat16 or float16.
        ValueError: wrong shapes or sizes, or devices that differ.

    Source: `fla.ops.kda.gate.fused_kda_gate`; unlike FLA 0.6.0, whose unbounded scale without `A_log` is e.
    """
    return torch.ops.fla_inductor.fused_kda_gate(g, A_log, dt_bias, lower_bound, output_dtype)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    heads, channels = 3, 20

    def g(*shape: int) -> Tensor:
        return 3 * torch.randn(*shape, device=device).to(dtype)

    def parameters(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        return {
            "A_log": torch.randn(heads, device=device).to(dtype),
            "dt_bias": torch.randn(heads * channels, device=device).to(dtype),
        }

    grad = ("g", "A_log", "dt_bias")
    tokens = {"g": 1}
    for bound, lower_bound in (("softplus", None), ("bounded", -5.0)):
        common = {"lower_bound": lower_bound}
        yield Sample(bound, {"g": g(2, 37, heads, channels), **parameters(), **common}, grad, tokens)
        yield Sample(f"{bound}_unit_scale", {"g": g(2, 37, heads, channels), **common}, ("g",), tokens)
        bias = {"dt_bias": parameters()["dt_bias"].view(heads, channels)}
        yield Sample(f"{bound}_bias", {"g": g(9, heads, channels), **bias, **common}, ("g", "dt_bias"))
        scale = {"A_log": parameters()["A_log"].view(1, 1, heads, 1)}
        yield Sample(f"{bound}_scale", {"g": g(1, 9, heads, channels), **scale, **common}, ("g", "A_log"))
        yield Sample(
            f"{bound}_low_precision",
            {"g": g(2, 37, heads, channels), **parameters(dtype), **common, "output_dtype": dtype},
            grad,
        )
        more = {**parameters(), **common}
        yield Sample(f"{bound}_permuted", {"g": g(heads, 2, 9, channels).permute(1, 2, 0, 3), **more}, grad)
        yield Sample(f"{bound}_sliced", {"g": g(2, 9, heads, 2 * channels)[..., ::2], **more}, grad)
        yield Sample(f"{bound}_expanded", {"g": g(1, 9, 1, channels).expand(2, 9, heads, channels), **more}, grad)
        yield Sample(f"{bound}_no_tokens", {"g": g(2, 0, heads, channels), **more}, grad)


CONTRACT = register(
    OpContract(
        name=_NAME,
        public=fused_kda_gate,
        reference=reference.fused_kda_gate,
        samples=_samples,
        tolerances={
            torch.float32: {"default": 1e-5},
            torch.bfloat16: {"default": 5e-3},
            torch.float16: {"default": 5e-3},
        },
        outputs=("y",),
        features=frozenset({"backward", "composite"}),
        fla_name=f"fla.ops.kda.gate.{_NAME}",
        lowering="decomposition",
    )
)
