"""`causal_conv1d` and `causal_conv1d_update`: the short depthwise convolution over time, and its one-token form.

Both operators are composite: they are gone before Inductor sees the graph. The convolution is W shifted multiply-adds,
so it is one pointwise kernel together with what stands beside it. Its backward is written out: gradients of states are
read where autograd would scatter, so they need no atomics, and nothing but the arguments is kept for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_inductor import _checks
from fla_inductor._library import LIB, TAGS
from fla_inductor.contract import OpContract, Sample, register
from fla_inductor.reference import causal_conv1d as reference

_NAME = "causal_conv1d"
_UPDATE = "causal_conv1d_update"
_ACTIVATIONS = (None, "silu", "swish")

LIB.define(
    f"{_NAME}(Tensor x, Tensor? weight=None, Tensor? bias=None, Tensor? residual=None, Tensor? initial_state=None, "
    "bool output_final_state=False, str? activation=None, Tensor? cu_seqlens=None) -> (Tensor y, Tensor final_state)",
    tags=TAGS,
)
LIB.define(
    f"{_UPDATE}(Tensor x, Tensor(a!) cache, Tensor? residual=None, Tensor? weight=None, Tensor? bias=None, "
    "str? activation=None) -> Tensor",
    tags=TAGS,
)


class _Tokens(NamedTuple):
    """Where each token of a packed batch stands, int32 [T] each."""

    sequence: Tensor
    """number of its sequence; not to be used after the last one"""
    before: Tensor
    """tokens before it in its sequence; negative after the last sequence"""
    after: Tensor
    """tokens after it in its sequence; negative after the last sequence"""


def _tokens(offsets: Tensor, T: int) -> _Tokens:
    token = torch.arange(T, device=offsets.device, dtype=offsets.dtype)
    last = offsets.shape[0] - 1
    sequence = (torch.searchsorted(offsets, token, right=True, out_int32=True) - 1).clamp(0, last)
    start, end = _index(offsets, sequence), _index(offsets, (sequence + 1).clamp(max=last))
    before = torch.where(sequence < last, token - start, -1)
    # int32, because AOTAutograd would keep a mask made from int64 for the backward: four times smaller than what it is
    # computed from, it counts as the result of a reduction
    return _Tokens(sequence.clamp(max=last - 1), before.int(), (end - 1 - token).int())


def _bounds(offsets: Tensor | None, T: int) -> tuple[int | Tensor, int | Tensor]:
    """First token of each sequence and the one after its last: [N, 1], or for an unpacked batch 0 and T."""
    if offsets is None:
        return 0, T
    bounds = offsets.unsqueeze(1)
    return bounds.narrow(0, 0, bounds.shape[0] - 1), bounds.narrow(0, 1, bounds.shape[0] - 1)


def _index(x: Tensor, *index: Tensor | None) -> Tensor:
    """x[index], with None for a whole dimension; unlike the brackets it takes fake tensors of an absent device."""
    return torch.ops.aten.index.Tensor(x, index)


def _select(keep: Tensor, x: Tensor) -> Tensor:
    """`x` where `keep`, else zero: also where `x` is NaN, as a product with a mask would not be."""
    return torch.where(keep, x, 0.0)


def _rows(x: Tensor, token: Tensor, keep: Tensor) -> Tensor:
    """Rows of x [B, T, D] at `token`, [R] in each batch or [N, R] in the only one; zeros where `keep` is false."""
    if x.shape[1] == 0:
        N = x.shape[0] if token.dim() == 1 else token.shape[0]
        return x.new_zeros(N, token.shape[-1], x.shape[2])
    token = token.clamp(0, x.shape[1] - 1)
    rows = _index(x, None, token) if token.dim() == 1 else _index(x.select(0, 0), token)
    return _select(keep.unsqueeze(-1), rows)


def _slots(state: Tensor, slot: Tensor, keep: Tensor) -> Tensor:
    """Columns of state [N, D, W] at `slot`, [R] in each sequence or [N, R]; zeros where `keep` is false."""
    slot = slot.clamp(0, state.shape[2] - 1)
    if slot.dim() == 1:
        return _select(keep, _index(state, None, None, slot))
    return _select(keep.unsqueeze(1), state.gather(2, slot.unsqueeze(1).expand(-1, state.shape[1], -1)))


def _slot_of_each_token(state: Tensor, tokens: _Tokens | None, slot: Tensor, keep: Tensor) -> Tensor:
    """For each token a column of its sequence's state, [N, T, D] or packed [1, T, D]; zeros where `keep` is false."""
    if tokens is None:
        return _slots(state, slot, keep).mT
    column = _index(state.mT, tokens.sequence, slot.clamp(0, state.shape[2] - 1))
    return _select(keep.unsqueeze(1), column).unsqueeze(0)


