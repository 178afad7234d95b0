"""`fused_kda_gate`: values and gradients, the unit scale, saturation, parameter gradients, tracing, bad input."""

from __future__ import annotations

import itertools
from typing import Any

import op_checks
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from fla_inductor.custom_ops.kda_gate import CONTRACT, fused_kda_gate

pytestmark = pytest.mark.usefixtures("fresh_compile")

BOUNDS = pytest.mark.parametrize("lower_bound", [None, -5.0, -0.5], ids=["softplus", "bounded", "narrow"])
HV, K = 3, 20


def inputs(device: torch.device, tokens: int = 37, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """g, A_log and dt_bias, with gradients."""
    g = (3 * torch.randn(2, tokens, HV, K, device=device)).to(dtype)
    A_log, dt_bias = torch.randn(HV, device=device), torch.randn(HV * K, device=device)
    return g.requires_grad_(), A_log.requires_grad_(), dt_bias.requires_grad_()


@pytest.mark.parametrize("dtype", op_checks.DTYPES, ids=str)
@pytest.mark.parametrize("name", op_checks.sample_ids(CONTRACT))
def test_reference(name: str, dtype: torch.dtype, device: torch.device) -> None:
    op_checks.assert_matches_reference(CONTRACT, op_checks.get_sample(CONTRACT, device, dtype, name), dtype)


@pytest.mark.parametrize("backend", op_checks.BACKENDS)
def test_compiles_in_every_backend(backend: str, device: torch.device) -> None:
    sample = op_checks.get_sample(CONTRACT, device, torch.bfloat16, "softplus_permuted")
    op_checks.assert_compiles(CONTRACT, sample, backend, 1e-3)


@BOUNDS
def test_two_graphs_for_any_length(lower_bound: float | None, device: torch.device) -> None:
    calls = [(*inputs(device, T), lower_bound) for T in (1, 7, 64, 65, 130, 1000)]
    assert list(op_checks.graphs(fused_kda_gate, calls))[-1] <= 2


@pytest.mark.parametrize(
    ("lower_bound", "bias", "backend"),
    [
        *itertools.product((None, -5.0, -0.5), (True, False), (None,)),
        (None, True, "inductor"),
        (-5.0, True, "inductor"),
    ],
)
def test_no_scale_is_a_scale_of_one_bit_by_bit(
    lower_bound: float | None, bias: bool, backend: str | None, device: torch.device
) -> None:
    g, A_log, dt_bias = inputs(device)
    zeros = torch.zeros_like(A_log)
    fn = fused_kda_gate if backend is None else torch.compile(fused_kda_gate, fullgraph=True, backend=backend)
    results = []
    for scale in (None, zeros, zeros.clone().requires_grad_()):
        y = fn(g, scale, dt_bias if bias else None, lower_bound)
        grads = torch.autograd.grad(y.square().sum(), (g, dt_bias) if bias else (g,))
        results.append((y, *grads))
    for result in results[1:]:
        for expected, actual in zip(results[0], result, strict=True):
            assert torch.equal(expected, actual)


@pytest.mark.parametrize("scale", [None, 0.0, 1.5])
def test_softplus_never_meets_an_infinity(scale: float | None, device: torch.device) -> None:
    values = [-1e4, -200.0, -100.0, -88.0, -20.0, 0.0, 19.9, 20.0, 20.1, 88.0, 89.0, 200.0, 1e4]
    g = torch.tensor(values, device=device).repeat(2, 1).requires_grad_()
    A_log = None if scale is None else torch.full((2,), scale, device=device, requires_grad=True)
    y = fused_kda_gate(g, A_log)
    factor = 1.0 if scale is None else torch.tensor(scale).exp().double()
    wide = g.detach().double().cpu()
    torch.testing.assert_close(y.cpu().double(), -factor * torch.logaddexp(wide, torch.zeros_like(wide)))
    dg, *dA = torch.autograd.grad(y.sum(), [x for x in (g, A_log) if x is not None])
    torch.testing.assert_close(dg.cpu().double(), -factor * torch.sigmoid(wide))
    assert all(x.isfinite().all() for x in dA)


def test_bounded_gate_saturates(device: torch.device) -> None:
    g = torch.tensor([[-1e4, -200.0, 0.0, 200.0, 1e4]], device=device, requires_grad=True)
    y = fused_kda_gate(g, torch.tensor([3.0], device=device), lower_bound=-5.0)
    torch.testing.assert_close(y, torch.tensor([[0.0, 0.0, -2.5, -5.0, -5.0]], device=device))
    (dg,) = torch.autograd.grad(y.sum(), g)
    assert dg.isfinite().all()


@BOUNDS
@pytest.mark.parametrize("with_scale", [True, False], ids=["scale", "no_scale"])
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no_bias"])
def test_optional_parameters(
    with_scale: bool, with_bias: bool, lower_bound: float | None, device: torch.device
) -> None:
    g, A_log, dt_bias = inputs(device)
    given: dict[str, Any] = {"lower_bound": lower_bound}
    if with_scale:
        given["A_log"] = A_log
    if with_bias:
        given["dt_bias"] = dt_bias
    wide = {k: op_checks.leaf(x, dtype=torch.float64) for k, x in given.items()}
    expected = CONTRACT.reference(g.double(), **wide)
    assert op_checks.error_ratio(expected, fused_kda_gate(g, **given)) < 1e-6


@pytest.mark.parametrize("shape", [(HV,), (1, 1, HV, 1), (HV, 1)], ids=str)
@pytest.mark.parametrize("bias_shape", [(HV * K,), (HV, K)], ids=str)
def test_parameters_of_any_shape(shape: tuple[int, ...], bias_shape: tuple[int, ...], device: torch.device) -> None:
    g, A_log, dt_bias = inputs(device)
    expected = torch.autograd.grad(fused_kda_gate(g, A_log, dt_bias).square().sum(), (A_log, dt_bias))
    shaped = A_log.detach().view(shape).requires_grad_(), dt_bias.detach().view(bias_shape).requires_grad_()
    actual = torch.autograd.grad(fused_kda_gate(g, *shaped).square().sum(), shaped)
    for x, wanted, parameter in zip(actual, expected, shaped, strict=True):
        assert x.shape == parameter.shape
        assert torch.equal(x.flatten(), wanted)


@BOUNDS
@pytest.mark.parametrize("parameter_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parameter_gradients_are_float32_sums(
    parameter_dtype: torch.dtype, lower_bound: float | None, device: torch.device
) -> None:
    g = torch.randn(4, 2000, HV, K, device=device).to(torch.bfloat16).requires_grad_()
    A_log = torch.randn(HV, device=device).to(parameter_dtype).requires_grad_()
    dt_bias = torch.randn(HV * K, device=device).to(parameter_dtype).requires_grad_()
    upstream = torch.randn(g.shape, device=device) + 0.5
    y = fused_kda_gate(g, A_log, dt_bias, lower_bound)
    dg, dA_log, ddt_bias = torch.autograd.grad(y, (g, A_log, dt_bias), upstream)
    wide = [op_checks.leaf(x, True, torch.float64) for x in (g, A_log, dt_bias)]
    expected = torch.autograd.grad(CONTRACT.reference(*wide, lower_bound), wide, upstream.double())
    bound = 1e-5 if parameter_dtype == torch.float32 else 4e-3
    assert op_checks.error_ratio(expected[1], dA_log) < bound
    assert op_checks.error_ratio(expected[2], ddt_bias) < bound
    assert not torch.equal(ddt_bias.float(), dg.float().sum((0, 1)).flatten())


@pytest.mark.parametrize("wanted", [w for n in (1, 2, 3) for w in itertools.combinations(range(3), n)], ids=str)
def test_gradients_of_any_subset(wanted: tuple[int, ...], device: torch.device) -> None:
    tensors = inputs(device)
    everything = torch.autograd.grad(fused_kda_gate(*tensors).square().sum(), tensors)
    some = [op_checks.leaf(x, i in wanted) for i, x in enumerate(tensors)]
    grads = torch.autograd.grad(fused_kda_gate(*some).square().sum(), [some[i] for i in wanted])
    for i, grad in zip(wanted, grads, strict=True):
        assert torch.equal(grad, everything[i])


def test_history_of_lengths_changes_rounding_at_most(device: torch.device) -> None:
    tensors, shorter = inputs(device, 512), inputs(device, 300)
    results = []
    for history in ([tensors], [shorter, tensors]):
        torch._dynamo.reset()
        compiled = torch.compile(fused_kda_gate, fullgraph=True)
        for arguments in history:
            grads = torch.autograd.grad(compiled(*arguments).square().sum(), arguments)
        results.append(grads)
    for first, second in zip(*results, strict=True):
        assert op_checks.error_ratio(first, second) < 1e-6


def test_views_are_read_through_their_strides(device: torch.device) -> None:
    projection = torch.full((2, 9, 3 * HV * K), torch.nan, device=device)
    projection[..., HV * K : 2 * HV * K] = torch.randn(2, 9, HV * K, device=device)
    g = projection[..., HV * K : 2 * HV * K].unflatten(-1, (HV, K)).requires_grad_()
    y = fused_kda_gate(g)
    (dg,) = torch.autograd.grad(y.sum(), g)
    torch.testing.assert_close(y, fused_kda_gate(g.contiguous()))
    assert y.is_contiguous()
    assert dg.isfinite().all()


@pytest.mark.parametrize("shape", [(2, 0, HV, K), (0, 5, HV, K)], ids=str)
def test_no_tokens(shape: tuple[int, ...], device: torch.device) -> None:
    _, A_log, dt_bias = inputs(device)
    g = torch.randn(shape, device=device, requires_grad=True)
    compiled = torch.compile(fused_kda_gate, fullgraph=True, backend="aot_eager")
    for fn in (fused_kda_gate, compiled):
        y = fn(g, A_log, dt_bias, output_dtype=torch.bfloat16)
        dg, dA_log, ddt_bias = torch.autograd.grad(y.sum(), (g, A_log, dt_bias))
        assert (y.shape, y.dtype, dg.shape) == (shape, torch.bfloat16, shape)
        assert not dA_log.any()
        assert not ddt_bias.any()


def test_fake_tensors(device: torch.device) -> None:
    tensors = inputs(device)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in tensors]
        y = fused_kda_gate(fakes[0], fakes[1], fakes[2])
        grads = torch.autograd.grad(y.sum(), fakes)
    assert [x.shape for x in grads] == [x.shape for x in tensors]
    assert y.stride() == fused_kda_gate(*tensors).stride()


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool, device: torch.device) -> None:
    class Module(torch.nn.Module):
        def forward(self, g: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
            return fused_kda_gate(g, A_log, dt_bias, -5.0)

    tokens = torch.export.Dim("T", min=2)
    with torch.no_grad():
        exported = torch.export.export(
            Module(), inputs(device), dynamic_shapes=({1: tokens}, None, None), strict=strict
        )
    assert not any("fla_inductor" in str(node.target) for node in exported.run_decompositions().graph.nodes)
    longer = inputs(device, 65)
    assert torch.equal(exported.module()(*longer), fused_kda_gate(*longer, lower_bound=-5.0))


def test_bad_input() -> None:
    g, A_log, dt_bias = (x.detach() for x in inputs(torch.device("cpu")))

    def refuses(kind: type[Exception], text: str, *args: Any, **kwargs: Any) -> None:
        op_checks.assert_refuses(fused_kda_gate, kind, text, *args, **kwargs)

    refuses(TypeError, "fused_kda_gate: argument `g`: expected dtype .* got torch.int32", g.int())
    refuses(TypeError, "argument `A_log`: expected dtype .* got torch.float64", g, A_log.double())
    refuses(TypeError, "argument `dt_bias`: expected dtype .* got torch.int64", g, A_log, dt_bias.long())
    refuses(TypeError, "argument `output_dtype`: .* torch.float64", g, output_dtype=torch.float64)
    refuses(ValueError, r"argument `g`: expected shape \[..., HV, K\], got \[20\]", g[0, 0, 0])
    refuses(ValueError, r"argument `A_log`: expected HV = 3 elements, got shape \[2\]", g, A_log[:2])
    refuses(ValueError, "argument `dt_bias`: expected HV . K = 60 elements", g, A_log, dt_bias[:HV])
    refuses(ValueError, "argument `A_log`: expected device cpu .* got meta", g, A_log.to("meta"))
    with pytest.raises(TypeError, match="beta"):
        fused_kda_gate(g, beta=g)  # type: ignore[call-arg]
