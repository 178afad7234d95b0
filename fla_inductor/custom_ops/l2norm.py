"""`l2norm`: division of each vector by its Euclidean norm.

The operator is composite: it is gone before Inductor sees the graph, so the norm fuses with what stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fla_inductor import _checks
from fla_inductor._library import LIB, TAGS
from fla_inductor.contract import OpContract, Sample, register
from fla_inductor.reference import l2norm as reference

_NAME = "l2norm"

LIB.define(f"{_NAME}(Tensor x, float eps=1e-06, ScalarType? output_dtype=None) -> Tensor", tags=TAGS)


def _l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    _checks.check_given(_NAME, x=x)
    _checks.check_float(_NAME, x=x)
    if x.dim() == 0:
        _checks.fail(_NAME, "x", "shape [..., D]", list(x.shape))
    dtype = x.dtype if output_dtype is None else output_dtype
    _checks.check_output_dtype(_NAME, dtype)
    wide = x.float()
    rstd = torch.rsqrt((wide * wide).sum(-1, keepdim=True) + eps)
    return (wide * rstd).to(dtype).contiguous()


LIB.impl(_NAME, _l2norm, "CompositeImplicitAutograd")


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """Divide each vector of the last dimension by its Euclidean norm.

    y = x / sqrt(sum(x^2) + eps), computed in float32.

    Args:
        x: [..., D], float32, bfloat16 or float16.
        eps: added to the sum of squares.
        output_dtype: dtype of the result; that of `x` if None.

    Returns:
        y: the shape of `x`, contiguous.

    Raises:
        TypeError: `x` or `output_dtype` is not float32, bfloat16 or float16.
        ValueError: `x` has no dimension.

    Source: `fla.modules.l2norm.l2norm`.
    """
    return torch.ops.fla_inductor.l2norm(x, eps, output_dtype)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def x(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    yield Sample("heads", {"x": x(2, 37, 3, 24)}, ("x",), {"x": 1})
    yield Sample("eps", {"x": 0.1 * x(5, 33), "eps": 0.1}, ("x",))
    yield Sample("vector", {"x": x(65)}, ("x",))
    yield Sample("output_float32", {"x": x(2, 9, 24), "output_dtype": torch.float32}, ("x",))
    yield Sample("permuted", {"x": x(24, 2, 9).permute(1, 2, 0)}, ("x",))
    yield Sample("padded_rows", {"x": x(2, 9, 32)[..., :24]}, ("x",))
    yield Sample("expanded", {"x": x(1, 9, 24).expand(3, 9, 24)}, ("x",))
    yield Sample("no_rows", {"x": x(0, 128)}, ("x",))


CONTRACT = register(
    OpContract(
        name=_NAME,
        public=l2norm,
        reference=reference.l2norm,
        samples=_samples,
        tolerances={
            torch.float32: {"default": 1e-6},
            torch.bfloat16: {"default": 5e-3},
            torch.float16: {"default": 1e-3},
        },
        outputs=("y",),
        features=frozenset({"backward", "composite"}),
        fla_name=f"fla.modules.{_NAME}.{_NAME}",
        lowering="decomposition",
    )
)
