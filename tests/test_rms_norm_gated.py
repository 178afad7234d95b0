"""`rms_norm_gated`: values and gradients, activations, the residual stream, strides, dtypes, tracing, bad input."""

from __future__ import annotations

import itertools
from typing import Any

import op_checks
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from fla_inductor.custom_ops.rms_norm_gated import CONTRACT, rms_norm_gated

pytestmark = pytest.mark.usefixtures("fresh_compile")

D = 24
untyped: Any = rms_norm_gated


Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Inputs:
    """x, g, weight and bias, with gradients; the parameters in float32."""
    x, g = torch.randn(2, *shape, D, device=device).to(dtype).unbind(0)
    weight, bias = torch.randn(2, D, device=device).unbind(0)
    return x.requires_grad_(), g.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


def gated(x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None = None, **options: Any) -> Tensor:
    y = rms_norm_gated(x, g, weight, bias, **options)
    assert isinstance(y, Tensor)
    return y


@pytest.mark.parametrize("dtype", op_checks.DTYPES, ids=str)
@pytest.mark.parametrize("name", op_checks.sample_ids(CONTRACT))
def test_reference(name: str, dtype: torch.dtype, device: torch.device) -> None:
    op_checks.assert_matches_reference(CONTRACT, op_checks.get_sample(CONTRACT, device, dtype, name), dtype)


@pytest.mark.parametrize("backend", op_checks.BACKENDS)
@pytest.mark.parametrize("name", ["no_weight", "permuted"])
def test_compiles_in_every_backend(name: str, backend: str, device: torch.device) -> None:
    sample = op_checks.get_sample(CONTRACT, device, torch.bfloat16, name)
    op_checks.assert_compiles(CONTRACT, sample, backend, 1e-3)


def test_two_graphs_for_any_length(device: torch.device) -> None:
    calls = [inputs(device, 2, T) for T in (1, 7, 64, 65, 130, 1000)]
    assert list(op_checks.graphs(rms_norm_gated, calls))[-1] <= 2


@pytest.mark.parametrize(
    ("activation", "function"),
    [("swish", F.silu), ("silu", F.silu), ("sigmoid", torch.sigmoid)],
    ids=["swish", "silu", "sigmoid"],
)
def test_activations(activation: str, function: Any, device: torch.device) -> None:
    x, g, weight, bias = inputs(device, 2, 9)
    expected = (F.rms_norm(x, (D,), weight, eps=1e-6) + bias) * function(g)
    torch.testing.assert_close(gated(x, g, weight, bias, activation=activation), expected)
    compiled = torch.compile(untyped, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, g, weight, bias, activation), expected)


def test_swish_is_the_default_and_silu_is_the_same(device: torch.device) -> None:
    x, g, weight, _ = inputs(device, 2, 9)
    y = gated(x, g, weight)
    assert torch.equal(y, gated(x, g, weight, activation="swish"))
    assert torch.equal(y, gated(x, g, weight, activation="silu"))


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
def test_followed_by_a_linear_layer(recompute: bool, device: torch.device) -> None:
    """With the norm's output recomputed in the backward, the layer's weight gradient still sees the gate."""
    x, g, weight, bias = inputs(device, 2, 9)
    g.data[:, ::3] = 0
    W, b = (torch.randn(s, device=device, requires_grad=True) for s in ((7, D), (7,)))
    tensors = (x, g, weight, bias, W, b)

    def layer(x: Tensor, g: Tensor, weight: Tensor, bias: Tensor, W: Tensor, b: Tensor) -> Tensor:
        return F.linear(gated(x, g, weight, bias, activation="sigmoid"), W, b)

    y = checkpoint(layer, *tensors, use_reentrant=False) if recompute else layer(*tensors)
    upstream = torch.randn_like(y)
    grads = torch.autograd.grad(y, tensors, upstream)
    wide = [op_checks.leaf(t, True, torch.float64) for t in tensors]
    z = F.linear(CONTRACT.reference(*wide[:4], activation="sigmoid"), *wide[4:])
    for expected, actual in zip(torch.autograd.grad(z, wide, upstream.double()), grads, strict=True):
        assert op_checks.error_ratio(expected, actual) < 1e-5