def _taps(x: Tensor, tokens: _Tokens | None, W: int, rows_behind: int) -> list[Tensor]:
    """For each column of the weight what it multiplies, [B, T, D]: column i the input W - 1 - i tokens earlier.

    `rows_behind` are not used; see `_CausalConv1d.backward`.
    """
    padded = F.pad(x, (0, 0, W - 1, rows_behind))
    taps = [padded.narrow(1, i, x.shape[1]) for i in range(W)]
    if tokens is None:
        return taps
    return [_select((tokens.before >= W - 1 - i).unsqueeze(1), tap) for i, tap in enumerate(taps)]


def _weighted(taps: Sequence[Tensor], weight: Tensor) -> Tensor:
    """sum_i weight[:, i] taps[i], in the dtype of `weight`."""
    columns = weight.unbind(1)
    total = taps[0] * columns[0]
    for tap, column in zip(taps[1:], columns[1:], strict=True):
        total = total + tap * column
    return total


def _share_of_state(state: Tensor, weight: Tensor, tokens: _Tokens | None, T: int) -> Tensor:
    """What the initial state adds to the first W - 1 tokens of a sequence: to token r slot r + i + 1 times column i."""
    W = weight.shape[1]
    share = state.new_zeros(*state.shape[:2], W - 1, dtype=weight.dtype)
    for i, column in enumerate(weight.unbind(1)[:-1]):
        share = share + F.pad(state.narrow(2, i + 1, W - 1 - i) * column.unsqueeze(1), (0, i))
    before = torch.arange(T, device=state.device, dtype=torch.int32) if tokens is None else tokens.before
    return _slot_of_each_token(share, tokens, before, (before >= 0) & (before < W - 1))


def _preactivation(
    taps: Sequence[Tensor], weight: Tensor, bias: Tensor | None, state: Tensor | None, tokens: _Tokens | None
) -> Tensor:
    """The convolution in float32."""
    weight = weight.float()
    y = _weighted(taps, weight)
    if bias is not None:
        y = y + bias.float()
    if state is None or 0 in y.shape or 0 in state.shape or weight.shape[1] == 1:
        return y
    return y + _share_of_state(state, weight, tokens, y.shape[1])


def _final_state(x: Tensor, state: Tensor | None, offsets: Tensor | None, W: int) -> Tensor:
    """The last W inputs of each sequence [N, D, W], from the initial state where the sequence is shorter."""
    start, end = _bounds(offsets, x.shape[1])
    slot = torch.arange(W, device=x.device)
    token = slot + (end - W)
    final = _rows(x, token, token >= start).mT
    if state is not None:
        kept = slot + (end - start)
        final = final + _slots(state, kept, kept < W)
    return final


def _gradient_of_x(dpre: Tensor, dfinal: Tensor | None, weight: Tensor, tokens: _Tokens | None) -> Tensor:
    """Token t met column W - 1 - s at token t + s of its sequence, and the last W tokens are in the final state."""
    T, W = dpre.shape[1], weight.shape[1]
    # the row ahead is not used: Inductor inlines what is padded at both ends, and stores what is padded behind only
    padded = F.pad(dpre, (0, 0, 1, W - 1))
    parts = [padded.narrow(1, W - i, T) for i in range(W)]
    if tokens is not None:
        parts = [_select((tokens.after >= W - 1 - i).unsqueeze(1), part) for i, part in enumerate(parts)]
    dx = _weighted(parts, weight)
    if dfinal is None or 0 in dx.shape or 0 in dfinal.shape:
        return dx
    after = T - 1 - torch.arange(T, device=dpre.device, dtype=torch.int32) if tokens is None else tokens.after
    return dx + _slot_of_each_token(dfinal, tokens, W - 1 - after, (after >= 0) & (after < W))


