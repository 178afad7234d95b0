"""RMS norm times a gate, with the parameters of FLA's FusedRMSNormGated."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fla_inductor._checks import fail
from fla_inductor.custom_ops.rms_norm_gated import rms_norm_gated


class FusedRMSNormGated(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight * act(g) over the last dimension.

    Args:
        hidden_size: size of the last dimension.
        elementwise_affine: whether there is a `weight` [hidden_size].
        eps: added to the mean square.
        activation: "swish" = "silu" (g sigmoid(g)), or "sigmoid".
        device: device of the weight.
        dtype: dtype of the weight.

    Source: fla.modules.FusedRMSNormGated.
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ("swish", "silu", "sigmoid"):
            fail("FusedRMSNormGated", "activation", '"swish", "silu" or "sigmoid"', repr(activation))
        self.hidden_size = hidden_size
        self.eps = eps
        self.activation = activation
        weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, activation={self.activation!r}"

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        """Normalise `x` and gate it by `g`, both [..., hidden_size]; the result has the dtype of `x`."""
        y = rms_norm_gated(x=x, g=g, weight=self.weight, bias=None, activation=self.activation, eps=self.eps)
        assert isinstance(y, Tensor)
        return y