@pytest.mark.parametrize("wanted", [w for n in (1, 2, 3, 4, 5) for w in itertools.combinations(range(5), n)], ids=str)
def test_gradients_of_any_subset(wanted: tuple[int, ...], device: torch.device) -> None:
    def total(x: Tensor, g: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        y, s = rms_norm_gated(x, g, weight, bias, "swish", residual, prenorm=True)
        return y.square().sum() + s.sum()

    tensors = (*inputs(device, 2, 9), torch.randn(2, 9, D, device=device, requires_grad=True))
    everything = torch.autograd.grad(total(*tensors), tensors)
    some = [op_checks.leaf(x, i in wanted) for i, x in enumerate(tensors)]
    grads = torch.autograd.grad(total(*some), [some[i] for i in wanted])
    for i, grad in zip(wanted, grads, strict=True):
        assert torch.equal(grad, everything[i])


@pytest.mark.parametrize("residual_dtype", [None, *op_checks.DTYPES], ids=str)
@pytest.mark.parametrize("in_fp32", [False, True])
def test_residual_stream(residual_dtype: torch.dtype | None, in_fp32: bool, device: torch.device) -> None:
    x, g, weight, _ = inputs(device, 2, 9, dtype=torch.bfloat16)
    residual = None if residual_dtype is None else torch.randn(2, 9, D, device=device).to(residual_dtype)
    y, s = rms_norm_gated(x, g, weight, None, residual=residual, prenorm=True, residual_in_fp32=in_fp32)
    expected = x.float() if residual is None else x.float() + residual.float()
    assert y.dtype == torch.bfloat16
    assert s.dtype == (residual_dtype or (torch.float32 if in_fp32 else torch.bfloat16))
    assert torch.equal(s, expected.to(s.dtype))
    assert torch.equal(y, gated(x, g, weight, residual=residual))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_returned_sum_is_not_the_input(dtype: torch.dtype, device: torch.device) -> None:
    x, g, weight, _ = (t.detach() for t in inputs(device, 2, 9, dtype=dtype))
    before = x.clone()
    _, s = rms_norm_gated(x, g, weight, None, prenorm=True)
    s.zero_()
    assert torch.equal(x, before)


def test_structure_does_not_depend_on_length_or_mode(device: torch.device) -> None:
    for T in (1, 2, 65):
        x, g, weight, _ = inputs(device, 2, T)
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled):
                assert isinstance(rms_norm_gated(x, g, weight, None), Tensor)
                pair = rms_norm_gated(x, g, weight, None, prenorm=True)
                assert isinstance(pair, tuple)
                assert len(pair) == 2


