"""chunk_kda and fused_recurrent_kda on the CPU: numbers, gradients, states, dtypes, and what a bad call says."""

from __future__ import annotations

from typing import Any

import kda_behaviour
import kda_neighbours
import op_checks
import pytest
import torch
from torch import Tensor

import fla_inductor
from fla_inductor.contract import REGISTRY
from fla_inductor.custom_ops.kda import make_sample
from fla_inductor.reference import kda as reference

CPU = torch.device("cpu")
OPS = ("chunk_kda", "fused_recurrent_kda")
CASES = [(op, name) for op in OPS for name in op_checks.sample_ids(REGISTRY[op])]
FLAGS = kda_behaviour.FLAGS


@pytest.mark.parametrize("dtype", op_checks.DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("op", "name"), CASES, ids=["-".join(case) for case in CASES])
def test_matches_reference(op: str, name: str, dtype: torch.dtype) -> None:
    contract = REGISTRY[op]
    op_checks.assert_matches_reference(contract, op_checks.get_sample(contract, CPU, dtype, name), dtype)


@pytest.mark.parametrize(
    "options",
    [
        {"T": 100, "HV": 6},
        {"T": 64, "lower_bound": -5.0},
        {"T": 150, "cu": (0, 0, 1, 65, 65, 130), "HV": 4},
        {"T": 70, "A_log": False, "allow_neg_eigval": True, "state_v_first": True},
        {"T": 130, "use_gate_in_kernel": False, "use_qk_l2norm_in_kernel": False},
    ],
    ids=["gva", "bounded", "packed", "no_A_log", "outside"],
)
def test_chunk_form_is_the_recurrence_in_float64(options: dict[str, Any]) -> None:
    """Forward and hand-written backward against autograd of the token-by-token form."""
    sample = make_sample(CPU, torch.float32, "float64", **options)
    kwargs: dict[str, Any] = {
        n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in sample.kwargs.items()
    }
    leaves: dict[str, Any] = {n: kwargs[n].clone().requires_grad_() for n in sample.grad}
    chunk_backward: Any = reference.chunk_backward
    result: Any = reference.recurrent(**{**kwargs, **leaves})
    o, ht = result
    do, dht = torch.randn_like(o), torch.randn_like(ht)
    expected = torch.autograd.grad([o, ht], list(leaves.values()), [do, dht])
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
    tensors: list[Any] = [kwargs.get(n) for n in names]
    flags = {n: x for n, x in kwargs.items() if n not in (*names, "output_final_state")}
    flags.setdefault("scale", kwargs["q"].shape[-1] ** -0.5)
    o_chunk, ht_chunk, _ = reference.chunk_forward(*tensors, **flags)
    grads = chunk_backward(do, dht, *tensors, None, **flags)
    assert op_checks.error_ratio(o, o_chunk) < 1e-10
    assert op_checks.error_ratio(ht, ht_chunk) < 1e-10
    keys = {"initial_state": "dh0"}
    for name, grad in zip(leaves, expected, strict=True):
        ours = grads[keys.get(name, f"d{name}")]
        assert op_checks.error_ratio(grad, ours.reshape(grad.shape)) < 1e-9, name


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_no_A_log_is_unit_scale_bit_for_bit(lower_bound: float | None) -> None:
    kda_behaviour.no_A_log_is_unit_scale_bit_for_bit("cpu", lower_bound)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_no_A_log_is_unit_scale_packed_and_recurrent(op: str, lower_bound: float | None) -> None:
    x = kda_behaviour.inputs("cpu", T=60)
    cu = torch.tensor([0, 20, 20, 55])
    results = []
    for A_log in (torch.zeros(2), None):
        leaves = {n: t.detach().requires_grad_() for n, t in x.items() if n != "A_log"}
        o, ht = getattr(fla_inductor, op)(
            **leaves, A_log=A_log, cu_seqlens=cu, lower_bound=lower_bound, output_final_state=True, **FLAGS
        )
        grads = torch.autograd.grad(o.float().sum() + ht.square().sum(), list(leaves.values()))
        results.append((o, ht, *grads))
    for zeros, omitted in zip(*results, strict=True):
        assert torch.equal(zeros, omitted)


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_future_tokens_change_nothing_before_them(lower_bound: float | None, strong: bool) -> None:
    kda_behaviour.future_tokens_change_nothing_before_them("cpu", lower_bound, strong)


