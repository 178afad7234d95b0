"""Kimi Delta Attention token by token, for decoding: `fused_recurrent_kda`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fla_inductor._library import LIB, NAMESPACE, TAGS
from fla_inductor.contract import OpContract, Sample, register
from fla_inductor.custom_ops import kda
from fla_inductor.reference import kda as reference

# up to here a dense call walks the tokens, so that one call and many calls of one token agree bit for bit
MAX_STEPS = 64

LIB.define(
    "fused_recurrent_kda(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, "
    "Tensor? initial_state, Tensor? cu_seqlens, float scale, bool output_final_state, bool use_qk_l2norm_in_kernel, "
    "bool use_gate_in_kernel, bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, float? lower_bound, "
    "bool state_v_first) -> (Tensor o, Tensor final_state)",
    tags=TAGS,
)


class Recurrent(NamedTuple):
    """The arguments of `fused_recurrent_kda` in the order of its schema."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    scale: float
    output_final_state: bool
    use_qk_l2norm_in_kernel: bool
    use_gate_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    lower_bound: float | None
    state_v_first: bool


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
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
    """Kimi Delta Attention one token after the other, for decoding and short sequences.

    The recurrence of `chunk_kda`, with the state in float32 throughout:

        S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T,    o_t = scale S_t^T q_t

    Differentiable, unlike FLA's: the backward is that of the chunk form, which is the same function.

    Args:
        q: [B, T, H, K], float32, bfloat16 or float16, as all tensors that follow; K up to 256.
        k: [B, T, H, K].
        v: [B, T, HV, V]; V up to 256, HV a multiple of H.
        g: [B, T, HV, K], natural-log decay, at most 0 (-inf resets the state); the raw gate if `use_gate_in_kernel`.
        beta: [B, T, HV], or [B, T, HV, V] for a strength of each column; its logit if `use_beta_sigmoid_in_kernel`.
        A_log: HV elements in any shape; None is a gate of unit scale, as zeros.
        dt_bias: HV * K elements in any shape; None is no bias.
        scale: factor of the output; K ** -0.5 if None.
        initial_state: [N, HV, K, V]; N = B, or the number of sequences in `cu_seqlens`. Zeros if None.
        output_final_state: return the state after the last token.
        use_qk_l2norm_in_kernel: q and k are divided by sqrt(sum of squares + 1e-6) over K.
        use_gate_in_kernel: g is -exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias)).
        use_beta_sigmoid_in_kernel: beta is sigmoid(beta), doubled if `allow_neg_eigval`.
        allow_neg_eigval: beta up to 2; needs `use_beta_sigmoid_in_kernel`.
        lower_bound: selects the bounded gate; natural-log units a token.
        state_v_first: states are [N, HV, V, K].
        cu_seqlens: [N + 1] int32 or int64 offsets of packed sequences (B = 1); tokens after the last offset give zeros.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final state [N, HV, K, V] in float32 or None.

    Raises:
        ValueError: shapes, sizes or flags that do not go together.
        TypeError: a dtype other than the three, or an argument that is not a tensor.

    Source: Kimi Linear (arXiv 2510.26692); `fla.ops.kda.fused_recurrent_kda`.
    """
    o, final_state = torch.ops.fla_inductor.fused_recurrent_kda(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        initial_state,
        cu_seqlens,
        kda.default_scale(q) if scale is None else scale,
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        lower_bound,
        state_v_first,
    )
    return o, final_state if output_final_state else None


def check_recurrent_kda(x: Recurrent) -> None:
    op = "fused_recurrent_kda"
    kda.check_tensors(
        op,
        x.q,
        x.k,
        x.v,
        x.g,
        x.beta,
        x.A_log,
        x.dt_bias,
        x.initial_state,
        x.cu_seqlens,
        x.state_v_first,
        headwise_beta=True,
    )
    kda.check_flags(
        op, x.A_log, x.dt_bias, x.use_gate_in_kernel, x.use_beta_sigmoid_in_kernel, x.allow_neg_eigval, x.lower_bound
    )


