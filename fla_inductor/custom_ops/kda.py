"""Kimi Delta Attention for training and prefill: `chunk_kda`, forward and backward as two operators.

Raw tensors and flags cross the operator boundary; gates, norms and the sigmoid of beta are computed inside, so nothing
activated is kept for the backward. CUDA tensors go to the Triton templates, all others to the chunk form in PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fla_inductor import _checks, _compat
from fla_inductor._library import LIB, NAMESPACE, TAGS
from fla_inductor.contract import OpContract, Sample, register
from fla_inductor.reference import kda as reference

MAX_HEAD_DIM = 256
CHUNK_SIZES = (32, 64)

LIB.define(
    "chunk_kda(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, "
    "Tensor? initial_state, Tensor? cu_seqlens, float scale, bool output_final_state, bool use_qk_l2norm_in_kernel, "
    "bool use_gate_in_kernel, bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, bool safe_gate, "
    "float? lower_bound, bool state_v_first, int chunk_size, bool save_states) "
    "-> (Tensor o, Tensor final_state, Tensor states)",
    tags=TAGS,
)
LIB.define(
    "chunk_kda_backward(Tensor? do, Tensor? dht, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, "
    "Tensor? dt_bias, Tensor? initial_state, Tensor? cu_seqlens, Tensor? states, float scale, "
    "bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel, bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, "
    "bool safe_gate, float? lower_bound, bool state_v_first, int chunk_size) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dA_log, Tensor ddt_bias, Tensor dh0)",
    tags=TAGS,
)


class Forward(NamedTuple):
    """The arguments of `chunk_kda` in the order of its schema."""

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
    safe_gate: bool
    lower_bound: float | None
    state_v_first: bool
    chunk_size: int
    save_states: bool


class Backward(NamedTuple):
    """The arguments of `chunk_kda_backward` in the order of its schema."""

    do: Tensor | None
    dht: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    states: Tensor | None
    scale: float
    use_qk_l2norm_in_kernel: bool
    use_gate_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    safe_gate: bool
    lower_bound: float | None
    state_v_first: bool
    chunk_size: int


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Any, ...]:
    """Kimi Delta Attention over whole sequences, computed chunk by chunk.

    For each value head, with decay exp(g_t) per key channel:

        S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T,    o_t = scale S_t^T q_t

    Value head h reads query/key head h // (HV // H). Computation is in float32 on the CPU; on CUDA gates, sums and the
    state are float32 and products take bfloat16 operands (float32 accuracy if any of q, k, v is float32). Operand
    dtypes may differ from each other; autocast does not change them.

    Args:
        q: [B, T, H, K], float32, bfloat16 or float16, as all tensors that follow; K up to 256.
        k: [B, T, H, K].
        v: [B, T, HV, V]; V up to 256, HV a multiple of H.
        g: [B, T, HV, K], natural-log decay, at most 0 (-inf resets the state); the raw gate if `use_gate_in_kernel`.
        beta: [B, T, HV], the writing strength; its logit if `use_beta_sigmoid_in_kernel`.
        scale: factor of the output; K ** -0.5 if None.
        initial_state: [N, HV, K, V]; N = B, or the number of sequences in `cu_seqlens`. Zeros if None.
        output_final_state: return the state after the last token.
        use_qk_l2norm_in_kernel: q and k are divided by sqrt(sum of squares + 1e-6) over K.
        use_gate_in_kernel: g is -exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias)).
        use_beta_sigmoid_in_kernel: beta is sigmoid(beta), doubled if `allow_neg_eigval`.
        allow_neg_eigval: beta up to 2; needs `use_beta_sigmoid_in_kernel`.
        safe_gate: `lower_bound` must then be in [-5, 0).
        lower_bound: selects the bounded gate; natural-log units a token.
        disable_recompute: keep the states between chunks for the backward instead of computing them again.
        return_intermediate_states: also return the states that enter each chunk.
        state_v_first: states are [N, HV, V, K].
        cu_seqlens: [N + 1] int32 or int64 offsets of packed sequences (B = 1), empty ones allowed; tokens after the
            last offset give zeros.
        cu_seqlens_cpu: accepted for FLA's sake; nothing here needs it.
        A_log: HV elements in any shape; None is a gate of unit scale, as zeros.
        dt_bias: HV * K elements in any shape; None is no bias.
        chunk_size: 32 or 64.

    Returns:
        o [B, T, HV, V] in q's dtype; the final state [N, HV, K, V] in float32 or None; if asked for, the states that
        enter each chunk, [B, NC, HV, K, V] in k's dtype, without gradient. NC = ceil(T / chunk_size); for packed
        sequences NC = ceil(T / chunk_size) + N, chunk t of sequence n at cu_seqlens[n] // chunk_size + n + t.

    Raises:
        ValueError: shapes, sizes or flags that do not go together.
        TypeError: a dtype other than the three, or an argument that is not a tensor.

    Source: Kimi Linear (arXiv 2510.26692); `fla.ops.kda.chunk_kda`.
    """
    check_cu_seqlens_cpu("chunk_kda", cu_seqlens, cu_seqlens_cpu)
    save_states = return_intermediate_states or (disable_recompute and torch.is_grad_enabled())
    o, final_state, states = torch.ops.fla_inductor.chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        initial_state,
        cu_seqlens,
        default_scale(q) if scale is None else scale,
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        safe_gate,
        lower_bound,
        state_v_first,
        chunk_size,
        save_states,
    )
    ht = final_state if output_final_state else None
    if not return_intermediate_states:
        return o, ht
    states = states.detach() if state_v_first else states.detach().transpose(-1, -2)
    return o, ht, states.to(k.dtype)


def default_scale(q: Tensor) -> float:
    """K ** -0.5; a `q` that is missing or has no dimensions is left to the operator's own checks."""
    return q.shape[-1] ** -0.5 if q is not None and q.dim() and q.shape[-1] else 1.0