@pytest.mark.parametrize("dtypes", list(itertools.product((torch.float32, torch.bfloat16), repeat=3)), ids=str)
def test_mixed_dtypes(dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    x, g, weight, bias = inputs(device, 2, 9)
    tensors = [
        t.detach().to(d).requires_grad_() for t, d in zip((x, g, weight, bias), (*dtypes, dtypes[2]), strict=True)
    ]
    y = untyped(*tensors)
    wide = [op_checks.leaf(t, True, torch.float64) for t in tensors]
    z = CONTRACT.reference(*wide)
    assert y.dtype == dtypes[0]
    assert op_checks.error_ratio(z, y) < 3e-3
    upstream = torch.randn_like(y)
    grads, wanted = torch.autograd.grad(y, tensors, upstream), torch.autograd.grad(z, wide, upstream.double())
    for t, expected, grad in zip(tensors, wanted, grads, strict=True):
        assert grad.dtype == t.dtype
        assert op_checks.error_ratio(expected, grad) < (3e-3 if t.dtype == torch.bfloat16 else 1e-5)


def test_autocast_changes_nothing(device: torch.device) -> None:
    x, g, weight, bias = inputs(device, 2, 9)
    compiled = torch.compile(untyped, fullgraph=True, backend="aot_eager")
    with torch.autocast(device.type, torch.bfloat16):
        inside, traced = gated(x, g, weight, bias), compiled(x, g, weight, bias)
    assert torch.equal(inside, gated(x, g, weight, bias))
    assert torch.equal(traced, inside)


def test_large_float16_values_stay_finite(device: torch.device) -> None:
    x = torch.full((2, D), 60000.0, device=device, dtype=torch.float16)
    y = gated(x, torch.ones_like(x), torch.ones(D, device=device), residual=x.clone())
    torch.testing.assert_close(y, torch.full_like(y, float(torch.sigmoid(torch.tensor(1.0)))))


def test_parameter_gradients_are_float32_sums(device: torch.device) -> None:
    x, g, _, _ = inputs(device, 4, 5000, dtype=torch.bfloat16)
    weight = torch.ones(D, device=device, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(4, 5000, D, device=device).to(torch.bfloat16) + 0.5
    (dweight,) = torch.autograd.grad(gated(x, g, weight), weight, upstream)
    wide = [op_checks.leaf(t, True, torch.float64) for t in (x, g, weight)]
    (expected,) = torch.autograd.grad(CONTRACT.reference(*wide, None), wide[2], upstream.double())
    assert op_checks.error_ratio(expected, dweight) < 4e-3


def test_views_are_read_through_their_strides(device: torch.device) -> None:
    projection = torch.full((2, 9, 4 * D), torch.nan, device=device)
    projection[..., D : 3 * D] = torch.randn(2, 9, 2 * D, device=device)
    weight = torch.randn(D, 2, device=device)[:, 0]
    leaves = projection.requires_grad_()
    x, g = leaves[..., D : 2 * D], leaves[..., 2 * D : 3 * D]
    y = gated(x, g, weight)
    torch.testing.assert_close(y, gated(x.contiguous(), g.contiguous(), weight.contiguous()))
    (grad,) = torch.autograd.grad(y.sum(), leaves)
    assert y.is_contiguous()
    assert grad.isfinite().all()


def test_one_tensor_in_two_places(device: torch.device) -> None:
    x, _, weight, _ = inputs(device, 2, 9)
    compiled = torch.compile(untyped, fullgraph=True, backend="aot_eager")
    wide, wide_weight = (op_checks.leaf(t, True, torch.float64) for t in (x, weight))
    (expected,) = torch.autograd.grad(CONTRACT.reference(wide, wide, wide_weight, wide_weight).sum(), wide)
    for fn in (untyped, compiled):
        (dx,) = torch.autograd.grad(fn(x, x, weight, weight).sum(), x)
        assert op_checks.error_ratio(expected, dx) < 1e-5


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_result_changed_in_place(backend: str, device: torch.device) -> None:
    def double(x: Tensor, g: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return gated(x, g, weight, bias).mul_(2)

    tensors = inputs(device, 2, 9)
    expected = torch.autograd.grad(double(*tensors).square().sum(), tensors)
    compiled = torch.compile(double, fullgraph=True, backend=backend)
    actual = torch.autograd.grad(compiled(*tensors).square().sum(), tensors)
    torch.testing.assert_close(actual, expected)


def test_dynamic_graph_meets_nothing(device: torch.device) -> None:
    compiled = torch.compile(untyped, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((2, 9), (0, 9), (2, 0)):
        tensors = inputs(device, *shape)
        y = compiled(*tensors)
        assert y.shape == (*shape, D)
        dweight = torch.autograd.grad(y.sum(), tensors)[2]
        assert dweight.any() == (0 not in shape)


def test_second_derivative(device: torch.device) -> None:
    tensors = inputs(device, 3)
    wide = [op_checks.leaf(t, True, torch.float64) for t in tensors]
    second = []
    for fn, args in ((untyped, tensors), (CONTRACT.reference, wide)):
        grads = torch.autograd.grad(fn(*args).square().sum(), args, create_graph=True)
        second.append(torch.autograd.grad(torch.stack([d.square().sum() for d in grads]).sum(), args))
    for expected, actual in zip(second[1], second[0], strict=True):
        assert op_checks.error_ratio(expected, actual) < 1e-4


def test_inference_mode_then_training(device: torch.device) -> None:
    compiled = torch.compile(untyped, fullgraph=True, backend="aot_eager")
    tensors = inputs(device, 2, 9)
    with torch.inference_mode():
        assert torch.equal(compiled(*tensors), gated(*tensors))
    torch.autograd.grad(compiled(*tensors).sum(), tensors)


def test_fake_tensors(device: torch.device) -> None:
    tensors = inputs(device, 2, 9)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in tensors]
        y, s = untyped(*fakes, residual=fakes[0], prenorm=True)
        grads = torch.autograd.grad(y.sum() + s.sum(), fakes)
    assert [d.shape for d in grads] == [t.shape for t in tensors]


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool, device: torch.device) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor, g: Tensor, weight: Tensor) -> Tensor:
            return gated(x, g, weight, activation="sigmoid")

    tokens = torch.export.Dim("T", min=2)
    with torch.no_grad():
        exported = torch.export.export(
            Module(), inputs(device, 2, 9)[:3], dynamic_shapes=({1: tokens}, {1: tokens}, None), strict=strict
        )
    assert not any("fla_inductor" in str(node.target) for node in exported.run_decompositions().graph.nodes)
    longer = inputs(device, 2, 65)[:3]
    assert torch.equal(exported.module()(*longer), gated(*longer, activation="sigmoid"))


def test_bad_input() -> None:
    x, g, weight, bias = (t.detach() for t in inputs(torch.device("cpu"), 2, 9))

    def refuses(kind: type[Exception], text: str, *args: Any, **kwargs: Any) -> None:
        op_checks.assert_refuses(rms_norm_gated, kind, text, *args, **kwargs)

    for activation in ("relu", None, ""):
        text = "rms_norm_gated: argument `activation`: expected one of 'swish', 'silu', 'sigmoid', got"
        refuses(ValueError, text, x, g, weight, bias, activation)
    refuses(TypeError, "argument `x`: expected dtype .* got torch.float64", x.double(), g, weight, bias)
    refuses(TypeError, "argument `g`: expected dtype .* got torch.int64", x, g.long(), weight, bias)
    refuses(TypeError, "argument `g`: expected a torch.Tensor, got None", x, None, weight, bias)
    refuses(ValueError, "argument `g`: expected shape that of `x` = .2, 9, 24.", x, g[:, :1], weight, bias)
    refuses(ValueError, r"argument `weight`: expected shape \[D\] = \[24\]", x, g, weight[:5], bias)
    refuses(ValueError, r"argument `bias`: expected shape \[D\] = \[24\]", x, g, None, bias[None])
    refuses(ValueError, "argument `residual`: expected shape that of `x`", x, g, None, None, residual=x[:1])
    refuses(ValueError, "argument `weight`: expected device cpu .* got meta", x, g, weight.to("meta"), None)
    with pytest.raises(TypeError, match="is_rms_norm"):
        rms_norm_gated(x, g, weight, bias, is_rms_norm=True)  # type: ignore[call-arg]
