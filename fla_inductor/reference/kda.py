"""Kimi Delta Attention in plain PyTorch: the recurrence that defines it, and the chunk form with its own backward.

    S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t

Sizes: q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV, K]; beta [B, T, HV]; states [N, HV, K, V], or [N, HV, V, K] when
`state_v_first`. Value head h reads the q and k of head h // (HV / H). All gates are natural logarithms.

`recurrent` is the definition. `chunk_forward` and `chunk_backward` compute the same function with matrix products only,
for all chunks, heads and sequences at once; they have no data-dependent shape and trace with a symbolic T. The one
sequential part, the recurrence between chunks, is passed in as `scan`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# a decay of 2^-160 is zero in float32: a smaller one cannot be told from a full reset, and the bound keeps sums finite
MIN_LOG_DECAY = -160 * math.log(2)
NORM_EPS = 1e-6

Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], Tensor]


# Activations


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any input is, else float32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def l2norm_backward(dy: Tensor, x: Tensor) -> Tensor:
    r = torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)
    y = x * r
    return r * (dy - y * (y * dy).sum(-1, keepdim=True))


def _gate_parts(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x = g + dt_bias, and exp(A_log) as [HV, 1]; None stands for a unit scale."""
    HV, K = g.shape[-2:]
    x = g if dt_bias is None else g + dt_bias.to(g.dtype).reshape(HV, K)
    return x, None if A_log is None else A_log.to(g.dtype).reshape(HV, 1).exp()


def gate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """Raw gate [..., HV, K] to natural-log decay: -exp(A_log) softplus(x), or lower_bound sigmoid(exp(A_log) x)."""
    x, a = _gate_parts(g, A_log, dt_bias)
    if lower_bound is None:
        y = -F.softplus(x)
        return y if a is None else a * y
    return lower_bound * torch.sigmoid(x if a is None else a * x)


