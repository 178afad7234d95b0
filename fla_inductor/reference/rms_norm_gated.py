"""Gated RMS normalisation as it is defined, in the precision of the input."""

from __future__ import annotations

import torch
from torch import Tensor


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
    """(norm(x + residual) * weight + bias) * act(g), and with `prenorm` also x + residual."""
    total = x if residual is None else x + residual
    y = total / torch.sqrt((total * total).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    y = y * torch.sigmoid(g)
    if activation in ("swish", "silu"):
        y = y * g
    return (y, total.clone()) if prenorm else y