def _first_rows(x: Tensor, offsets: Tensor | None, W: int) -> Tensor:
    """The rows that see the initial state, [N, W - 1, D]; zeros where a sequence is shorter."""
    start, end = _bounds(offsets, x.shape[1])
    token = torch.arange(W - 1, device=x.device) + start
    return _rows(x, token, token < end)


def _gradient_of_weight(taps: Sequence[Tensor], dpre: Tensor, first: Tensor | None, state: Tensor | None) -> Tensor:
    """Column i met the inputs and, at token r of each sequence, slot r + i + 1 of the initial state."""
    columns = [(dpre * tap).sum((0, 1)) for tap in taps]
    if state is not None and first is not None:
        W = len(taps)
        for i in range(W - 1):
            seen = state.mT.narrow(1, i + 1, W - 1 - i)
            columns[i] = columns[i] + (first.narrow(1, 0, W - 1 - i) * seen).sum((0, 1))
    return torch.stack(columns, dim=1)


def _gradient_of_state(first: Tensor, dfinal: Tensor | None, weight: Tensor, offsets: Tensor | None, T: int) -> Tensor:
    """Slot r + i + 1 met column i at token r; a sequence shorter than W passes slots on to the final state."""
    W = weight.shape[1]
    dstate = first.new_zeros(first.shape[0], W, first.shape[2])
    for i, column in enumerate(weight.unbind(1)[:-1]):
        dstate = dstate + F.pad(first.narrow(1, 0, W - 1 - i) * column, (0, 0, i + 1, 0))
    dstate = dstate.mT
    if dfinal is not None:
        start, end = _bounds(offsets, T)
        slot = torch.arange(W, device=first.device) - (end - start)
        dstate = dstate + _slots(dfinal, slot, slot >= 0)
    return dstate