def test_minus_infinity_is_a_full_reset() -> None:
    kda_behaviour.minus_infinity_is_a_full_reset("cpu")


@pytest.mark.parametrize("op", OPS)
def test_garbage_after_the_last_sequence_stays_there(op: str) -> None:
    kda_behaviour.garbage_after_the_last_sequence_stays_there("cpu", op)


@pytest.mark.parametrize("value", [-50.0, -1e4, 0.0], ids=["-50", "-1e4", "0"])
def test_extreme_decays(value: float) -> None:
    """Random tokens that forget almost everything, or nothing at all: finite, and equal to the recurrence."""
    sample = make_sample(CPU, torch.float32, "extreme", T=130, use_gate_in_kernel=False, use_qk_l2norm_in_kernel=False)
    g = torch.where(torch.rand(sample.kwargs["g"].shape) < 0.1, value, sample.kwargs["g"])
    kwargs = {**sample.kwargs, "g": g}
    contract = REGISTRY["chunk_kda"]
    op_checks.assert_matches_reference(contract, type(sample)("extreme", kwargs, sample.grad), torch.float32)


@pytest.mark.parametrize(("K", "V"), [(8, 8), (16, 60), (64, 128), (128, 64), (100, 50), (32, 256)])
def test_lengths_and_head_sizes(K: int, V: int) -> None:
    kda_neighbours.every_length_and_head_size_of_users("cpu", K, V, (1, 2, 7, 8, 16, 17, 63, 64, 65, 127))


@pytest.mark.parametrize("op", OPS)
def test_pieces_of_a_sequence_carry_the_state(op: str) -> None:
    x = kda_behaviour.inputs("cpu", T=200, dtype=torch.float32)
    o, ht = fla_inductor.chunk_kda(**x, output_final_state=True, **FLAGS)
    pieces, state, start = [], None, 0
    tokens = {n: x[n] for n in ("q", "k", "v", "g", "beta")}
    for length in (1, 3, 64, 65, 67):
        piece = {n: t[:, start : start + length] for n, t in tokens.items()}
        o_piece, state = getattr(fla_inductor, op)(
            **piece, A_log=x["A_log"], dt_bias=x["dt_bias"], initial_state=state, output_final_state=True, **FLAGS
        )
        pieces.append(o_piece)
        start += length
    assert op_checks.error_ratio(o, torch.cat(pieces, 1)) < 1e-5
    assert state is not None
    assert op_checks.error_ratio(ht, state) < 1e-5


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("used", ["o", "final_state"])
def test_loss_on_one_result_only(op: str, used: str) -> None:
    contract = REGISTRY[op]
    sample = make_sample(CPU, torch.float32, "one_result", T=70)

    def gradients(fn: Any, dtype: torch.dtype) -> list[Tensor]:
        kwargs = {n: op_checks.leaf(t, n in sample.grad, dtype) for n, t in sample.kwargs.items()}
        o, ht = fn(**kwargs)
        chosen = (o if used == "o" else ht).square().sum()
        grads = torch.autograd.grad(chosen, [kwargs[n] for n in sample.grad], allow_unused=True)
        return [torch.zeros_like(kwargs[n]) if d is None else d for n, d in zip(sample.grad, grads, strict=True)]

    ours, theirs = gradients(contract.public, torch.float32), gradients(contract.reference, torch.float64)
    for name, expected, grad in zip(sample.grad, theirs, ours, strict=True):
        assert op_checks.error_ratio(expected, grad) < 1e-4, name


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"])
def test_each_input_alone_can_want_a_gradient(name: str) -> None:
    sample = make_sample(CPU, torch.float32, "alone", T=20)
    kwargs = {n: op_checks.leaf(t, n == name) for n, t in sample.kwargs.items()}
    o, _ = fla_inductor.chunk_kda(**kwargs)
    o.sum().backward()
    assert kwargs[name].grad is not None
    assert torch.isfinite(kwargs[name].grad).all()


