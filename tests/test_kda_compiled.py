"""chunk_kda and fused_recurrent_kda under torch.compile with Inductor: what users do around and with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kda_neighbours
import op_checks
import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fla_inductor
from fla_inductor.custom_ops.kda import make_sample

pytestmark = pytest.mark.usefixtures("fresh_compile")

CPU = torch.device("cpu")
FLAGS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "output_final_state": True,
}


def inputs(B: int = 1, T: int = 70, H: int = 2, HV: int = 4, K: int = 16, V: int = 24) -> dict[str, Tensor]:
    sample = make_sample(CPU, torch.float32, "compiled", B=B, T=T, H=H, HV=HV, K=K, V=V)
    return {name: sample.kwargs[name] for name in sample.grad}


def kda(arguments: dict[str, Any]) -> Any:
    return fla_inductor.chunk_kda(**arguments, **FLAGS)


def step(fn: Callable[..., Any], arguments: dict[str, Tensor]) -> list[Tensor]:
    """Results and gradients of a loss on both of them."""
    leaves = {name: x.detach().requires_grad_() for name, x in arguments.items()}
    o, ht = fn(leaves)
    return [o, ht, *torch.autograd.grad(o.float().square().sum() + ht.sum(), list(leaves.values()))]


def assert_same(fn: Callable[..., Any], arguments: dict[str, Tensor], compiled: Any = None) -> None:
    compiled = torch.compile(fn, fullgraph=True) if compiled is None else compiled
    for i, (x, y) in enumerate(zip(step(fn, arguments), step(compiled, arguments), strict=True)):
        assert op_checks.error_ratio(x, y) < 1e-5, i
        assert x.dtype == y.dtype


def test_two_graphs_serve_every_length() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(kda, fullgraph=True, backend=counter)
    for T in (1, 7, 64, 65, 130, 1000):
        assert_same(kda, inputs(T=T), compiled)
    assert counter.frame_count <= 2


def test_nothing_to_compute_after_something() -> None:
    compiled = torch.compile(kda, fullgraph=True, dynamic=True)
    for B, T in ((2, 9), (0, 9), (2, 0), (3, 70)):
        assert_same(kda, inputs(B=B, T=T), compiled)


def test_autocast_changes_nothing() -> None:
    def fn(arguments: dict[str, Any]) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return kda(arguments)

    for x, y in zip(step(kda, inputs()), step(fn, inputs()), strict=True):
        assert torch.equal(x, y)
    assert_same(fn, inputs())


def test_results_may_be_changed_in_place() -> None:
    def fn(arguments: dict[str, Any]) -> Any:
        o, ht = kda(arguments)
        o.mul_(2)
        o += arguments["v"]
        return o, ht

    assert_same(fn, inputs())


def test_one_tensor_for_q_k_and_v() -> None:
    def fn(arguments: dict[str, Any]) -> Any:
        q = arguments["q"]
        return kda({**arguments, "k": q, "v": q})

    x = inputs(H=4, K=24)
    assert_same(fn, {name: x[name] for name in x if name not in ("k", "v")})


def test_twice_in_a_graph() -> None:
    def fn(arguments: dict[str, Any]) -> Any:
        o, _ = kda(arguments)
        return fla_inductor.fused_recurrent_kda(**{**arguments, "v": torch.tanh(o)}, **FLAGS)

    assert_same(fn, inputs())


def test_beta_of_each_column() -> None:
    def fn(arguments: dict[str, Any]) -> Any:
        return fla_inductor.fused_recurrent_kda(**arguments, **FLAGS)

    assert_same(fn, {**inputs(T=5), "beta": torch.randn(1, 5, 4, 24)})


def test_full_reset() -> None:
    """Finite, and no gradient of the resetting gate."""
    x = inputs()
    g = torch.nn.functional.logsigmoid(x["g"])
    g[:, [0, 10, 40]] = -float("inf")

    def fn(arguments: dict[str, Any]) -> Any:
        return fla_inductor.chunk_kda(**arguments, **{**FLAGS, "use_gate_in_kernel": False})

    arguments = {name: x[name] for name in ("q", "k", "v", "beta", "initial_state")} | {"g": g}
    assert_same(fn, arguments)
    *others, dg = step(torch.compile(fn, fullgraph=True), arguments)
    assert all(torch.isfinite(t).all() for t in others)
    assert (dg[:, [0, 10, 40]] == 0).all()


def test_second_derivative_is_an_error() -> None:
    leaves = {name: x.requires_grad_() for name, x in inputs(T=5).items()}
    o, _ = torch.compile(kda, fullgraph=True)(leaves)
    (dq,) = torch.autograd.grad(o.sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward|once differentiable"):
        dq.sum().backward()


def test_selective_checkpointing_saves_it_by_name() -> None:
    calls = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = op == torch.ops.fla_inductor.chunk_kda.default
        if save:
            calls.append(ctx.is_recompute)
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    def fn(arguments: dict[str, Any]) -> Any:
        contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
        return checkpoint(kda, arguments, use_reentrant=False, context_fn=contexts)

    for x, y in zip(step(kda, inputs()), step(fn, inputs()), strict=True):
        assert torch.equal(x, y)
    assert calls.count(False) == 1


def test_inference_then_training_with_one_compiled_function() -> None:
    compiled = torch.compile(kda, fullgraph=True)
    x = inputs()
    with torch.inference_mode():
        o, _ = compiled(x)
    assert op_checks.error_ratio(kda(x)[0], o.clone()) < 1e-5
    assert_same(kda, x, compiled)


@kda_neighbours.parametrize_padding
def test_projections_with_odd_rows(padding: tuple[bool, bool]) -> None:
    kda_neighbours.projections_with_odd_rows("cpu", padding, 1e-5)


@pytest.mark.parametrize("name", kda_neighbours.CONSUMERS)
def test_consumer_is_the_same_fused(name: str) -> None:
    kda_neighbours.consumer_is_the_same_fused("cpu", name, True, 1e-5)
