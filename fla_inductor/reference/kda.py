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
from typing import Any, NamedTuple

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
    dA = None if A_log is None else _sum_tokens(per_a).sum(-1)
    return dx, dA, None if dt_bias is None else _sum_tokens(dx)


def _sum_tokens(x: Tensor) -> Tensor:
    """[B, T, HV, K] to [HV, K]; as a product, since Inductor compiles a sum anew when T crosses a threshold."""
    rows = x.flatten(0, 1).flatten(1)
    return (rows.new_ones((1, rows.shape[0])) @ rows).view(x.shape[2:])


def _expand_heads(x: Tensor, HV: int) -> Tensor:
    B, T, H, K = x.shape
    return x[:, :, :, None].expand(B, T, H, HV // H, K).reshape(B, T, HV, K)


def _reduce_heads(x: Tensor, H: int) -> Tensor:
    B, T, HV, K = x.shape
    return x if HV == H else x.view(B, T, H, HV // H, K).sum(3)


def _no_tail(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Zeros the tokens that belong to no sequence, whatever they hold."""
    if cu_seqlens is None:
        return x
    real = torch.arange(x.shape[1], device=x.device) < cu_seqlens[-1]
    return torch.where(real.view(1, -1, *[1] * (x.dim() - 2)), x, 0)


class Flags(NamedTuple):
    """What happens to raw inputs."""

    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    lower_bound: float | None = None


class Inputs(NamedTuple):
    """Inputs by token in the dtype of the computation: activated, and raw for the backward."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    """natural-log decay, at least MIN_LOG_DECAY"""
    beta: Tensor
    """[B, T, HV, 1 or V]"""
    raw: dict[str, Tensor]
    A_log: Tensor | None
    dt_bias: Tensor | None
    flags: Flags


def activate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    flags: Flags,
) -> Inputs:
    dtype = compute_dtype(q, k, v, g, beta)
    raw = {n: _no_tail(x.to(dtype), cu_seqlens) for n, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta))}
    q, k, v, g, beta = raw.values()
    if flags.use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    if flags.use_gate_in_kernel:
        g = gate(g, A_log, dt_bias, flags.lower_bound)
    if flags.use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(beta) * (2.0 if flags.allow_neg_eigval else 1.0)
    beta = beta if beta.dim() == 4 else beta[..., None]
    return Inputs(q, k, v, g.clamp(min=MIN_LOG_DECAY), beta, raw, A_log, dt_bias, flags)


def activate_backward(
    x: Inputs, dq: Tensor, dk: Tensor, dv: Tensor, dg: Tensor, dbeta: Tensor, dh0: Tensor
) -> dict[str, Tensor]:
    """Gradients of the raw inputs by name; dq and dk come for each value head."""
    q, k, g, beta = (x.raw[n] for n in ("q", "k", "g", "beta"))
    dq, dk = _reduce_heads(dq, q.shape[2]), _reduce_heads(dk, q.shape[2])
    if x.flags.use_qk_l2norm_in_kernel:
        dq, dk = l2norm_backward(dq, q), l2norm_backward(dk, k)
    # a decay at the floor is a full reset
    dg = torch.where(x.g > MIN_LOG_DECAY, dg, 0)
    parameters = {}
    if x.flags.use_gate_in_kernel:
        dg, dA, dbias = gate_backward(dg, x.g, g, x.A_log, x.dt_bias, x.flags.lower_bound)
        parameters = {n: d for n, d in (("dA_log", dA), ("ddt_bias", dbias)) if d is not None}
    if x.flags.use_beta_sigmoid_in_kernel:
        s = torch.sigmoid(beta)
        dbeta = dbeta * x.beta * (1 - (s if beta.dim() == 4 else s[..., None]))
    dbeta = dbeta if beta.dim() == 4 else dbeta.squeeze(-1)
    return {"dq": dq, "dk": dk, "dv": dv, "dg": dg, "dbeta": dbeta, "dh0": dh0, **parameters}


# The definition


def _walk(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence over dim 1, from `state` [B, HV, K, V]; q and k have HV heads, q holds the scale."""
    outputs = []
    for t in range(q.shape[1]):
        kt, qt = k[:, t, :, None, :], q[:, t, :, None, :]
        state = state * decay[:, t, :, :, None]
        error = v[:, t, :, None, :] - kt @ state
        state = state + kt.transpose(-1, -2) * (beta[:, t, :, None, :] * error)
        outputs.append((qt @ state).squeeze(-2))
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
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    flags = Flags(
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound
    )
    offsets = None if cu_seqlens is None else cu_seqlens.tolist()
    N = B if offsets is None else len(offsets) - 1
    if initial_state is None:
        state = q.new_zeros((N, HV, K, V), dtype=dtype)
    else:
        state = initial_state.to(dtype)
        state = state.transpose(-1, -2) if state_v_first else state

    # activated here, so that tokens of no sequence are never read
    def run(rows: slice, S: Tensor) -> tuple[Tensor, Tensor]:
        x = activate(q[:, rows], k[:, rows], v[:, rows], g[:, rows], beta[:, rows], A_log, dt_bias, None, flags)
        return _walk(_expand_heads(scale * x.q, HV), _expand_heads(x.k, HV), x.v, x.g.exp(), x.beta, S)

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


# The recurrence as forward and backward of its own


def _parts(x: Tensor, cu_seqlens: Tensor | None) -> list[tuple[slice, slice]]:
    """(states, tokens) of what the recurrence walks at a time."""
    if cu_seqlens is None:
        return [(slice(None), slice(0, x.shape[1]))]
    return [(slice(n, n + 1), slice(a, b)) for n, (a, b) in enumerate(itertools.pairwise(cu_seqlens.tolist()))]


def steps(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, init: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(o, final state) of activated inputs: q holds the scale, decay is a factor, beta is [B, T, HV, 1 or V]."""
    HV = v.shape[2]
    o, final = v.new_zeros(v.shape), init.new_empty(init.shape)
    for n, t in _parts(v, cu_seqlens):
        of_part = (_expand_heads(q[:, t], HV), _expand_heads(k[:, t], HV), v[:, t], decay[:, t], beta[:, t])
        o[:, t], final[n] = _walk(*of_part, init[n])
    return o, final


def steps_backward(
    do: Tensor,
    dht: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    init: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q and k (for each value head), v, the logarithm of decay, beta and init."""
    HV = v.shape[2]
    q, k = _expand_heads(q, HV)[..., None], _expand_heads(k, HV)[..., None]
    v, decay, beta, do = v[..., None, :], decay[..., None], beta[..., None, :], do[..., None, :]
    dq, dk, dv, dg, dbeta = (x.new_zeros(x.shape) for x in (q, k, v, decay, beta))
    dinit = init.new_empty(init.shape)
    for n, rows in _parts(v, cu_seqlens):
        S, tokens = init[n], range(rows.start, rows.stop)
        saved = []
        for t in tokens:
            S = decay[:, t] * S
            error = v[:, t] - k[:, t].mT @ S
            saved.append((S, error))
            S = S + k[:, t] * (beta[:, t] * error)
        dS = dht[n]
        for t in reversed(tokens):
            S, error = saved.pop()
            e = beta[:, t] * error
            dS = dS + q[:, t] * do[:, t]
            de = k[:, t].mT @ dS
            dv[:, t], by_column = beta[:, t] * de, de * error
            dbeta[:, t] = by_column if beta.shape[-1] > 1 else by_column.sum(-1, keepdim=True)
            dq[:, t] = (S + k[:, t] * e) @ do[:, t].mT
            dk[:, t] = dS @ e.mT - S @ dv[:, t].mT
            dS = dS - k[:, t] * dv[:, t]
            dg[:, t] = (S * dS).sum(-1, keepdim=True)
            dS = decay[:, t] * dS
        dinit[n] = dS
    return dq.squeeze(-1), dk.squeeze(-1), dv.squeeze(-2), dg.squeeze(-1), dbeta.squeeze(-2), dinit


def token_forward(
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
    state_v_first: bool = False,
    walk: Callable[..., tuple[Tensor, Tensor]] = steps,
    **flags: Any,
) -> tuple[Tensor, Tensor]:
    """(o, final_state) of raw inputs in the dtype of the computation; `walk` is `steps`, or faster."""
    x = activate(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, Flags(**flags))
    init = _state(initial_state, x, cu_seqlens, state_v_first)
    if _no_tokens(q):
        o, final = x.v.new_zeros(x.v.shape), init.clone(memory_format=torch.contiguous_format)
    else:
        o, final = walk(scale * x.q, x.k, x.v, x.g.exp(), x.beta, init, cu_seqlens)
    return o, final.transpose(-1, -2).contiguous() if state_v_first else final


def token_backward(
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
    *,
    scale: float,
    state_v_first: bool = False,
    walk: Callable[..., tuple[Tensor, ...]] = steps_backward,
    **flags: Any,
) -> dict[str, Tensor]:
    """Gradients by argument name, in the dtype of the computation; `walk` is `steps_backward`, or faster."""
    x = activate(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, Flags(**flags))
    init, dht = (_state(S, x, cu_seqlens, state_v_first) for S in (initial_state, dht))
    if _no_tokens(q):
        dq, dk, dv, dg, dbeta, dh0 = _no_gradients(x, dht)
    else:
        do = x.v.new_zeros(x.v.shape) if do is None else do.to(x.v.dtype)
        dq, dk, dv, dg, dbeta, dh0 = walk(do, dht, scale * x.q, x.k, x.v, x.g.exp(), x.beta, init, cu_seqlens)
    dh0 = dh0.transpose(-1, -2).contiguous() if state_v_first else dh0
    return activate_backward(x, scale * dq, dk, dv, dg, dbeta, dh0)


def _no_tokens(q: Tensor) -> bool:
    return q.shape[0] == 0 or q.shape[1] == 0


def _no_gradients(x: Inputs, dht: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of a call without tokens: zeros for each value head, and that of the state, which passes through."""
    heads = x.g.shape
    dq, dk, dv, dg, dbeta = (x.v.new_zeros(s) for s in (heads, heads, x.v.shape, heads, x.beta.shape))
    return dq, dk, dv, dg, dbeta, dht.clone(memory_format=torch.contiguous_format)


def _state(state: Tensor | None, x: Inputs, cu_seqlens: Tensor | None, v_first: bool) -> Tensor:
    """[N, HV, K, V] in the dtype of the computation, zeros if not given."""
    if state is None:
        N = x.v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        return x.v.new_zeros((N, x.v.shape[2], x.k.shape[3], x.v.shape[3]))
    return (state.transpose(-1, -2) if v_first else state).to(x.v.dtype)


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

    def chunks(self, x: Tensor) -> Tensor:
        D = x.shape[-1]
        if self.rows is None:
            x = F.pad(x, (0, 0, 0, 0, 0, self.NC * self.C - self.T))
            x = x.view(self.B, self.NC, self.C, self.HV, D).permute(0, 3, 1, 2, 4)
            return x.reshape(self.B * self.HV, self.NC, self.C, D)
        token, real = self.rows
        x = torch.where(real[:, None, None], x[0].index_select(0, token), 0)
        return x.view(self.NC, self.C, self.HV, D).permute(2, 0, 1, 3).contiguous()

    def inputs(self, x: Inputs) -> tuple[Tensor, ...]:
        """q, k, v, decay and beta by chunk; a row without a token decays nothing and writes nothing."""
        heads = (_expand_heads(x.q, self.HV), _expand_heads(x.k, self.HV), x.v, x.g, x.beta)
        q, k, v, g, beta = (self.chunks(t) for t in heads)
        return q, k, v, g.exp(), beta

    def tokens(self, x: Tensor) -> Tensor:
        D = x.shape[-1]
        if self.places is None:
            x = x.view(self.B, self.HV, self.NC, self.C, D).permute(0, 2, 3, 1, 4)
            return x.reshape(self.B, self.NC * self.C, self.HV, D)[:, : self.T].contiguous()
        row, real = self.places
        x = x.permute(1, 2, 0, 3).reshape(self.NC * self.C, self.HV, D).index_select(0, row)
        return torch.where(real[:, None, None], x, 0)[None]

    def initial(self, state: Tensor) -> Tensor:
        """States [N, HV, K, V] as rows [P, R, K, V] that `restart` points into; the tail starts from zero."""
        K, V = state.shape[2:]
        if self.first is None:
            return state.reshape(self.B * self.HV, 1, K, V)
        return torch.cat([state.transpose(0, 1), state.new_zeros((self.HV, 1, K, V))], 1)

    def final(self, leaving: Tensor, reverse: bool) -> Tensor:
        """[N, HV, K, V]: the state after the last chunk that a walk over each sequence visits."""
        if self.first is None:
            return leaving[:, 0 if reverse else -1].view(self.B, self.HV, *leaving.shape[-2:]).contiguous()
        slots = self.first[:-1] if reverse else self.first[1:] - 1
        return leaving.index_select(1, slots).transpose(0, 1).contiguous()

    def entering(self, leaving: Tensor, initial: Tensor, reverse: bool) -> Tensor:
        """The state that enters each chunk, from those that leave; zero in packed slots that hold no chunk."""
        restart = self.restart_reverse if reverse else self.restart
        zero = torch.zeros_like(leaving[:, :1])
        shifted = torch.cat([leaving[:, 1:], zero] if reverse else [zero, leaving[:, :-1]], 1)
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
    """Products of one chunk. With e(i, j) the decay of rows j + 1 ... i, for each channel:

    P_ij = sum_d q_id k_jd e_d(i, j) for j <= i;  M_ij = sum_d k_id k_jd e_d(i, j) for j < i;
    A = (I + Diag(beta) M)^-1.
    """

    P: Tensor
    M: Tensor
    A: Tensor
    before: Tensor
    """decay from the start of the chunk up to each row [..., C, K]"""
    after: Tensor
    """decay from each row to the end of the chunk"""
    total: Tensor
    """decay of the whole chunk [..., K]"""
    factors: list[tuple[Tensor, Tensor]]
    """per level, the decay of rows and of columns"""


def make_tiles(q: Tensor, k: Tensor, decay: Tensor, beta: Tensor) -> Tiles:
    """Builds P, M, A by doubling: blocks of h rows from 1 up to the chunk.

    A pair (i, j) meets in the one level where j is in the first and i in the second half of a block of 2 h rows. There
    e(i, j) is the decay from the boundary between the halves to i times the decay from j to the boundary: products of
    decays, which see no gate after i. Quotients, or differences of summed gates, would lose the digits of slow rows
    after a fast one.
    """
    C = q.shape[-2]
    before, after, total = decay[..., None, :], torch.ones_like(decay)[..., None, :], decay[..., None, :]
    P = (q * k).sum(-1)[..., None, None]
    M, A = torch.zeros_like(P), torch.ones_like(P)
    factors = []
    h = 1
    while h < C:
        (before_a, row), (col, after_b), (total_a, total_b) = _split(before), _split(after), _split(total)
        factors.append((row, col))
        (_, q_b), (k_a, k_b), (_, beta_b) = _halves(q, h), _halves(k, h), _halves(beta, h)
        p, m = (torch.cat([q_b * row, k_b * row], -2) @ (k_a * col).mT).split(h, -2)
        (P_a, P_b), (M_a, M_b), (A_a, A_b) = _split(P), _split(M), _split(A)
        P, M = _join(P_a, p, P_b), _join(M_a, m, M_b)
        A = _join(A_a, -(A_b @ (beta_b * m) @ A_a), A_b)
        before = torch.cat([before_a, row * total_a], -2)
        after = torch.cat([col * total_b, after_b], -2)
        total = total_a * total_b
        h *= 2
    P, M, A, before, after, total = (x.squeeze(-3) for x in (P, M, A, before, after, total))
    return Tiles(P, M, A, before, after, total.squeeze(-2), factors)


def _corners(x: Tensor, h: int) -> Tensor:
    """The blocks (second half, first half) of each diagonal block of 2 h rows: [..., C, C] -> [..., C / 2h, h, h]."""
    x = x.unflatten(-1, (-1, 2, h))[..., 0, :].unflatten(-3, (-1, 2, h))[..., 1, :, :, :]
    return torch.diagonal(x, dim1=-4, dim2=-2).movedim(-1, -3)


def tiles_backward(
    dP: Tensor,
    dM: Tensor,
    q: Tensor,
    k: Tensor,
    tiles: Tiles,
    dq: Tensor,
    dk: Tensor,
    dbefore: Tensor,
    dafter: Tensor,
    dtotal: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Adjoint of P, M, before, after and total, from the chunk down to single rows: adds to dq and dk, and gives dg.

    Gradients of decays are those of their logarithms: x dx for an operand x that carries the decay. Following
    the products back down keeps the digits of a fast channel's dg: nothing is added here to be subtracted there.
    """
    diagonal = torch.diagonal(dP, dim1=-2, dim2=-1)[..., None]
    dq, dk = (dq + diagonal * k)[..., None, :, :], (dk + diagonal * q)[..., None, :, :]
    dbefore, dafter, dtotal = dbefore[..., None, :, :], dafter[..., None, :, :], dtotal[..., None, None, :]
    h = q.shape[-2] // 2
    for row, col in reversed(tiles.factors):
        (_, q_b), (k_a, k_b) = _halves(q, h), _halves(k, h)
        corner = torch.cat([_corners(dP, h), _corners(dM, h)], -2)
        q_row, k_row = (corner @ (k_a * col)).split(h, -2)
        q_row, k_row = row * q_row, row * k_row
        k_col = col * (corner.mT @ torch.cat([q_b * row, k_b * row], -2))
        (dq_a, dq_b), (dk_a, dk_b) = dq.split(h, -2), dk.split(h, -2)
        (before_a, before_b), (after_a, after_b) = dbefore.split(h, -2), dafter.split(h, -2)
        dtotal = _merge(dtotal + before_b.sum(-2, keepdim=True), dtotal + after_a.sum(-2, keepdim=True))
        dq, dk = _merge(dq_a, dq_b + q_row), _merge(dk_a + k_col, dk_b + k_row)
        dbefore = _merge(before_a, before_b + q_b * q_row + k_b * k_row)
        dafter = _merge(after_a + k_a * k_col, after_b)
        h //= 2
    return dq.squeeze(-2), dk.squeeze(-2), (dbefore + dtotal).squeeze(-2)


# The chunk form


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
    state_v_first: bool = False,
    chunk_size: int = 64,
    scan: Scan = loop_scan,
    **flags: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(o, final_state, states [B, NC, HV, V, K] that enter each chunk), all in the dtype of the computation."""
    x = activate(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, Flags(**flags))
    init = _state(initial_state, x, cu_seqlens, state_v_first)
    if _no_tokens(q):
        slots = -(-q.shape[1] // chunk_size) + (0 if cu_seqlens is None else cu_seqlens.shape[0] - 1)
        o, final = x.v.new_zeros(x.v.shape), init.clone(memory_format=torch.contiguous_format)
        states = x.v.new_zeros((q.shape[0], slots, v.shape[2], v.shape[3], k.shape[3]))
    else:
        layout = make_layout(q, v.shape[2], chunk_size, cu_seqlens)
        qc, kc, vc, decay, rate = layout.inputs(x)
        start = layout.initial(init)
        tiles = make_tiles(qc, kc, decay, rate)
        W, U = (tiles.A @ (rate * torch.cat([kc * tiles.before, vc], -1))).split([k.shape[3], v.shape[3]], -1)
        k_end = kc * tiles.after
        ends = scan(tiles.total, k_end, W, k_end.mT @ U, start, layout.restart, False)
        S = layout.entering(ends, start, False)
        o = layout.tokens(scale * ((qc * tiles.before) @ S + tiles.P @ (U - W @ S)))
        final, states = layout.final(ends, False), layout.pack_states(S)
    return o, final.transpose(-1, -2).contiguous() if state_v_first else final, states


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
    state_v_first: bool = False,
    chunk_size: int = 64,
    scan: Scan = loop_scan,
    **flags: Any,
) -> dict[str, Tensor]:
    """Gradients by argument name, in the dtype of the computation; `states` of the forward are built again if None."""
    x = activate(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, Flags(**flags))
    dht = _state(dht, x, cu_seqlens, state_v_first)
    if _no_tokens(q):
        dq, dk, dv, dg, dbeta, dh0 = _no_gradients(x, dht)
    else:
        init = _state(initial_state, x, cu_seqlens, state_v_first) if states is None else None
        dq, dk, dv, dg, dbeta, dh0 = _chunk_adjoint(do, dht, x, init, states, cu_seqlens, scale, chunk_size, scan)
    dh0 = dh0.transpose(-1, -2).contiguous() if state_v_first else dh0
    return activate_backward(x, dq, dk, dv, dg, dbeta, dh0)


def _chunk_adjoint(
    do: Tensor | None,
    dht: Tensor,
    x: Inputs,
    init: Tensor | None,
    states: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk_size: int,
    scan: Scan,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of activated inputs, for each value head, from the initial or the saved states."""
    layout = make_layout(x.q, x.v.shape[2], chunk_size, cu_seqlens)
    q, k, v, decay, beta = layout.inputs(x)
    tiles = make_tiles(q, k, decay, beta)
    k_hat, k_end = k * tiles.before, k * tiles.after
    W = tiles.A @ (beta * k_hat)
    if init is not None:
        start = layout.initial(init)
        z = k_end.mT @ (tiles.A @ (beta * v))
        S = layout.entering(scan(tiles.total, k_end, W, z, start, layout.restart, False), start, False)
    else:
        assert states is not None
        S = layout.unpack_states(states.to(v.dtype))
    do = torch.zeros_like(v) if do is None else scale * layout.chunks(do.to(v.dtype))
    end = layout.initial(dht)
    Pdo = tiles.P.mT @ do
    z = (q * tiles.before).mT @ do - W.mT @ Pdo
    dS_start = scan(tiles.total, W, k_end, z, end, layout.restart_reverse, True)
    dS = layout.entering(dS_start, end, True)

    error = v - k_hat @ S
    new = tiles.A @ (beta * error)
    Y = tiles.A.mT @ (Pdo + k_end @ dS)
    dv = beta * Y
    dL = -(Y @ new.mT).tril(-1)
    dbeta = (Y * error).sum(-1, keepdim=True) + (dL * tiles.M).sum(-1, keepdim=True)
    dq = tiles.before * (do @ S.mT)
    dk = -tiles.before * (dv @ S.mT)
    dk_end = tiles.after * (new @ dS.mT)
    dtotal = tiles.total * (S * dS).sum(-1)
    dq, dk, dg = tiles_backward(
        (do @ new.mT).tril(), beta * dL, q, k, tiles, dq, dk + dk_end, q * dq + k * dk, k * dk_end, dtotal
    )
    dq, dk, dv, dg, dbeta = (layout.tokens(d) for d in (dq, dk, dv, dg, dbeta))
    return dq, dk, dv, dg, dbeta, layout.final(dS_start, True)