def test_operand_dtypes_may_differ() -> None:
    x = kda_behaviour.inputs("cpu", dtype=torch.float32)
    mixed = {**x, "k": x["k"].bfloat16(), "v": x["v"].half(), "g": x["g"].bfloat16()}
    leaves = {n: t.detach().requires_grad_() for n, t in mixed.items()}
    o, _ = fla_inductor.chunk_kda(**leaves, **FLAGS)
    assert o.dtype == torch.float32
    o.sum().backward()
    for name, t in leaves.items():
        assert t.grad is not None
        assert t.grad.dtype == mixed[name].dtype, name


@pytest.mark.parametrize("dtype", op_checks.DTYPES)
def test_state_dtypes(dtype: torch.dtype) -> None:
    sample = make_sample(CPU, torch.float32, "state", T=20)
    state = sample.kwargs["initial_state"].to(dtype).requires_grad_()
    _, ht = fla_inductor.chunk_kda(**{**sample.kwargs, "initial_state": state})
    assert ht.dtype == torch.float32
    ht.sum().backward()
    assert state.grad is not None
    assert state.grad.dtype == dtype


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("B", "T"), [(1, 0), (0, 5)])
def test_nothing_to_compute(op: str, B: int, T: int) -> None:
    sample = make_sample(CPU, torch.float32, "empty", B=B, T=T)
    kwargs = {n: op_checks.leaf(t, n in sample.grad) for n, t in sample.kwargs.items()}
    o, ht = getattr(fla_inductor, op)(**kwargs)
    assert o.shape == kwargs["v"].shape
    assert torch.equal(ht, kwargs["initial_state"])
    (o.sum() + ht.sum()).backward()
    assert (kwargs["A_log"].grad == 0).all()
    assert (kwargs["initial_state"].grad == 1).all()


def test_empty_sequences_pass_their_state_through() -> None:
    sample = make_sample(CPU, torch.float32, "packed", T=70, cu=(0, 0, 5, 5, 70, 70))
    state = sample.kwargs["initial_state"].clone().requires_grad_()
    _, ht = fla_inductor.chunk_kda(**{**sample.kwargs, "initial_state": state})
    dht = torch.randn_like(ht)
    (grad,) = torch.autograd.grad(ht, state, dht)
    for n in (0, 2, 4):
        assert torch.equal(ht[n], state[n])
        assert torch.equal(grad[n], dht[n])


def test_intermediate_states_are_those_that_enter_each_chunk() -> None:
    sample = make_sample(CPU, torch.float32, "states", T=150)
    _, _, h = fla_inductor.chunk_kda(**sample.kwargs, return_intermediate_states=True)
    assert h.shape[:2] == (1, 3)
    assert op_checks.error_ratio(sample.kwargs["initial_state"], h[:, 0]) < 1e-6
    tokens = {n: sample.kwargs[n][:, :64] for n in ("q", "k", "v", "g", "beta")}
    _, ht = fla_inductor.chunk_kda(**{**sample.kwargs, **tokens})
    assert op_checks.error_ratio(ht, h[:, 1]) < 1e-5


def test_checkpointed_gradients_are_the_same_bits() -> None:
    x = kda_behaviour.inputs("cpu", T=70)
    grads = []
    for checkpointed in (False, True):
        leaves = {n: t.detach().requires_grad_() for n, t in x.items()}

        def fn(leaves: dict[str, Any] = leaves) -> Tensor:
            return fla_inductor.chunk_kda(**leaves, **FLAGS)[0]

        o = torch.utils.checkpoint.checkpoint(fn, use_reentrant=False) if checkpointed else fn()
        grads.append(torch.autograd.grad(o.float().sum(), list(leaves.values())))
    for plain, recomputed in zip(*grads, strict=True):
        assert torch.equal(plain, recomputed)