# A beta for each column of the state


def split_columns(x: Recurrent) -> Recurrent:
    """The same call with each of the V columns as a value head of its own, for a beta [B, T, HV, V].

    Columns of the state never meet: a beta for each column is a beta for each head once every column is a head.
    """
    B, T, HV, V = x.v.shape
    K = x.q.shape[3]

    def repeat(p: Tensor | None, width: int) -> Tensor | None:
        return None if p is None else p.reshape(HV, 1, width).expand(HV, V, width).reshape(HV * V, width)

    return x._replace(
        v=x.v.reshape(B, T, HV * V, 1),
        beta=x.beta.reshape(B, T, HV * V),
        g=x.g[:, :, :, None].expand(B, T, HV, V, K).reshape(B, T, HV * V, K),
        A_log=repeat(x.A_log, 1),
        dt_bias=repeat(x.dt_bias, K),
        initial_state=_to_columns(x.initial_state, x.state_v_first),
        state_v_first=True,
    )


def _to_columns(state: Tensor | None, v_first: bool) -> Tensor | None:
    """[N, HV, K, V] (or V-first) to [N, HV * V, 1, K]."""
    if state is None:
        return None
    state = state if v_first else state.transpose(-1, -2)
    return state.reshape(state.shape[0], state.shape[1] * state.shape[2], 1, state.shape[3])


def _from_columns(state: Tensor, HV: int, V: int, v_first: bool) -> Tensor:
    state = state.reshape(state.shape[0], HV, V, state.shape[3])
    return state if v_first else state.transpose(-1, -2).contiguous()


# Implementations


def chunk_size_for(x: Recurrent) -> int:
    """Rows of a chunk where the chunk form stands in: short when packed, where each sequence has a chunk of its own."""
    return 16 if x.cu_seqlens is not None else 64


def by_tokens(x: Recurrent) -> tuple[Tensor, Tensor]:
    """The recurrence as it is written; dense calls only."""
    with torch.autocast(x.q.device.type, enabled=False):
        o, final_state = reference.recurrent(**x._asdict())
    return _cast(x, o, final_state)


def by_chunks(x: Recurrent, scan: reference.Scan = reference.loop_scan) -> tuple[Tensor, Tensor]:
    """The same function in matrix products."""
    if x.beta.dim() == 4:
        (HV, V), whole = x.v.shape[2:], x
        o, final_state = by_chunks(split_columns(x), scan)
        return o.reshape(whole.v.shape), (
            _from_columns(final_state, HV, V, x.state_v_first) if x.output_final_state else final_state
        )
    with torch.autocast(x.q.device.type, enabled=False):
        names = (
            "scale",
            "use_qk_l2norm_in_kernel",
            "use_gate_in_kernel",
            "use_beta_sigmoid_in_kernel",
            "allow_neg_eigval",
            "lower_bound",
            "state_v_first",
        )
        o, final_state, _ = reference.chunk_forward(
            *x[:9], **{name: getattr(x, name) for name in names}, chunk_size=chunk_size_for(x), scan=scan
        )
    return _cast(x, o, final_state)


def _cast(x: Recurrent, o: Tensor, final_state: Tensor | None) -> tuple[Tensor, Tensor]:
    if not x.output_final_state or final_state is None:
        final_state = kda.absent(x.q, torch.float32)
    return o.to(x.v.dtype), final_state


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    x = Recurrent(*args)
    check_recurrent_kda(x)
    if kda.on_gpu(x.q):
        from fla_inductor.templates import kda as kernels

        return kernels.recurrent(*x)
    if x.cu_seqlens is None and 0 < x.q.shape[1] <= MAX_STEPS:
        return by_tokens(x)
    return by_chunks(x)


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    x = Recurrent(*args)
    check_recurrent_kda(x)
    kda.specialize_heads(x)
    shape = kda.state_shape(x) if x.output_final_state else (0,)
    return x.v.new_empty(x.v.shape), x.q.new_empty(shape, dtype=torch.float32)