def gate_backward(
    dy: Tensor, y: Tensor, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of g, A_log [HV] and dt_bias [HV, K] from that of `y`, the decay that `gate` returned."""
    x, a = _gate_parts(g, A_log, dt_bias)
    if lower_bound is None:
        dx = -torch.sigmoid(x) * dy
        per_a = y * dy
    else:
        s = torch.sigmoid(x if a is None else a * x)
        dx = lower_bound * s * (1 - s) * dy
        per_a = x * dx if a is None else a * (x * dx)
    if a is not None:
        dx = a * dx
    tokens = tuple(range(dx.dim() - 2))
    dA = None if A_log is None else per_a.sum((*tokens, -1))
    return dx, dA, None if dt_bias is None else dx.sum(tokens)


# The definition


def _steps(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The recurrence over dim 1 of activated inputs, from `state` [B, HV, K, V]; beta is [B, T, HV, 1 or V]."""
    outputs = []
    for t in range(q.shape[1]):
        kt, qt = k[:, t, :, None, :], q[:, t, :, None, :]
        state = state * g[:, t].exp()[..., None]
        error = v[:, t, :, None, :] - kt @ state
        state = state + kt.transpose(-1, -2) * (beta[:, t, :, None, :] * error)
        outputs.append(scale * (qt @ state).squeeze(-2))
    return (torch.stack(outputs, 1) if outputs else v), state


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """KDA token by token: the definition. Differentiable by autograd in every float dtype; beta may be [B, T, HV, V].

    Reads the contents of `cu_seqlens`. Tokens after cu_seqlens[-1] belong to no sequence and are not read.
    """
    dtype = compute_dtype(q, k, v, g, beta)
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    offsets = None if cu_seqlens is None else cu_seqlens.tolist()
    N = B if offsets is None else len(offsets) - 1
    if initial_state is None:
        state = q.new_zeros((N, HV, K, V), dtype=dtype)
    else:
        state = initial_state.to(dtype)
        state = state.transpose(-1, -2) if state_v_first else state

    def run(rows: slice, S: Tensor) -> tuple[Tensor, Tensor]:
        qs, ks, vs, gs, bs = (x[:, rows].to(dtype) for x in (q, k, v, g, beta))
        if use_qk_l2norm_in_kernel:
            qs, ks = l2norm(qs), l2norm(ks)
        if use_gate_in_kernel:
            gs = gate(gs, A_log, dt_bias, lower_bound)
        if use_beta_sigmoid_in_kernel:
            bs = torch.sigmoid(bs) * (2.0 if allow_neg_eigval else 1.0)
        qs, ks = qs.repeat_interleave(HV // H, 2), ks.repeat_interleave(HV // H, 2)
        return _steps(qs, ks, vs, gs, bs if bs.dim() == 4 else bs[..., None], S, scale)

    if offsets is None:
        o, state = run(slice(0, T), state)
    else:
        pairs = [run(slice(a, b), state[n : n + 1]) for n, (a, b) in enumerate(itertools.pairwise(offsets))]
        tail = v.new_zeros((B, T - offsets[-1], HV, V), dtype=dtype)
        o = torch.cat([*(x for x, _ in pairs), tail], 1)
        state = torch.cat([s for _, s in pairs]) if pairs else state
    if state_v_first:
        state = state.transpose(-1, -2)
    return o, state.contiguous() if output_final_state else None


# Where the chunks are


class Layout(NamedTuple):
    """Maps tokens [B, T, HV, D] to chunks [P, NC, C, D] and back; rows that hold no token are zero.

    Dense: P = B * HV. Packed: P = HV, and chunk t of sequence n lives in slot cu[n] // C + n + t. No two chunks share a
    slot, so the static bound ceil(T / C) + N is enough and no table of chunks is needed. The tokens after cu[N] are one
    more sequence, whose rows are all masked.
    """

    B: int
    T: int
    HV: int
    C: int
    NC: int
    restart: Tensor
    """[NC]: row of the initial states at which the walk over chunks restarts, or -1"""
    restart_reverse: Tensor
    rows: tuple[Tensor, Tensor] | None = None
    """packed: token of each row [NC * C], and whether there is one"""
    places: tuple[Tensor, Tensor] | None = None
    """packed: row of each token [T], and whether it belongs to a sequence"""
    first: Tensor | None = None
    """packed: first slot of each sequence and of the tail, [N + 1]"""

    def real(self, x: Tensor) -> Tensor:
        """Zeros the tokens that belong to no sequence, whatever they hold."""
        if self.places is None:
            return x
        return torch.where(self.places[1].view(1, self.T, *[1] * (x.dim() - 2)), x, 0)

    def chunks(self, x: Tensor) -> Tensor:
        D = x.shape[-1]
        if self.rows is None:
            x = F.pad(x, (0, 0, 0, 0, 0, self.NC * self.C - self.T))
            x = x.view(self.B, self.NC, self.C, self.HV, D).permute(0, 3, 1, 2, 4)
            return x.reshape(self.B * self.HV, self.NC, self.C, D)
        token, real = self.rows
        x = torch.where(real[:, None, None], x[0].index_select(0, token), 0)
        return x.view(self.NC, self.C, self.HV, D).permute(2, 0, 1, 3).contiguous()

    def tokens(self, x: Tensor) -> Tensor:
        D = x.shape[-1]
        if self.places is None:
            x = x.view(self.B, self.HV, self.NC, self.C, D).permute(0, 2, 3, 1, 4)
            return x.reshape(self.B, self.NC * self.C, self.HV, D)[:, : self.T].contiguous()
        row, real = self.places
        x = x.permute(1, 2, 0, 3).reshape(self.NC * self.C, self.HV, D).index_select(0, row)
        return torch.where(real[:, None, None], x, 0)[None]

    def initial(self, state: Tensor | None, like: Tensor, K: int, V: int, v_first: bool) -> Tensor:
        """States [N, HV, K, V] as rows [P, R, K, V] that `restart` points into; the tail starts from zero."""
        packed = self.first is not None
        if state is None:
            rows = like.new_zeros((self.B * self.HV, 1, K, V))
            return rows.expand(-1, self.first.shape[0], -1, -1) if self.first is not None else rows
        state = (state.transpose(-1, -2) if v_first else state).to(like.dtype)
        if not packed:
            return state.reshape(self.B * self.HV, 1, K, V)
        return torch.cat([state.transpose(0, 1), like.new_zeros((self.HV, 1, K, V))], 1)

    def final(self, after: Tensor, reverse: bool, v_first: bool) -> Tensor:
        """[N, HV, K, V]: the state after the last chunk that a walk over each sequence visits."""
        if self.first is None:
            state = after[:, 0 if reverse else -1].view(self.B, self.HV, *after.shape[-2:])
        else:
            slots = self.first[:-1] if reverse else self.first[1:] - 1
            state = after.index_select(1, slots).transpose(0, 1)
        return (state.transpose(-1, -2) if v_first else state).contiguous()

    def before(self, after: Tensor, initial: Tensor, reverse: bool) -> Tensor:
        """What enters each chunk, from what leaves it; zero in packed slots that hold no chunk."""
        restart = self.restart_reverse if reverse else self.restart
        zero = torch.zeros_like(after[:, :1])
        shifted = torch.cat([after[:, 1:], zero] if reverse else [zero, after[:, :-1]], 1)
        fresh = restart.view(1, -1, 1, 1)
        shifted = torch.where(fresh >= 0, initial.index_select(1, restart.clamp(min=0)), shifted)
        if self.rows is None:
            return shifted
        used = self.rows[1].view(self.NC, self.C)[:, 0]
        return torch.where(used.view(1, -1, 1, 1), shifted, 0)

    def pack_states(self, S: Tensor) -> Tensor:
        """[P, NC, K, V] -> [B, NC, HV, V, K]"""
        return S.unflatten(0, (self.B, self.HV)).permute(0, 2, 1, 4, 3).contiguous()

    def unpack_states(self, states: Tensor) -> Tensor:
        return states.permute(0, 2, 1, 4, 3).reshape(self.B * self.HV, self.NC, states.shape[4], states.shape[3])


def make_layout(q: Tensor, HV: int, C: int, cu_seqlens: Tensor | None) -> Layout:
    B, T = q.shape[:2]
    NC = (T + C - 1) // C
    if cu_seqlens is None:
        slot = torch.arange(NC, device=q.device)
        return Layout(B, T, HV, C, NC, torch.where(slot == 0, 0, -1), torch.where(slot == NC - 1, 0, -1))
    N = cu_seqlens.shape[0] - 1
    NC = NC + N
    # wrong offsets give wrong numbers, never an access out of bounds
    cu = cu_seqlens.to(torch.int64).clamp(0, T)
    sequence = torch.arange(N + 1, device=q.device)
    first = cu // C + sequence
    last = torch.cat([first[1:] - 1, torch.full_like(first[:1], NC - 1)])
    slot = torch.arange(NC, device=q.device)
    owner = torch.searchsorted(first, slot, right=True) - 1
    end = torch.cat([cu[1:], torch.zeros_like(cu[:1])])
    step = (slot - first[owner])[:, None] * C + torch.arange(C, device=q.device)
    row_token = cu[owner][:, None] + step
    row_real = row_token < end[owner][:, None]
    token = torch.arange(T, device=q.device)
    home = torch.searchsorted(cu[1:].contiguous(), token, right=True)
    place = first[home] * C + token - cu[home]
    return Layout(
        B,
        T,
        HV,
        C,
        NC,
        torch.where(first[owner] == slot, owner, -1),
        torch.where(last[owner] == slot, owner, -1),
        (row_token.clamp(0, T - 1).view(-1), row_real.view(-1)),
        (place, token < cu[-1]),
        first,
    )


def loop_scan(decay: Tensor, x: Tensor, y: Tensor, z: Tensor, init: Tensor, restart: Tensor, reverse: bool) -> Tensor:
    """The recurrence between chunks: S <- decay * S - x^T (y S) + z, restarted from `init`; returns S after each chunk.

    decay [P, NC, K], x, y [P, NC, C, K], z [P, NC, K, V], init [P, R, K, V], restart [NC] -> [P, NC, K, V].
    """
    starts = restart.tolist()
    out = torch.empty_like(z)
    S = torch.zeros_like(z[:, 0]) if starts else z
    for c in reversed(range(len(starts))) if reverse else range(len(starts)):
        if starts[c] >= 0:
            S = init[:, starts[c]]
        S = torch.baddbmm(
            torch.addcmul(z[:, c], decay[:, c, :, None], S), x[:, c].transpose(1, 2), y[:, c] @ S, alpha=-1
        )
        out[:, c] = S
    return out


# Decayed products inside a chunk


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """First and second block of each pair: [..., 2n, h, D] -> two [..., n, h, D]."""
    return x.unflatten(-3, (-1, 2)).unbind(-3)


def _merge(first: Tensor, second: Tensor) -> Tensor:
    """Undoes `_split`."""
    return torch.stack([first, second], -3).flatten(-4, -3)


def _halves(x: Tensor, h: int) -> tuple[Tensor, Tensor]:
    """Rows of the first and second halves of each block of 2 h rows: [..., C, D] -> two [..., C / 2h, h, D]."""
    return x.unflatten(-2, (-1, 2, h)).unbind(-3)


def _join(first: Tensor, corner: Tensor, second: Tensor) -> Tensor:
    """[[first, 0], [corner, second]]"""
    return torch.cat([torch.cat([first, torch.zeros_like(corner)], -1), torch.cat([corner, second], -1)], -2)


class Tiles(NamedTuple):
    """Products of one chunk. With G the running sum of g inside the chunk and e(i, j) = exp(G_i - G_j):

    P_ij = sum_d q_id k_jd e_d(i, j) for j <= i;  M_ij = sum_d k_id k_jd e_d(i, j) for j < i;
    A = (I + Diag(beta) M)^-1.
    """

    P: Tensor
    M: Tensor | None
    A: Tensor
    prefix: Tensor
    """G, inclusive [..., C, K]"""
    suffix: Tensor
    """G_C - G, summed from the end so that no digits cancel"""
    total: Tensor
    factors: list[tuple[Tensor, Tensor]]
    """per level, the decay of rows and of columns"""


def make_tiles(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, keep_m: bool) -> Tiles:
    """Builds P, M, A by doubling: blocks of h rows from 1 up to the chunk.

    A pair (i, j) meets in the one level where j is in the first and i in the second half of a block of 2 h rows. There
    e(i, j) factors at the boundary between the halves into exp(sum of g from the boundary to i) and exp(sum of g after
    j up to the boundary). Both exponents are sums of decays, hence never positive, and neither sees a gate after i.
    """
    C = q.shape[-2]
    prefix, suffix, total = g[..., None, :], torch.zeros_like(g)[..., None, :], g[..., None, :]
    P = (q * k).sum(-1)[..., None, None]
    M, A = torch.zeros_like(P), torch.ones_like(P)
    factors = []
    h = 1
    while h < C:
        (pre_a, pre_b), (suf_a, suf_b), (tot_a, tot_b) = _split(prefix), _split(suffix), _split(total)
        row, col = pre_b.exp(), suf_a.exp()
        factors.append((row, col))
        (_, q_b), (k_a, k_b), (_, beta_b) = _halves(q, h), _halves(k, h), _halves(beta, h)
        block = torch.cat([q_b * row, k_b * row], -2) @ (k_a * col).transpose(-1, -2)
        p, m = block.split(h, -2)
        (P_a, P_b), (A_a, A_b) = _split(P), _split(A)
        P = _join(P_a, p, P_b)
        A = _join(A_a, -(A_b @ (beta_b * m) @ A_a), A_b)
        if keep_m:
            M_a, M_b = _split(M)
            M = _join(M_a, m, M_b)
        prefix = torch.cat([pre_a, pre_b + tot_a], -2)
        suffix = torch.cat([suf_a + tot_b, suf_b], -2)
        total = tot_a + tot_b
        h *= 2
    flat = [x.squeeze(-3) for x in (P, A, prefix, suffix)]
    total = total.squeeze(-2).squeeze(-2)
    return Tiles(flat[0], M.squeeze(-3) if keep_m else None, flat[1], flat[2], flat[3], total, factors)


def _corners(x: Tensor, h: int) -> Tensor:
    """The blocks (second half, first half) of each diagonal block of 2 h rows: [..., C, C] -> [..., C / 2h, h, h]."""
    x = x.unflatten(-1, (-1, 2, h))[..., 0, :].unflatten(-3, (-1, 2, h))[..., 1, :, :, :]
    return torch.diagonal(x, dim1=-4, dim2=-2).movedim(-1, -3)


def tiles_backward(
    dP: Tensor,
    dM: Tensor,
    q: Tensor,
    k: Tensor,
    factors: list[tuple[Tensor, Tensor]],
    dq: Tensor,
    dk: Tensor,
    dprefix: Tensor,
    dsuffix: Tensor,
    dtotal: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Adjoint of P, M and the three sums of g, from the chunk down to single rows: adds to dq and dk, and gives dg.

    An exponent's gradient is x dx of the operand that carries it. Following the sums back down instead of forming
    G's gradient keeps the digits of a fast channel's dg: nothing is added here to be subtracted there.
    """
    diagonal = torch.diagonal(dP, dim1=-2, dim2=-1)[..., None]
    dq, dk = (dq + diagonal * k)[..., None, :, :], (dk + diagonal * q)[..., None, :, :]
    dprefix, dsuffix, dtotal = dprefix[..., None, :, :], dsuffix[..., None, :, :], dtotal[..., None, None, :]
    h = q.shape[-2] // 2
    for row, col in reversed(factors):
        (_, q_b), (k_a, k_b) = _halves(q, h), _halves(k, h)
        corner = torch.cat([_corners(dP, h), _corners(dM, h)], -2)
        of_rows = corner @ (k_a * col)
        q_row, k_row = row * of_rows[..., :h, :], row * of_rows[..., h:, :]
        k_col = col * (corner.transpose(-1, -2) @ torch.cat([q_b * row, k_b * row], -2))
        (dq_a, dq_b), (dk_a, dk_b) = dq.split(h, -2), dk.split(h, -2)
        (pre_a, pre_b), (suf_a, suf_b) = dprefix.split(h, -2), dsuffix.split(h, -2)
        dtotal = _merge(dtotal + pre_b.sum(-2, keepdim=True), dtotal + suf_a.sum(-2, keepdim=True))
        dq, dk = _merge(dq_a, dq_b + q_row), _merge(dk_a + k_col, dk_b + k_row)
        dprefix = _merge(pre_a, pre_b + q_b * q_row + k_b * k_row)
        dsuffix = _merge(suf_a + k_a * k_col, suf_b)
        h //= 2
    return dq.squeeze(-2), dk.squeeze(-2), (dprefix + dtotal).squeeze(-2)


# The chunk form


class Inputs(NamedTuple):
    """Activated inputs, by token and by chunk, and the recurrent state that enters each sequence."""

    layout: Layout
    raw: tuple[Tensor, Tensor, Tensor, Tensor]
    """q, k, g, beta before activation, in the dtype of the computation"""
    decay: Tensor
    """g after activation, by token"""
    rate: Tensor
    """beta after activation, by token"""
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def _expand_heads(x: Tensor, HV: int) -> Tensor:
    B, T, H, K = x.shape
    return x[:, :, :, None].expand(B, T, H, HV // H, K).reshape(B, T, HV, K)


def _reduce_heads(x: Tensor, H: int) -> Tensor:
    B, T, HV, K = x.shape
    return x if HV == H else x.view(B, T, H, HV // H, K).sum(3)


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    lower_bound: float | None,
    chunk_size: int,
) -> Inputs:
    HV = v.shape[2]
    layout = make_layout(q, HV, chunk_size, cu_seqlens)
    dtype = compute_dtype(q, k, v, g, beta)
    q, k, v, g, beta = (layout.real(x.to(dtype)) for x in (q, k, v, g, beta))
    raw = (q, k, g, beta)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    if use_gate_in_kernel:
        g = gate(g, A_log, dt_bias, lower_bound)
    g = g.clamp(min=MIN_LOG_DECAY)
    if use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(beta) * (2.0 if allow_neg_eigval else 1.0)
    by_chunk = [layout.chunks(x) for x in (_expand_heads(q, HV), _expand_heads(k, HV), v, g, beta[..., None])]
    return Inputs(layout, raw, g, beta, *by_chunk)


def _no_tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    v_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """T = 0: no output, the state passes through."""
    dtype = compute_dtype(q, k, v, g, beta)
    HV, K, V = v.shape[2], k.shape[-1], v.shape[-1]
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if state is None:
        final = v.new_zeros((sequences, HV, V, K) if v_first else (sequences, HV, K, V), dtype=dtype)
    else:
        final = state.to(dtype, copy=True, memory_format=torch.contiguous_format)
    slots = 0 if cu_seqlens is None else sequences
    return v.new_zeros(v.shape, dtype=dtype), final, v.new_zeros((q.shape[0], slots, HV, V, K), dtype=dtype)


def chunk_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    scale: float,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    scan: Scan = loop_scan,
) -> tuple[Tensor, Tensor, Tensor]:
    """(o, final_state, states [B, NC, HV, V, K] that enter each chunk), all in the dtype of the computation."""
    K, V = k.shape[-1], v.shape[-1]
    if q.shape[1] == 0:
        return _no_tokens(q, k, v, g, beta, initial_state, cu_seqlens, state_v_first)
    x = _prepare(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        cu_seqlens,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        lower_bound,
        chunk_size,
    )
    start = x.layout.initial(initial_state, x.q, K, V, state_v_first)
    tiles = make_tiles(x.q, x.k, x.g, x.beta, keep_m=False)
    decayed = tiles.prefix.exp()
    W, U = (tiles.A @ (x.beta * torch.cat([x.k * decayed, x.v], -1))).split([K, V], -1)
    k_end = x.k * tiles.suffix.exp()
    after = scan(tiles.total.exp(), k_end, W, k_end.transpose(-1, -2) @ U, start, x.layout.restart, False)
    S = x.layout.before(after, start, False)
    o = scale * ((x.q * decayed) @ S + tiles.P @ (U - W @ S))
    return x.layout.tokens(o), x.layout.final(after, False, state_v_first), x.layout.pack_states(S)


def chunk_backward(
    do: Tensor | None,
    dht: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    states: Tensor | None = None,
    *,
    scale: float,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    scan: Scan = loop_scan,
) -> dict[str, Tensor]:
    """Gradients by argument name, in the dtype of the computation; `states` of the forward are built again if None."""
    K, V = k.shape[-1], v.shape[-1]
    if q.shape[1] == 0:
        _, dh0, _ = _no_tokens(q, k, v, g, beta, dht, cu_seqlens, state_v_first)
        pairs = {"dq": q, "dk": k, "dv": v, "dg": g, "dbeta": beta, "dA_log": A_log, "ddt_bias": dt_bias}
        return {name: torch.zeros_like(x, dtype=dh0.dtype) for name, x in pairs.items() if x is not None} | {"dh0": dh0}
    x = _prepare(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        cu_seqlens,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        lower_bound,
        chunk_size,
    )
    layout = x.layout
    tiles = make_tiles(x.q, x.k, x.g, x.beta, keep_m=True)
    decayed, to_end, gamma = tiles.prefix.exp(), tiles.suffix.exp(), tiles.total.exp()
    q_hat, k_hat, k_end = x.q * decayed * scale, x.k * decayed, x.k * to_end
    W = tiles.A @ (x.beta * k_hat)
    P = scale * tiles.P

    if states is None:
        start = layout.initial(initial_state, x.q, K, V, state_v_first)
        U = tiles.A @ (x.beta * x.v)
        S = layout.before(
            scan(gamma, k_end, W, k_end.transpose(-1, -2) @ U, start, layout.restart, False), start, False
        )
    else:
        S = layout.unpack_states(states.to(x.q.dtype))
    dO = torch.zeros_like(x.v) if do is None else layout.chunks(do.to(x.q.dtype))
    end = layout.initial(dht, x.q, K, V, state_v_first)
    PdO = P.transpose(-1, -2) @ dO
    z = q_hat.transpose(-1, -2) @ dO - W.transpose(-1, -2) @ PdO
    dS = scan(gamma, W, k_end, z, end, layout.restart_reverse, True)
    dS_end = layout.before(dS, end, True)

    error = x.v - k_hat @ S
    new = tiles.A @ (x.beta * error)
    Y = tiles.A.transpose(-1, -2) @ (PdO + k_end @ dS_end)
    dv = x.beta * Y
    dP = scale * (dO @ new.transpose(-1, -2)).tril()
    dL = -(Y @ new.transpose(-1, -2)).tril(-1)
    assert tiles.M is not None
    dbeta = (Y * error).sum(-1, keepdim=True) + (dL * tiles.M).sum(-1, keepdim=True)
    dq_hat = decayed * (dO @ S.transpose(-1, -2)) * scale
    dk_hat = -decayed * (dv @ S.transpose(-1, -2))
    dk_end = to_end * (new @ dS_end.transpose(-1, -2))
    dq, dk, dg = tiles_backward(
        dP,
        x.beta * dL,
        x.q,
        x.k,
        tiles.factors,
        dq_hat,
        dk_hat + dk_end,
        x.q * dq_hat + x.k * dk_hat,
        x.k * dk_end,
        gamma * (S * dS_end).sum(-1),
    )
    grads = {"dq": dq, "dk": dk, "dv": dv, "dg": dg, "dbeta": dbeta}
    return _activations_backward(
        x,
        {name: layout.tokens(d) for name, d in grads.items()},
        A_log,
        dt_bias,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        lower_bound,
    ) | {"dh0": layout.final(dS, True, state_v_first)}


def _activations_backward(
    x: Inputs,
    grads: dict[str, Tensor],
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    lower_bound: float | None,
) -> dict[str, Tensor]:
    q, k, g, beta = x.raw
    dq, dk = (_reduce_heads(grads[name], q.shape[2]) for name in ("dq", "dk"))
    if use_qk_l2norm_in_kernel:
        dq, dk = l2norm_backward(dq, q), l2norm_backward(dk, k)
    # a decay at the floor is a full reset
    dg = torch.where(x.decay > MIN_LOG_DECAY, grads["dg"], 0)
    out = {"dq": dq, "dk": dk, "dv": grads["dv"]}
    if use_gate_in_kernel:
        dg, dA, dbias = gate_backward(dg, x.decay, g, A_log, dt_bias, lower_bound)
        out |= {name: d for name, d in (("dA_log", dA), ("ddt_bias", dbias)) if d is not None}
    dbeta = grads["dbeta"].squeeze(-1)
    if use_beta_sigmoid_in_kernel:
        s = torch.sigmoid(beta)
        dbeta = dbeta * x.rate * (1 - s)
    return out | {"dg": dg, "dbeta": dbeta}