def test_second_derivative_is_an_error() -> None:
    x = {n: t.requires_grad_() for n, t in kda_behaviour.inputs("cpu", T=10, dtype=torch.float32).items()}
    o, _ = fla_inductor.chunk_kda(**x, **FLAGS)
    (dq,) = torch.autograd.grad(o.sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="once differentiable"):
        dq.sum().backward()


def _bad(**changes: Any) -> dict[str, Any]:
    return {**make_sample(CPU, torch.float32, "bad", T=6, HV=4, K=8, V=8).kwargs, **changes}


# what is wrong with a call -> the call, the exception, and the argument it names
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "k_shape": (_bad(k=torch.randn(1, 6, 2, 9)), ValueError, "k"),
    "v_tokens": (_bad(v=torch.randn(1, 7, 4, 8)), ValueError, "v"),
    "heads": (_bad(v=torch.randn(1, 6, 3, 8)), ValueError, "v"),
    "g_heads": (_bad(g=torch.randn(1, 6, 2, 8)), ValueError, "g"),
    "beta_heads": (_bad(beta=torch.randn(1, 6, 2)), ValueError, "beta"),
    "state": (_bad(initial_state=torch.randn(2, 4, 8, 8)), ValueError, "initial_state"),
    "A_log": (_bad(A_log=torch.randn(5)), ValueError, "A_log"),
    "dt_bias": (_bad(dt_bias=torch.randn(4)), ValueError, "dt_bias"),
    "packed_batch": (
        {**make_sample(CPU, torch.float32, "bad", B=2, T=6).kwargs, "cu_seqlens": torch.tensor([0, 6])},
        ValueError,
        "cu_seqlens",
    ),
    "packed_states": (_bad(cu_seqlens=torch.tensor([0, 3, 6])), ValueError, "initial_state"),
    "packed_order": (_bad(cu_seqlens=torch.tensor([0, 9])), ValueError, "cu_seqlens"),
    "wide_K": (make_sample(CPU, torch.float32, "bad", T=2, K=257).kwargs, ValueError, "q"),
    "wide_V": (make_sample(CPU, torch.float32, "bad", T=2, V=300).kwargs, ValueError, "v"),
    "integer": (_bad(q=torch.ones(1, 6, 2, 8, dtype=torch.int64)), TypeError, "q"),
    "double": (_bad(v=torch.randn(1, 6, 4, 8).double()), TypeError, "v"),
    "float_offsets": (_bad(cu_seqlens=torch.tensor([0.0, 6.0])), TypeError, "cu_seqlens"),
    "device": (_bad(beta=torch.randn(1, 6, 4, device="meta")), ValueError, "beta"),
    "bound": (_bad(safe_gate=True, lower_bound=-6.0), ValueError, "lower_bound"),
    "no_bound": (_bad(safe_gate=True), ValueError, "lower_bound"),
    "positive_bound": (_bad(lower_bound=1.0), ValueError, "lower_bound"),
    "chunk_size": (_bad(chunk_size=16), ValueError, "chunk_size"),
    "neg_eigval": (_bad(use_beta_sigmoid_in_kernel=False, allow_neg_eigval=True), ValueError, "allow_neg_eigval"),
    "A_log_without_gate": (_bad(use_gate_in_kernel=False), ValueError, "A_log"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_calls_say_what_is_wrong(what: str, fresh_compile: None) -> None:
    """Eager and compiled: the same exception, which names the argument."""
    kwargs, error, argument = BAD[what]
    with pytest.raises(error, match=f"`{argument}`") as eager:
        fla_inductor.chunk_kda(**kwargs)
    if what == "packed_order":
        return  # the contents of offsets are not known while tracing
    compiled = torch.compile(lambda kwargs: fla_inductor.chunk_kda(**kwargs), fullgraph=True, backend="eager")
    with pytest.raises(error, match=f"`{argument}`") as traced:
        compiled(kwargs)
    assert str(traced.value).startswith(str(eager.value))


def test_an_unknown_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="chunk_sise"):
        fla_inductor.chunk_kda(**_bad(chunk_sise=64))