# Checks


def check_cu_seqlens_cpu(op: str, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> None:
    """The copy on the CPU is not needed by any kernel here, so only its shape is looked at."""
    if cu_seqlens_cpu is None:
        return
    if cu_seqlens is None:
        _refuse_cu_seqlens_cpu(op, "None without `cu_seqlens`", "a tensor")
    elif cu_seqlens_cpu.shape != cu_seqlens.shape:
        expected = f"the shape of `cu_seqlens` = {list(cu_seqlens.shape)}"
        _refuse_cu_seqlens_cpu(op, expected, f"{list(cu_seqlens_cpu.shape)}")


@_compat.called_by_dynamo
def _refuse_cu_seqlens_cpu(op: str, expected: str, given: str) -> NoReturn:
    """Called, not traced: Dynamo wraps what traced Python raises."""
    _checks.fail(op, "cu_seqlens_cpu", expected, given)


def check_tensors(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
    headwise_beta: bool = False,
) -> None:
    """Dtypes, devices and shapes, for the chunk and the recurrent operator."""
    _checks.check_given(op, q=q, k=k, v=v, g=g, beta=beta)
    _checks.check_float(op, q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state)
    _checks.check_same_device(
        op,
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        A_log=A_log,
        dt_bias=dt_bias,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
    )
    _checks.check_shape(op, "q", q, (None,) * 4, "[B, T, H, K]")
    B, T, H, K = q.shape
    _checks.check_shape(op, "k", k, (B, T, H, K), "[B, T, H, K]")
    _checks.check_shape(op, "v", v, (B, T, None, None), "[B, T, HV, V]")
    HV, V = v.shape[2:]
    for name, size in (("q", K), ("v", V)):
        if not 1 <= size <= MAX_HEAD_DIM:
            _checks.fail(op, name, f"a last dimension from 1 to {MAX_HEAD_DIM}", size)
    if H < 1 or HV < 1 or HV % H != 0:
        _checks.fail(op, "v", f"HV (dim 2) a multiple of the H = {H} heads of `q`", HV)
    _checks.check_shape(op, "g", g, (B, T, HV, K), "[B, T, HV, K]")
    if headwise_beta and beta.dim() == 4:
        _checks.check_shape(op, "beta", beta, (B, T, HV, V), "[B, T, HV, V]")
    else:
        _checks.check_shape(op, "beta", beta, (B, T, HV), "[B, T, HV]")
    for name, x, size, spec in (("A_log", A_log, HV, "HV"), ("dt_bias", dt_bias, HV * K, "HV * K")):
        if x is not None and x.numel() != size:
            _checks.fail(op, name, f"{spec} = {size} elements", f"shape {list(x.shape)}")
    _checks.check_cu_seqlens(op, cu_seqlens, B, T)
    if initial_state is not None:
        N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        check_state(op, "initial_state", initial_state, N, HV, K, V, state_v_first)


def check_state(op: str, name: str, state: Tensor, N: int, HV: int, K: int, V: int, v_first: bool) -> None:
    if v_first:
        _checks.check_shape(op, name, state, (N, HV, V, K), "[N, HV, V, K]")
    else:
        _checks.check_shape(op, name, state, (N, HV, K, V), "[N, HV, K, V]")


def check_flags(
    op: str,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    lower_bound: float | None,
) -> None:
    """Combinations of flags that have no meaning, for the chunk and the recurrent operator."""
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is not None and not use_gate_in_kernel:
            _checks.fail(op, name, "None unless `use_gate_in_kernel=True`", "a tensor")
    if lower_bound is not None and not (lower_bound < 0 and math.isfinite(lower_bound)):
        _checks.fail(op, "lower_bound", "a negative number or None", lower_bound)
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        _checks.fail(op, "allow_neg_eigval", "False unless `use_beta_sigmoid_in_kernel=True`", allow_neg_eigval)


def check_chunk_kda(op: str, x: Forward | Backward) -> None:
    check_tensors(op, x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.initial_state, x.cu_seqlens, x.state_v_first)
    check_flags(
        op, x.A_log, x.dt_bias, x.use_gate_in_kernel, x.use_beta_sigmoid_in_kernel, x.allow_neg_eigval, x.lower_bound
    )
    if x.chunk_size not in CHUNK_SIZES:
        _checks.fail(op, "chunk_size", "32 or 64", x.chunk_size)
    if x.safe_gate and x.use_gate_in_kernel and (x.lower_bound is None or not -5 <= x.lower_bound < 0):
        _checks.fail(op, "lower_bound", "a number in [-5, 0) with `safe_gate=True`", x.lower_bound)


# Shapes and dtypes of results


def state_shape(x: Any) -> tuple[Any, ...]:
    N = x.q.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    (HV, V), K = x.v.shape[2:], x.q.shape[3]
    return (N, HV, V, K) if x.state_v_first else (N, HV, K, V)


def work_dtype(dtypes: Sequence[torch.dtype], K: int) -> torch.dtype:
    """The dtype of tiles and of states between chunks, for q, k, v of `dtypes`.

    A sum over fewer than 16 channels does not average the rounding of bfloat16 operands out.
    """
    return torch.float32 if torch.float32 in dtypes or K < 16 else torch.bfloat16


def states_dtype(x: Forward) -> torch.dtype:
    return work_dtype((x.q.dtype, x.k.dtype, x.v.dtype), x.q.shape[3])


def states_shape(x: Forward) -> tuple[Any, ...]:
    B, T = x.q.shape[:2]
    slots = (T + x.chunk_size - 1) // x.chunk_size + (0 if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1)
    return (B, slots, x.v.shape[2], x.v.shape[3], x.q.shape[3])


def absent(q: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """What stands for an output that was not asked for."""
    return q.new_empty((0,), dtype=dtype)


def flags(x: Any) -> dict[str, Any]:
    """The arguments that the reference takes by keyword."""
    names = (
        "scale",
        "use_qk_l2norm_in_kernel",
        "use_gate_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval",
        "lower_bound",
        "state_v_first",
        "chunk_size",
    )
    return {name: getattr(x, name) for name in names}


# Implementations


def on_gpu(q: Tensor) -> bool:
    """True if the Triton kernels compute this call; an empty one needs none."""
    return q.device.type == "cuda" and q.shape[0] * q.shape[1] > 0


def reference_forward(x: Forward, scan: reference.Scan = reference.loop_scan) -> tuple[Tensor, Tensor, Tensor]:
    """`chunk_kda` in PyTorch operators."""
    with torch.autocast(x.q.device.type, enabled=False):
        o, final_state, states = reference.chunk_forward(*x[:9], **flags(x), scan=scan)
    return (
        o.to(x.q.dtype),
        final_state if x.output_final_state else absent(x.q, torch.float32),
        states.to(states_dtype(x)) if x.save_states else absent(x.q, states_dtype(x)),
    )


def reference_backward(x: Backward, scan: reference.Scan = reference.loop_scan) -> tuple[Tensor, ...]:
    """`chunk_kda_backward` in PyTorch operators."""
    with torch.autocast(x.q.device.type, enabled=False):
        grads = reference.chunk_backward(*x[:12], **flags(x), scan=scan)
    return cast_gradients(x, grads)


def cast_gradients(x: Backward, grads: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The outputs of `chunk_kda_backward` from gradients by name, in shape and dtype of what they belong to."""
    inputs = {
        "dq": x.q,
        "dk": x.k,
        "dv": x.v,
        "dg": x.g,
        "dbeta": x.beta,
        "dA_log": x.A_log,
        "ddt_bias": x.dt_bias,
        "dh0": x.initial_state,
    }
    return tuple(
        absent(x.q) if i is None else grads[name].reshape(i.shape).to(i.dtype).contiguous()
        for name, i in inputs.items()
    )


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = Forward(*args)
    check_chunk_kda("chunk_kda", x)
    if on_gpu(x.q):
        from fla_inductor.templates import kda

        return kda.forward(*x)
    return reference_forward(x)


def _backward(*args: Any) -> tuple[Tensor, ...]:
    x = Backward(*args)
    _check_backward(x)
    if on_gpu(x.q):
        from fla_inductor.templates import kda

        return kda.backward(*x)
    return reference_backward(x)


def _check_backward(x: Backward) -> None:
    op = "chunk_kda_backward"
    check_chunk_kda(op, x)
    _checks.check_float(op, do=x.do, dht=x.dht, states=x.states)
    _checks.check_same_device(op, q=x.q, do=x.do, dht=x.dht, states=x.states)
    if x.do is not None:
        _checks.check_shape(op, "do", x.do, x.v.shape, "[B, T, HV, V]")
    if x.dht is not None:
        _checks.check_shape(op, "dht", x.dht, state_shape(x), "the shape of the final state")


def specialize_heads(x: Any) -> None:
    """Head counts and widths become numbers in the graph: kernels are written for them, and no model varies them."""
    for size in (*x.q.shape[2:], *x.v.shape[2:]):
        int(size)


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = Forward(*args)
    check_chunk_kda("chunk_kda", x)
    specialize_heads(x)
    return (
        x.v.new_empty(x.v.shape, dtype=x.q.dtype),
        x.q.new_empty(state_shape(x) if x.output_final_state else (0,), dtype=torch.float32),
        x.q.new_empty(states_shape(x) if x.save_states else (0,), dtype=states_dtype(x)),
    )


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    x = Backward(*args)
    _check_backward(x)
    specialize_heads(x)
    inputs = (x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.initial_state)
    return tuple(absent(x.q) if i is None else i.new_empty(i.shape) for i in inputs)


LIB.impl("chunk_kda", _forward, "CompositeExplicitAutograd")
LIB.impl("chunk_kda_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::chunk_kda", _forward_fake, lib=LIB)
torch.library.register_fake(f"{NAMESPACE}::chunk_kda_backward", _backward_fake, lib=LIB)


# Autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x = Forward(*inputs)
    _, final_state, states = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*([states] if x.output_final_state else [final_state, states]))
    ctx.save_for_backward(*x[:9], states if x.save_states else None)
    ctx.flags = x[9:]


def _autograd(ctx: Any, do: Tensor | None, dht: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if do is None and dht is None:
        return (None,) * len(Forward._fields)
    *tensors, states = ctx.saved_tensors
    x = Forward(*tensors, *ctx.flags)
    grads = torch.ops.fla_inductor.chunk_kda_backward(
        do,
        dht,
        *tensors,
        states,
        x.scale,
        x.use_qk_l2norm_in_kernel,
        x.use_gate_in_kernel,
        x.use_beta_sigmoid_in_kernel,
        x.allow_neg_eigval,
        x.safe_gate,
        x.lower_bound,
        x.state_v_first,
        x.chunk_size,
    )
    return wanted_grads(ctx, x, grads)


def wanted_grads(ctx: Any, x: Any, grads: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """One entry per argument of the operator: its gradient if it has one and needs it."""
    by_name = dict(zip(("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"), grads, strict=True))
    return tuple(
        by_name.get(name) if needed and isinstance(getattr(x, name), Tensor) else None
        for name, needed in zip(x._fields, ctx.needs_input_grad, strict=True)
    )


def _no_double_backward(ctx: Any, *grads: Tensor | None) -> None:
    raise RuntimeError("chunk_kda_backward is once differentiable: there is no second derivative of KDA")


torch.library.register_autograd(f"{NAMESPACE}::chunk_kda", _autograd, setup_context=_setup_context, lib=LIB)
torch.library.register_autograd(f"{NAMESPACE}::chunk_kda_backward", _no_double_backward, lib=LIB)


# Contract

# A_log has a handful of elements here, each a sum of terms that cancel: benchmarks/kda.py holds it to 8e-3 at full size
_TOLERANCES = {
    torch.float32: {"default": 1e-4, "o": 1e-5, "final_state": 1e-5},
    torch.bfloat16: {"o": 5e-3, "final_state": 5e-3, "g": 1.5e-2, "beta": 1.5e-2, "A_log": 2e-2, "default": 8e-3},
}
_TOLERANCES[torch.float16] = _TOLERANCES[torch.bfloat16]


def make_sample(
    device: torch.device,
    dtype: torch.dtype,
    name: str,
    *,
    B: int = 1,
    T: int = 65,
    H: int = 2,
    HV: int = 2,
    K: int = 24,
    V: int = 40,
    state: bool = True,
    A_log: bool = True,
    dt_bias: bool = True,
    cu: tuple[int, ...] | None = None,
    permuted: bool = False,
    headwise: bool = False,
    **flags: Any,
) -> Sample:
    """Random arguments of a call; gate, norm and sigmoid in the kernel unless `flags` say otherwise."""
    generator = torch.Generator().manual_seed(T * 1009 + HV * 97 + K * 13 + V)
    flags = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "output_final_state": True,
        **flags,
    }

    def new(*size: int) -> Tensor:
        if not permuted:
            return torch.randn(*size, generator=generator)
        order = [1, 0, *range(2, len(size))]
        return torch.randn([size[i] for i in order], generator=generator).permute(order)

    q, k, v, g = new(B, T, H, K), new(B, T, H, K), new(B, T, HV, V), new(B, T, HV, K)
    beta = new(B, T, HV, V) if headwise else new(B, T, HV)
    if not flags["use_qk_l2norm_in_kernel"]:
        q, k = torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1)
    if not flags["use_gate_in_kernel"]:
        g = torch.nn.functional.logsigmoid(g)
    if not flags["use_beta_sigmoid_in_kernel"]:
        beta = beta.sigmoid()
    kwargs: dict[str, Any] = {
        n: x.to(device, dtype) for n, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta))
    }
    if A_log and flags["use_gate_in_kernel"]:
        kwargs["A_log"] = torch.randn(HV, generator=generator).to(device)
    if dt_bias and flags["use_gate_in_kernel"]:
        kwargs["dt_bias"] = torch.randn(HV * K, generator=generator).to(device)
    if state:
        N = B if cu is None else len(cu) - 1
        sizes = (N, HV, V, K) if flags.get("state_v_first") else (N, HV, K, V)
        kwargs["initial_state"] = torch.randn(sizes, generator=generator).to(device)
    grad = tuple(kwargs)
    if cu is not None:
        kwargs["cu_seqlens"] = torch.tensor(cu, dtype=torch.int32, device=device)
    dynamic = dict.fromkeys(("q", "k", "v", "g", "beta"), 1) if cu is None else {}
    return Sample(name, {**kwargs, **flags}, grad, dynamic)


# sample id -> what sets it apart
SAMPLES: dict[str, dict[str, Any]] = {
    "gva": {"B": 2, "HV": 6},
    "one_token": {"T": 1, "K": 16, "V": 16},
    "long": {"T": 130, "B": 2, "HV": 4, "state": False},
    "bounded": {"lower_bound": -5.0, "safe_gate": True, "state_v_first": True},
    "bounded_no_A_log": {"lower_bound": -3.0, "A_log": False},
    "no_A_log": {"A_log": False, "allow_neg_eigval": True},
    "no_bias": {"dt_bias": False, "scale": 0.3},
    "outside": {"use_qk_l2norm_in_kernel": False, "use_gate_in_kernel": False, "use_beta_sigmoid_in_kernel": False},
    "packed": {"T": 100, "cu": (0, 0, 5, 5, 70, 90), "HV": 4},
    "permuted": {"T": 70, "B": 3, "permuted": True},
    "chunk_32": {"chunk_size": 32, "T": 70, "disable_recompute": True},
}


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for name, options in SAMPLES.items():
        yield make_sample(device, dtype, name, **options)


def _reference(**kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """The token-by-token definition; what only concerns chunks means nothing to it."""
    ignored = ("chunk_size", "safe_gate", "disable_recompute")
    return reference.recurrent(**{name: x for name, x in kwargs.items() if name not in ignored})


def flops(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> int:
    """Multiply-adds, times two, of the chunk form's forward at the chunk size of 64."""
    B, T, HV, V = v.shape
    K, C = q.shape[3], 64
    return 2 * B * T * HV * (2 * C * K + C * C + C * (K + 2 * V) + 3 * K * V)


CONTRACT = register(
    OpContract(
        name="chunk_kda",
        public=chunk_kda,
        reference=_reference,
        samples=_samples,
        tolerances=_TOLERANCES,
        outputs=("o", "final_state"),
        features=frozenset({"backward", "varlen", "state", "gva", "cuda_graph", "aoti"}),
        flops=flops,
        fla_name="fla.ops.kda.chunk_kda",
        hf_names=("chunk_kimi_delta_attention",),
        templates=("kda_prepare", "kda_scan", "kda_scan_backward", "kda_grad_intra", "kda_grad_input"),
        lowering="lowerings/kda.py",
    )
)
