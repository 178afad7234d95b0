"""Short causal convolutions as they are defined, sequence by sequence, in the precision of the input."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y_t = act(sum_i weight[:, i] x_{t-W+1+i} + bias) + residual_t; x_{-j} is initial_state[..., W - j] or zero."""
    B, T, D = x.shape
    W = weight.shape[1]
    spans = [(b, 0, T) for b in range(B)]
    if cu_seqlens is not None:
        offsets = cu_seqlens.tolist()
        spans = [(0, start, end) for start, end in itertools.pairwise(offsets)]
    rows: list[list[Tensor]] = [[] for _ in range(B)]
    states = []
    for n, (b, start, end) in enumerate(spans):
        past = x.new_zeros(D, W) if initial_state is None else initial_state[n]
        history = torch.cat([past.T, x[b, start:end]])
        y = (history.unfold(0, W, 1)[1:] * weight).sum(-1)
        y = _activate(y if bias is None else y + bias, activation)
        rows[b].append(y if residual is None else y + residual[b, start:end])
        states.append(history[end - start :].T)
    sequences = [torch.cat([x.new_zeros(0, D), *parts]) for parts in rows]
    sequences = [torch.cat([y, x.new_zeros(T - len(y), D)]) for y in sequences]
    y = torch.stack(sequences) if sequences else x.clone()
    if not output_final_state:
        return y, None
    return y, torch.stack(states) if states else x.new_zeros(0, D, W)


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One token of each sequence: its output, and the cache with the oldest input dropped and `x` appended."""
    assert weight is not None
    window = torch.cat([cache[:, :, 1:], x.reshape(*cache.shape[:2], 1)], dim=-1)
    y = (window[:, :, -weight.shape[1] :] * weight).sum(-1)
    y = _activate(y if bias is None else y + bias, activation).reshape(x.shape)
    return (y if residual is None else y + residual), window


def _activate(y: Tensor, activation: str | None) -> Tensor:
    return y if activation is None else y * torch.sigmoid(y)