LIB.impl("fused_recurrent_kda", _forward, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::fused_recurrent_kda", _fake, lib=LIB)


# Autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x = Recurrent(*inputs)
    ctx.set_materialize_grads(False)
    if not x.output_final_state:
        ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*x[:9])
    ctx.flags = x[9:]


def _autograd(ctx: Any, do: Tensor | None, dht: Tensor | None) -> tuple[Tensor | None, ...]:
    if do is None and dht is None:
        return (None,) * len(Recurrent._fields)
    x = Recurrent(*ctx.saved_tensors, *ctx.flags)
    return kda.wanted_grads(ctx, x, _gradients(x, do, dht))


def _gradients(x: Recurrent, do: Tensor | None, dht: Tensor | None) -> tuple[Tensor, ...]:
    """The gradients of the chunk form, which is the same function."""
    if x.beta.dim() == 4:
        return _headwise_gradients(x, do, dht)
    return torch.ops.fla_inductor.chunk_kda_backward(
        do,
        dht,
        *x[:9],
        None,
        x.scale,
        x.use_qk_l2norm_in_kernel,
        x.use_gate_in_kernel,
        x.use_beta_sigmoid_in_kernel,
        x.allow_neg_eigval,
        False,
        x.lower_bound,
        x.state_v_first,
        64,
    )


def _headwise_gradients(x: Recurrent, do: Tensor | None, dht: Tensor | None) -> tuple[Tensor, ...]:
    B, T, HV, V = x.v.shape
    K = x.q.shape[3]
    columns = split_columns(x)
    do = None if do is None else do.reshape(columns.v.shape)
    # the sum over columns is for float32 to take, whatever the dtype of the gate
    columns = columns._replace(g=columns.g.float())
    dq, dk, dv, dg, dbeta, dA, dbias, dh0 = _gradients(columns, do, _to_columns(dht, x.state_v_first))
    return (
        dq,
        dk,
        dv.view(x.v.shape),
        dg.view(B, T, HV, V, K).sum(3).to(x.g.dtype),
        dbeta.view(x.v.shape),
        dA if x.A_log is None else dA.view(HV, V).sum(1).reshape(x.A_log.shape),
        dbias if x.dt_bias is None else dbias.view(HV, V, K).sum(1).reshape(x.dt_bias.shape),
        dh0 if x.initial_state is None else _from_columns(dh0, HV, V, x.state_v_first),
    )


torch.library.register_autograd(f"{NAMESPACE}::fused_recurrent_kda", _autograd, setup_context=_setup_context, lib=LIB)


# Contract

SAMPLES: dict[str, dict[str, Any]] = {
    "step": {"T": 1, "B": 3, "HV": 6, "state_v_first": True},
    "some_steps": {"T": 7, "HV": 4, "lower_bound": -5.0},
    "no_A_log": {"T": 5, "A_log": False, "allow_neg_eigval": True, "state": False},
    "outside": {
        "T": 9,
        "use_qk_l2norm_in_kernel": False,
        "use_gate_in_kernel": False,
        "use_beta_sigmoid_in_kernel": False,
    },
    "packed": {"T": 20, "cu": (0, 0, 1, 1, 12, 18), "dt_bias": False},
    "headwise": {"T": 6, "headwise": True, "K": 16, "V": 12},
    "permuted": {"T": 70, "B": 2, "permuted": True},
}


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for name, options in SAMPLES.items():
        yield kda.make_sample(device, dtype, name, **options)


CONTRACT = register(
    OpContract(
        name="fused_recurrent_kda",
        public=fused_recurrent_kda,
        reference=reference.recurrent,
        samples=_samples,
        tolerances=kda.CONTRACT.tolerances,
        outputs=("o", "final_state"),
        features=frozenset({"backward", "varlen", "state", "gva", "cuda_graph", "aoti"}),
        fla_name="fla.ops.kda.fused_recurrent_kda",
        hf_names=("recurrent_kimi_delta_attention",),
        templates=("kda_recurrent",),
        lowering="lowerings/kda.py",
    )
)
