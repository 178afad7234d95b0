"""L2 normalisation as it is defined, in the precision of the input."""

from __future__ import annotations

import torch
from torch import Tensor


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension; `output_dtype` is accepted and not applied."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps)
