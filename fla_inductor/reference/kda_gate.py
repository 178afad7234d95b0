"""The gate of KDA as it is defined, in the precision of the input."""

from __future__ import annotations

import torch
from torch import Tensor


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Natural-log decay of each channel of g [..., HV, K]; `output_dtype` is accepted and not applied.

    -exp(A_log) softplus(g + dt_bias), or with a bound lower_bound sigmoid(exp(A_log) (g + dt_bias)).
    """
    heads = g.shape[-2]
    x = g if dt_bias is None else g + dt_bias.reshape(g.shape[-2:])
    scale = g.new_ones(heads, 1) if A_log is None else A_log.reshape(heads, 1).exp()
    if lower_bound is None:
        return -scale * torch.logaddexp(x, torch.zeros_like(x))
    return lower_bound * torch.sigmoid(scale * x)
