"""`l2norm`: values and gradients, strides, sizes, dtypes, tracing, bad input."""

from __future__ import annotations

import op_checks
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from fla_inductor.custom_ops.l2norm import CONTRACT, l2norm

pytestmark = pytest.mark.usefixtures("fresh_compile")


@pytest.mark.parametrize("dtype", op_checks.DTYPES, ids=str)
@pytest.mark.parametrize("name", op_checks.sample_ids(CONTRACT))
def test_reference(name: str, dtype: torch.dtype, device: torch.device) -> None:
    op_checks.assert_matches_reference(CONTRACT, op_checks.get_sample(CONTRACT, device, dtype, name), dtype)


@pytest.mark.parametrize("backend", op_checks.BACKENDS)
def test_compiles_in_every_backend(backend: str, device: torch.device) -> None:
    sample = op_checks.get_sample(CONTRACT, device, torch.bfloat16, "permuted")
    op_checks.assert_compiles(CONTRACT, sample, backend, 1e-3)


def test_two_graphs_for_any_length(device: torch.device) -> None:
    calls = [(torch.randn(2, T, 3, 24, device=device),) for T in (1, 7, 64, 65, 130, 1000)]
    assert list(op_checks.graphs(l2norm, calls))[-1] <= 2


def test_no_rows_cold_and_warm(device: torch.device) -> None:
    x = torch.randn(5, 128, device=device)
    compiled = torch.compile(l2norm, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (0, 5, 0):
        y = x[:rows].clone().requires_grad_()
        (dy,) = torch.autograd.grad(compiled(y).sum(), y)
        assert l2norm(y).shape == dy.shape == (rows, 128)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :, ::2],
        lambda x: x[..., :5],
        lambda x: x[0].t(),
        lambda x: x[:, :1].expand(3, 4, 10),
        lambda x: x[:, ::2],
    ],
    ids=["inner_stride", "padded_rows", "transposed", "expanded", "outer_stride"],
)
def test_views_are_read_through_their_strides(view: object, device: torch.device) -> None:
    assert callable(view)
    base = torch.randn(3, 4, 10, device=device, requires_grad=True)
    copy = base.detach().clone().requires_grad_()
    y, expected = l2norm(view(base)), l2norm(view(copy).contiguous())
    upstream = torch.randn_like(expected)
    assert torch.equal(y, expected)
    (dx,), (dx_expected,) = torch.autograd.grad(y, base, upstream), torch.autograd.grad(expected, copy, upstream)
    torch.testing.assert_close(dx, dx_expected)


def test_what_lies_beside_the_rows_is_not_read(device: torch.device) -> None:
    storage = torch.full((2, 128, 40), torch.nan, device=device)
    storage[:, :65, :24] = torch.randn(2, 65, 24, device=device)
    x = storage[:, :65, :24].requires_grad_()
    (dx,) = torch.autograd.grad(l2norm(x).sum(), x)
    assert l2norm(x).isfinite().all()
    assert dx.isfinite().all()


def test_zero_vector(device: torch.device) -> None:
    x = torch.zeros(2, 24, device=device, requires_grad=True)
    y = l2norm(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(y, torch.zeros_like(y))
    torch.testing.assert_close(dx, torch.full_like(dx, 1e3))


def test_upstream_gradient_without_strides(device: torch.device) -> None:
    x = torch.randn(2, 9, 24, device=device, requires_grad=True)
    y = l2norm(x)
    (dx,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (expected,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(dx, expected)


@pytest.mark.parametrize("dtype", op_checks.DTYPES, ids=str)
def test_output_dtype(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(2, 9, 24, device=device, dtype=torch.bfloat16)
    assert torch.equal(l2norm(x, output_dtype=dtype), l2norm(x.float()).to(dtype))
    assert l2norm(x).dtype == torch.bfloat16


def test_autocast_changes_nothing(device: torch.device) -> None:
    x = torch.randn(2, 9, 24, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        inside = l2norm(x)
    assert torch.equal(inside, l2norm(x))


def test_operator_called_directly_has_gradients(device: torch.device) -> None:
    x = torch.randn(2, 24, device=device, requires_grad=True)
    assert torch.ops.fla_inductor.l2norm(x).requires_grad


def test_second_derivative(device: torch.device) -> None:
    x = torch.randn(3, 5, device=device, requires_grad=True)
    weight = torch.randn(3, 5, device=device)
    (dx,) = torch.autograd.grad((l2norm(x) * weight).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(dx.square().sum(), x)
    wide = x.detach().double().requires_grad_()
    (dx,) = torch.autograd.grad((CONTRACT.reference(wide) * weight.double()).sum(), wide, create_graph=True)
    (expected,) = torch.autograd.grad(dx.square().sum(), wide)
    assert op_checks.error_ratio(expected, second) < 1e-5


def test_inference_mode_then_training(device: torch.device) -> None:
    compiled = torch.compile(l2norm, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 9, 24, device=device)
    with torch.inference_mode():
        assert torch.equal(compiled(x), l2norm(x))
    x.requires_grad_()
    torch.autograd.grad(compiled(x).sum(), x)


def test_fake_and_meta_tensors(device: torch.device) -> None:
    x = torch.randn(24, 2, 9, device=device).permute(1, 2, 0)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x).requires_grad_()
        y = l2norm(fake)
        (dx,) = torch.autograd.grad(y.sum(), fake)
        assert dx.shape == x.shape
    assert y.stride() == l2norm(x.to("meta")).stride() == l2norm(x).stride()


def test_vmap(device: torch.device) -> None:
    x = torch.randn(3, 4, 24, device=device)
    assert torch.equal(torch.vmap(l2norm)(x), l2norm(x))


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool, device: torch.device) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return l2norm(x)

    x = torch.randn(2, 9, 24, device=device)
    tokens = torch.export.Dim("T", min=2)
    with torch.inference_mode():
        exported = torch.export.export(Module(), (x,), dynamic_shapes=({1: tokens},), strict=strict)
    assert not any("fla_inductor" in str(node.target) for node in exported.run_decompositions().graph.nodes)
    longer = torch.randn(2, 65, 24, device=device)
    assert torch.equal(exported.module()(longer), l2norm(longer))


def test_bad_input() -> None:
    x = torch.randn(2, 24)
    refuses = op_checks.assert_refuses
    refuses(l2norm, TypeError, "l2norm: argument `x`: expected dtype float32.* got torch.float64", x.double())
    refuses(l2norm, TypeError, "l2norm: argument `x`: expected dtype float32.* got torch.int64", x.long())
    refuses(l2norm, TypeError, "argument `x`: expected a torch.Tensor, got None", None)
    refuses(l2norm, ValueError, r"argument `x`: expected shape \[..., D\], got \[\]", x[0, 0])
    refuses(l2norm, TypeError, "argument `output_dtype`: .* got torch.int8", x, output_dtype=torch.int8)
    with pytest.raises(TypeError, match="epsilon"):
        l2norm(x, epsilon=1e-6)  # type: ignore[call-arg]