class _CausalConv1d(torch.autograd.Function):
    """Forward and backward in float32; the dispatcher sees aten operators only."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        initial_state: Tensor | None,
        offsets: Tensor | None,
        output_final_state: bool,
        activation: str | None,
    ) -> tuple[Tensor, Tensor]:
        W = weight.shape[1]
        tokens = None if offsets is None else _tokens(offsets, x.shape[1])
        y = _preactivation(_taps(x, tokens, W, rows_behind=0), weight, bias, initial_state, tokens)
        if activation is not None:
            y = F.silu(y)
        if residual is not None:
            y = y + residual.float()
        if tokens is not None:
            y = _select((tokens.before >= 0).unsqueeze(1), y)
        y = y.to(x.dtype).contiguous()
        if not output_final_state:
            return y, x.new_empty(0)
        final_state = _final_state(x, initial_state, offsets, W).to(x.dtype)
        return y, final_state.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, bias, residual, initial_state, offsets, output_final_state, activation = inputs
        ctx.save_for_backward(x, weight, bias, initial_state, offsets)
        ctx.activation = activation
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        if not output_final_state:
            ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, initial_state, offsets = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_residual, needs_state = ctx.needs_input_grad[:5]
        T, W = x.shape[1], weight.shape[1]
        tokens = None if offsets is None else _tokens(offsets, T)
        dy = x.new_zeros(x.shape, dtype=torch.float32) if dy is None else dy.float()
        if tokens is not None:
            dy = _select((tokens.before >= 0).unsqueeze(1), dy)
        # AOTAutograd merges equal nodes of forward and backward, and then keeps the padded input, which it does not
        # recompute: with one more row the nodes differ, and `x` itself is what is kept
        taps = _taps(x, tokens, W, rows_behind=1)
        dpre = dy
        if ctx.activation is not None:
            pre = _preactivation(taps, weight, bias, initial_state, tokens)
            s = torch.sigmoid(pre)
            dpre = dy * s * (1 + pre * (1 - s))
        first = None if initial_state is None else _first_rows(dpre, offsets, W)

        dx = dweight = dbias = dresidual = dstate = None
        if needs_x:
            dx = _gradient_of_x(dpre, dfinal, weight.float(), tokens).to(x.dtype)
        if needs_weight:
            dweight = _gradient_of_weight(taps, dpre, first, initial_state).to(weight.dtype)
        if needs_bias:
            dbias = dpre.sum((0, 1)).to(bias.dtype)
        if needs_residual:
            dresidual = dy.to(ctx.residual_dtype)
        if needs_state and first is not None:
            dstate = _gradient_of_state(first, dfinal, weight.float(), offsets, T).to(initial_state.dtype)
        return dx, dweight, dbias, dresidual, dstate, None, None, None


def _check_parameters(op: str, weight: Tensor | None, bias: Tensor | None, D: int, activation: str | None) -> Tensor:
    _checks.check_choice(op, "activation", activation, _ACTIVATIONS)
    if weight is None:
        _checks.fail(op, "weight", "a torch.Tensor [D, W]", None)
    _checks.check_shape(op, "weight", weight, (D, None), "[D, W]")
    if weight.shape[1] == 0:
        _checks.fail(op, "weight", "shape [D, W] with W >= 1", list(weight.shape))
    if bias is not None:
        _checks.check_shape(op, "bias", bias, (D,), "[D]")
    return weight


def _causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    _checks.check_given(_NAME, x=x)
    floats = {"x": x, "weight": weight, "bias": bias, "residual": residual, "initial_state": initial_state}
    _checks.check_float(_NAME, **floats)
    _checks.check_same_device(_NAME, **floats, cu_seqlens=cu_seqlens)
    _checks.check_shape(_NAME, "x", x, (None, None, None), "[B, T, D]")
    B, T, D = x.shape
    weight = _check_parameters(_NAME, weight, bias, D, activation)
    _checks.check_cu_seqlens(_NAME, cu_seqlens, B, T)
    if residual is not None:
        _checks.check_shape(_NAME, "residual", residual, (B, T, D), "[B, T, D]")
    if initial_state is not None:
        N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        _checks.check_shape(_NAME, "initial_state", initial_state, (N, D, weight.shape[1]), "[N, D, W]")
    offsets = None if cu_seqlens is None else cu_seqlens.contiguous()
    return _CausalConv1d.apply(x, weight, bias, residual, initial_state, offsets, output_final_state, activation)


def _causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    _checks.check_given(_UPDATE, x=x, cache=cache)
    floats = {"x": x, "cache": cache, "residual": residual, "weight": weight, "bias": bias}
    _checks.check_float(_UPDATE, **floats)
    _checks.check_same_device(_UPDATE, **floats)
    shape = x.shape
    if x.dim() not in (2, 3) or (x.dim() == 3 and 1 not in (shape[0], shape[1])):
        _checks.fail(_UPDATE, "x", "shape [N, D], [N, 1, D] or [1, N, D]", list(shape))
    N, D = shape[0] if x.dim() == 2 or shape[0] != 1 else shape[1], shape[-1]
    weight = _check_parameters(_UPDATE, weight, bias, D, activation)
    W = weight.shape[1]
    _checks.check_shape(_UPDATE, "cache", cache, (N, D, None), "[N, D, W']")
    if cache.shape[2] < W:
        _checks.fail(_UPDATE, "cache", f"shape [N, D, W'] with W' >= W = {W}", list(cache.shape))
    if residual is not None:
        _checks.check_shape(_UPDATE, "residual", residual, shape, "that of `x`")

    kept = cache.narrow(2, 1, cache.shape[2] - 1)
    window = torch.cat([kept.float(), x.float().reshape(N, D, 1)], dim=2)
    y = _weighted(window.narrow(2, cache.shape[2] - W, W).unbind(2), weight.float())
    if bias is not None:
        y = y + bias.float()
    if activation is not None:
        y = F.silu(y)
    y = y.reshape(shape)
    if residual is not None:
        y = y + residual.float()
    torch.ops.aten.copy_.default(cache, window)
    return y.to(x.dtype).contiguous()


LIB.impl(_NAME, _causal_conv1d, "CompositeImplicitAutograd")
LIB.impl(_UPDATE, _causal_conv1d_update, "CompositeImplicitAutograd")


def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Convolve each channel with its own short causal filter along time, in float32.

    y_t = act(sum_i weight[:, i] x_{t - W + 1 + i} + bias) + residual_t, where the inputs before a sequence are the last
    ones of its `initial_state`, or zeros. The gradients of `weight` and `bias` are float32 sums over all tokens.

    Args:
        x: [B, T, D], float32, bfloat16 or float16; other tensors may have another of the three dtypes.
        weight: [D, W], required.
        bias: [D], or None.
        residual: [B, T, D], added after the activation, or None.
        initial_state: [N, D, W], the W inputs before each sequence, newest last (the oldest is not used), or None. N is
            B, or the number of sequences.
        output_final_state: also return the last W inputs of each sequence.
        activation: "silu", "swish" (the same) or None.
        cu_seqlens: [N + 1], int32 or int64, offsets of the sequences packed in a batch of 1. Sequences may be empty.
            Tokens after the last offset are not read; their outputs and gradients are zero.
        backend: accepted and not used, so that calls written for FLA run unchanged.
        cu_seqlens_cpu: as `backend`.
        chunk_indices: as `backend`.

    Returns:
        y: [B, T, D], dtype of `x`, contiguous.
        final_state: [N, D, W], dtype of `x`, newest input last, contiguous; None unless asked for.

    Raises:
        TypeError: a dtype that is not float32, bfloat16 or float16, or offsets that are not int32 or int64.
        ValueError: no weight, an unknown activation, wrong shapes, `cu_seqlens` with a batch size other than 1, or
            devices that differ.

    Source: `fla.modules.convolution.causal_conv1d`.
    """
    y, final_state = torch.ops.fla_inductor.causal_conv1d(
        x, weight, bias, residual, initial_state, output_final_state, activation, cu_seqlens
    )
    return y, final_state if output_final_state else None


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Feed one token of each sequence to the convolution and shift it into the cache, which changes in place.

    cache <- [cache[..., 1:], x];  y = act(sum_i weight[:, i] cache[..., W' - W + i] + bias) + residual, in float32.

    Args:
        x: [N, D], [N, 1, D] or [1, N, D], float32, bfloat16 or float16; other tensors may have another of the three.
        cache: [N, D, W'] with W' >= W, earlier inputs, newest last, such as the `final_state` of `causal_conv1d`. It is
            part of the autograd graph as any tensor that is written into, so decode under `torch.no_grad`.
        residual: the shape of `x`, added after the activation, or None.
        weight: [D, W], required.
        bias: [D], or None.
        activation: "silu", "swish" (the same) or None.

    Returns:
        y: shape and dtype of `x`, contiguous.
        cache: the argument.

    Raises:
        TypeError: a dtype that is not float32, bfloat16 or float16.
        ValueError: no weight, an unknown activation, wrong shapes, or devices that differ.

    Source: `fla.modules.convolution.causal_conv1d_update`.
    """
    return torch.ops.fla_inductor.causal_conv1d_update(x, cache, residual, weight, bias, activation), cache


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    D, W = 12, 4

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    def wide(*shape: int) -> Tensor:
        return random(*shape, dtype=torch.float32)

    def offsets(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, device=device, dtype=dtype)

    def state(N: int, dtype: torch.dtype = dtype) -> dict[str, Any]:
        return {"initial_state": random(N, D, W, dtype=dtype), "output_final_state": True}

    more = {"bias": wide(D), "activation": "silu"}
    main = ("x", "weight", "bias")
    every = (*main, "residual", "initial_state")
    yield Sample("plain", {"x": random(2, 37, D), "weight": wide(D, W)}, ("x", "weight"), {"x": 1})
    yield Sample("silu", {"x": random(2, 37, D), "weight": wide(D, W), **more}, main, {"x": 1})
    low = {"weight": random(D, W), "bias": random(D), "activation": "swish"}
    yield Sample("low_precision_weight", {"x": random(2, 9, D), **low}, main)
    for T in (1, 2, 9):
        dense = {"x": random(2, T, D), "weight": wide(D, W), "residual": random(2, T, D), **state(2), **more}
        yield Sample(f"state_T{T}", dense, every)
    yield Sample("final_state", {"x": random(2, 9, D), **low, "output_final_state": True}, main)
    yield Sample("wide_state", {"x": random(2, 9, D), **low, **state(2, torch.float32)}, (*main, "initial_state"))
    for width in (1, 2, 5):
        yield Sample(f"W{width}", {"x": random(2, 9, D), "weight": wide(D, width), **more}, main)
    packed = {"x": random(1, 30, D), "weight": wide(D, W), "residual": random(1, 30, D), **more}
    varlen = {"cu_seqlens": offsets(0, 0, 5, 5, 5, 7, 30, 30, dtype=torch.int32)}
    yield Sample("varlen", {**packed, **varlen}, every[:-1], {"x": 1, "residual": 1})
    yield Sample("varlen_state", {**packed, **varlen, **state(7)}, every, {"x": 1, "residual": 1})
    yield Sample("varlen_tail", {**packed, "cu_seqlens": offsets(0, 11, 23), **state(2)}, every)
    yield Sample("varlen_nothing", {**packed, "cu_seqlens": offsets(0), **state(0)})
    permuted = {"x": random(D, 2, 9).permute(1, 2, 0), "residual": random(2, D, 9).mT, **state(2)}
    yield Sample("permuted", {**permuted, "weight": wide(W, D).mT, **more}, every)
    yield Sample("slice", {"x": random(2, 9, 3 * D)[..., D:-D], "weight": wide(D, W), **more}, main)
    yield Sample("expanded", {"x": random(1, 1, D).expand(2, 9, D), "weight": wide(D, W), **more}, main)
    for B, T in ((2, 0), (0, 9)):
        empty = {"x": random(B, T, D), "weight": wide(D, W), "residual": random(B, T, D), **state(B), **more}
        yield Sample(f"empty_B{B}_T{T}", empty, every if B else ("x",))


def _update_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    N, D, W = 3, 12, 4

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    def call(*shape: int, **more: Any) -> dict[str, Any]:
        weight = random(D, W, dtype=torch.float32)
        return {"x": random(*shape), "cache": random(N, D, W), "weight": weight, **more}

    bias = {"bias": random(D), "activation": "silu"}
    yield Sample("rows", call(N, D))
    yield Sample("batch", call(N, 1, D, residual=random(N, 1, D), **bias))
    yield Sample("packed", call(1, N, D, residual=random(1, N, D), **bias))
    yield Sample("one_sequence", call(1, 1, D, cache=random(1, D, W), **bias))
    yield Sample("long_cache", call(N, D, cache=random(N, D, 6), **bias))
    yield Sample("wide_cache", call(N, D, cache=random(N, D, W, dtype=torch.float32), **bias))
    yield Sample("W1", call(N, D, cache=random(N, D, 1), weight=random(D, 1), **bias))
    yield Sample("W5", call(N, D, cache=random(N, D, 5), weight=random(D, 5), **bias))
    yield Sample("permuted", call(N, D, x=random(D, N).mT, cache=random(W, N, D).permute(1, 2, 0), **bias))
    yield Sample("view_of_pool", call(N, D, cache=random(5, N, D, W + 2)[3, ..., 1:-1], **bias))
    yield Sample("no_sequences", call(0, D, cache=random(0, D, W), **bias))


CONTRACT = register(
    OpContract(
        name=_NAME,
        public=causal_conv1d,
        reference=reference.causal_conv1d,
        samples=_samples,
        tolerances={
            torch.float32: {"default": 1e-5},
            torch.bfloat16: {"default": 5e-3},
            torch.float16: {"default": 1e-3},
        },
        outputs=("y", "final_state"),
        features=frozenset({"backward", "composite", "state", "varlen"}),
        fla_name=f"fla.modules.convolution.{_NAME}",
        hf_names=("causal_conv1d_fn",),
        lowering="decomposition",
    )
)

UPDATE_CONTRACT = register(
    OpContract(
        name=_UPDATE,
        public=causal_conv1d_update,
        reference=reference.causal_conv1d_update,
        samples=_update_samples,
        tolerances={
            torch.float32: {"default": 1e-5},
            torch.bfloat16: {"default": 5e-3},
            torch.float16: {"default": 1e-3},
        },
        outputs=("y", "cache"),
        features=frozenset({"composite", "mutates", "state"}),
        fla_name=f"fla.modules.convolution.{_UPDATE}",
        hf_names=(_UPDATE,),
        lowering="decomposition",
    )
)
