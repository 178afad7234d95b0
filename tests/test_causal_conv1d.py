"""`causal_conv1d` and `causal_conv1d_update`: values and gradients, packed sequences, states, tracing, bad input."""

from __future__ import annotations

import itertools
from typing import Any

import op_checks
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from fla_inductor import _compat
from fla_inductor.custom_ops.causal_conv1d import CONTRACT, UPDATE_CONTRACT, causal_conv1d, causal_conv1d_update
from fla_inductor.custom_ops.l2norm import l2norm

pytestmark = pytest.mark.usefixtures("fresh_compile")

D, W = 12, 4
NAMES = ("x", "weight", "bias", "residual", "initial_state")
EMPTIES = [0, 0, 5, 5, 5, 7, 30, 30]
INDEX_DTYPES = pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)


def inputs(device: torch.device, B: int, T: int, N: int | None = None, width: int = W) -> dict[str, Any]:
    """Every float argument, with gradients."""
    shapes = ((B, T, D), (D, width), (D,), (B, T, D), (B if N is None else N, D, width))
    tensors = (torch.randn(s, device=device, requires_grad=True) for s in shapes)
    return dict(zip(NAMES, tensors, strict=True))


def conv(activation: str | None = "silu", **tensors: Any) -> tuple[Tensor, Tensor]:
    """Output and final state."""
    y, final_state = causal_conv1d(**tensors, activation=activation, output_final_state=True)
    assert final_state is not None
    return y, final_state


def gradients(tensors: dict[str, Any], dy: Tensor | None, dfinal: Tensor | None, **options: Any) -> dict[str, Any]:
    pairs = [(x, d) for x, d in zip(conv(**tensors, **options), (dy, dfinal), strict=True) if d is not None]
    outputs, upstream = zip(*pairs, strict=True)
    grads = torch.autograd.grad(outputs, list(tensors.values()), upstream, allow_unused=True, materialize_grads=True)
    return dict(zip(tensors, grads, strict=True))


def offsets(values: list[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, device=device, dtype=dtype)


@pytest.mark.parametrize("dtype", op_checks.DTYPES, ids=str)
@pytest.mark.parametrize("name", op_checks.sample_ids(CONTRACT))
def test_reference(name: str, dtype: torch.dtype, device: torch.device) -> None:
    op_checks.assert_matches_reference(CONTRACT, op_checks.get_sample(CONTRACT, device, dtype, name), dtype)


@pytest.mark.parametrize(
    ("name", "backend"),
    [*itertools.product(("permuted", "varlen_state"), ("eager", "aot_eager")), ("varlen_state", "inductor")],
)
def test_compiles_in_every_backend(name: str, backend: str, device: torch.device) -> None:
    sample = op_checks.get_sample(CONTRACT, device, torch.bfloat16, name)
    op_checks.assert_compiles(CONTRACT, sample, backend, 1e-3)


def test_equals_the_convolution_of_pytorch(device: torch.device) -> None:
    x, weight, bias = (torch.randn(s, device=device) for s in ((2, 37, D), (D, W), (D,)))
    y, final_state = causal_conv1d(x, weight, bias)
    padded = F.pad(x.mT, (W - 1, 0))
    torch.testing.assert_close(y, F.conv1d(padded, weight[:, None], bias, groups=D).mT)
    assert final_state is None


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 256, 257])
def test_lengths_and_widths(T: int, width: int, device: torch.device) -> None:
    tensors = inputs(device, 2, T, width=width)
    y, final_state = conv(**tensors)
    wide = {name: op_checks.leaf(t, True, torch.float64) for name, t in tensors.items()}
    z, expected_state = CONTRACT.reference(**wide, activation="silu", output_final_state=True)
    assert op_checks.error_ratio(z, y) < 1e-6
    assert op_checks.error_ratio(expected_state, final_state) == 0
    upstream = torch.randn_like(y), torch.randn_like(final_state)
    grads = gradients(tensors, *upstream)
    wanted = torch.autograd.grad((z, expected_state), list(wide.values()), [d.double() for d in upstream])
    for name, expected in zip(NAMES, wanted, strict=True):
        assert op_checks.error_ratio(expected, grads[name]) < 1e-5, name


@INDEX_DTYPES
@pytest.mark.parametrize("values", [EMPTIES, [0, 0, 30], [0, 1, 2, 3, 30], [0, 30, 30, 30], [0, 15, 15, 30]], ids=str)
def test_packing_changes_nothing(values: list[int], index_dtype: torch.dtype, device: torch.device) -> None:
    tensors = inputs(device, 1, 30, len(values) - 1)
    upstream = torch.randn(1, 30, D, device=device), torch.randn(len(values) - 1, D, W, device=device)
    cu_seqlens = offsets(values, device, index_dtype)
    y, final_state = conv(**tensors, cu_seqlens=cu_seqlens)
    grads = gradients(tensors, *upstream, cu_seqlens=cu_seqlens)
    totals = {name: torch.zeros_like(grads[name]) for name in ("weight", "bias")}
    for n, (start, end) in enumerate(itertools.pairwise(values)):
        alone = {
            "x": op_checks.leaf(tensors["x"][:, start:end], True),
            "weight": tensors["weight"],
            "bias": tensors["bias"],
            "residual": op_checks.leaf(tensors["residual"][:, start:end], True),
            "initial_state": op_checks.leaf(tensors["initial_state"][n : n + 1], True),
        }
        z, state = conv(**alone)
        torch.testing.assert_close(y[:, start:end], z)
        assert torch.equal(final_state[n : n + 1], state)
        single = gradients(alone, upstream[0][:, start:end], upstream[1][n : n + 1])
        for name in ("x", "residual"):
            torch.testing.assert_close(grads[name][:, start:end], single[name])
        torch.testing.assert_close(grads["initial_state"][n : n + 1], single["initial_state"])
        for name in totals:
            totals[name] += single[name]
    for name, total in totals.items():
        torch.testing.assert_close(grads[name], total, rtol=1e-4, atol=1e-5)


def test_empty_sequence_passes_its_state_on(device: torch.device) -> None:
    tensors = inputs(device, 1, 30, 7)
    dfinal = torch.randn(7, D, W, device=device)
    cu_seqlens = offsets(EMPTIES, device)
    _, final_state = conv(**tensors, cu_seqlens=cu_seqlens)
    dstate = gradients(tensors, None, dfinal, cu_seqlens=cu_seqlens)["initial_state"]
    for n in (0, 2, 3, 6):
        assert torch.equal(final_state[n], tensors["initial_state"][n])
        assert torch.equal(dstate[n], dfinal[n])
    del tensors["initial_state"]
    _, final_state = conv(**tensors, cu_seqlens=cu_seqlens)
    assert not final_state[0].any()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.usefixtures("poisoned_memory")
def test_tokens_after_the_last_sequence_are_never_read(compiled: bool, device: torch.device) -> None:
    tensors = inputs(device, 1, 30, 2)
    cu_seqlens = offsets([0, 11, 23], device)
    dy = torch.randn(1, 30, D, device=device)
    for name in ("x", "residual"):
        tensors[name].data[:, 23:] = torch.nan
    dy[:, 23:] = torch.nan
    fn = torch.compile(conv, fullgraph=True, backend="aot_eager") if compiled else conv
    y, final_state = fn(**tensors, cu_seqlens=cu_seqlens)
    grads = torch.autograd.grad((y, final_state), list(tensors.values()), (dy, torch.randn_like(final_state)))
    assert y.isfinite().all()
    assert final_state.isfinite().all()
    assert not y[:, 23:].any()
    for name, grad in zip(NAMES, grads, strict=True):
        assert grad.isfinite().all(), name
        assert name not in ("x", "residual") or not grad[:, 23:].any()
    short = {**tensors, "x": tensors["x"][:, :23], "residual": tensors["residual"][:, :23]}
    torch.testing.assert_close(y[:, :23], conv(**short, cu_seqlens=cu_seqlens)[0])


def test_one_sequence_does_not_see_another(device: torch.device) -> None:
    tensors = inputs(device, 1, 30)
    del tensors["initial_state"]
    cu_seqlens = offsets([0, 10, 12, 30], device)
    y, final_state = conv(**tensors, cu_seqlens=cu_seqlens)
    tensors["x"].data[:, 10:12] = torch.nan
    other, other_state = conv(**tensors, cu_seqlens=cu_seqlens)
    for part in (slice(10), slice(12, 30)):
        assert torch.equal(y[:, part], other[:, part])
    assert torch.equal(final_state[[0, 2]], other_state[[0, 2]])


def test_no_sequence_at_all(device: torch.device) -> None:
    tensors = inputs(device, 1, 30, 0)
    y, final_state = conv(**tensors, cu_seqlens=offsets([0], device))
    assert not y.any()
    assert final_state.shape == (0, D, W)
    grads = gradients(tensors, torch.randn_like(y), torch.randn_like(final_state), cu_seqlens=offsets([0], device))
    assert not any(grad.any() for grad in grads.values())


@pytest.mark.parametrize(("B", "T"), [(2, 0), (0, 9), (0, 0)])
def test_no_tokens(B: int, T: int, device: torch.device) -> None:
    tensors = inputs(device, B, T)
    y, final_state = conv(**tensors)
    assert y.shape == (B, T, D)
    assert final_state.shape == (B, D, W)
    dfinal = torch.randn_like(final_state)
    grads = gradients(tensors, torch.randn_like(y), dfinal)
    assert not grads["weight"].any()
    assert not grads["bias"].any()
    if T == 0:
        assert torch.equal(final_state, tensors["initial_state"])
        assert torch.equal(grads["initial_state"], dfinal)
    assert torch.equal(conv(**tensors)[1], final_state)


def test_no_tokens_in_packed_sequences(device: torch.device) -> None:
    tensors = inputs(device, 1, 0, 2)
    y, final_state = conv(**tensors, cu_seqlens=offsets([0, 0, 0], device))
    assert y.shape == (1, 0, D)
    assert torch.equal(final_state, tensors["initial_state"])


@pytest.mark.parametrize("pieces", [(1, 3, 64, 65, 67), (2, 1, 1, 196), (100, 100)], ids=str)
def test_pieces_equal_the_whole(pieces: tuple[int, ...], device: torch.device) -> None:
    tensors = inputs(device, 2, 200)
    y, final_state = conv(**tensors)
    parts, state = [], tensors["initial_state"]
    for x, residual in zip(tensors["x"].split(pieces, 1), tensors["residual"].split(pieces, 1), strict=True):
        part, state = conv(**{**tensors, "x": x, "residual": residual, "initial_state": state})
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), y)
    assert torch.equal(state, final_state)
    upstream = torch.randn_like(y), torch.randn_like(final_state)
    arguments = list(tensors.values())
    whole = torch.autograd.grad((y, final_state), arguments, upstream)
    pieced = torch.autograd.grad((torch.cat(parts, 1), state), arguments, upstream)
    torch.testing.assert_close(pieced, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("longer", [0, 2])
def test_token_by_token_equals_the_whole(longer: int, device: torch.device) -> None:
    tensors = {name: t.detach() for name, t in inputs(device, 2, 20).items()}
    y, final_state = conv(**tensors)
    cache = F.pad(tensors["initial_state"], (longer, 0), value=torch.nan)
    for t in range(20):
        x, residual = (tensors[name][:, t : t + 1] for name in ("x", "residual"))
        step, returned = causal_conv1d_update(x, cache, residual, tensors["weight"], tensors["bias"], "silu")
        assert returned is cache
        torch.testing.assert_close(step, y[:, t : t + 1])
    assert torch.equal(cache[..., longer:], final_state)


def test_loss_on_one_output_only(device: torch.device) -> None:
    tensors = inputs(device, 2, 9)
    y, final_state = conv(**tensors)
    dy, dfinal = torch.randn_like(y), torch.randn_like(final_state)
    both, first, second = gradients(tensors, dy, dfinal), gradients(tensors, dy, None), gradients(tensors, None, dfinal)
    for name in NAMES:
        torch.testing.assert_close(first[name] + second[name], both[name])
    assert second["x"][:, -W:].any()
    assert not second["weight"].any()


@pytest.mark.parametrize("cu", [None, [0, 4, 4, 9]], ids=["batch", "packed"])
def test_gradients_of_any_subset(cu: list[int] | None, device: torch.device) -> None:
    tensors = inputs(device, 1, 9, 1 if cu is None else 3)
    options: dict[str, Any] = {} if cu is None else {"cu_seqlens": offsets(cu, device)}
    dy, dfinal = torch.randn(1, 9, D, device=device), torch.randn_like(tensors["initial_state"])
    everything = gradients(tensors, dy, dfinal, **options)
    for wanted in (w for n in range(1, 6) for w in itertools.combinations(NAMES, n)):
        some: dict[str, Any] = {name: op_checks.leaf(t, name in wanted) for name, t in tensors.items()}
        outputs = [x for x in conv(**some, **options) if x.requires_grad]
        upstream = [dy if x.shape == dy.shape else dfinal for x in outputs]
        grads = torch.autograd.grad(outputs, [some[name] for name in wanted], upstream)
        for name, grad in zip(wanted, grads, strict=True):
            assert torch.equal(grad, everything[name]), (name, wanted)


def test_second_derivative(device: torch.device) -> None:
    tensors = inputs(device, 1, 6, 2)
    cu_seqlens = offsets([0, 2, 6], device)

    def penalty(fn: Any, values: dict[str, Any]) -> tuple[Tensor, ...]:
        y, final_state = fn(**values, activation="silu", output_final_state=True, cu_seqlens=cu_seqlens)
        arguments = list(values.values())
        grads = torch.autograd.grad((y * y).sum() + (final_state * final_state).sum(), arguments, create_graph=True)
        return torch.autograd.grad(torch.stack([d.square().sum() for d in grads]).sum(), arguments)

    wide = {name: op_checks.leaf(t, True, torch.float64) for name, t in tensors.items()}
    for actual, expected in zip(penalty(causal_conv1d, tensors), penalty(CONTRACT.reference, wide), strict=True):
        assert op_checks.error_ratio(expected, actual) < 1e-5


def test_bfloat16_input_and_float32_weight(device: torch.device) -> None:
    x = torch.randn(2, 2000, D, device=device).to(torch.bfloat16).requires_grad_()
    weight, bias = (torch.randn(s, device=device, requires_grad=True) for s in ((D, W), (D,)))
    y, _ = causal_conv1d(x, weight, bias, activation="silu")
    upstream = torch.randn(y.shape, device=device).to(torch.bfloat16) + 0.5
    dx, dweight, dbias = torch.autograd.grad(y, (x, weight, bias), upstream)
    assert (y.dtype, dx.dtype, dweight.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    wide = [op_checks.leaf(t, True, torch.float64) for t in (x, weight, bias)]
    z, _ = CONTRACT.reference(*wide, activation="silu")
    _, expected, expected_bias = torch.autograd.grad(z, wide, upstream.double())
    assert op_checks.error_ratio(expected, dweight) < 1e-5
    assert op_checks.error_ratio(expected_bias, dbias) < 1e-5


@pytest.mark.parametrize("state_dtype", op_checks.DTYPES, ids=str)
def test_state_dtypes(state_dtype: torch.dtype, device: torch.device) -> None:
    tensors = inputs(device, 2, 2)
    tensors["x"] = tensors["x"].detach().to(torch.bfloat16).requires_grad_()
    tensors["initial_state"] = tensors["initial_state"].detach().to(state_dtype).requires_grad_()
    y, final_state = conv(**tensors)
    assert y.dtype == final_state.dtype == torch.bfloat16
    assert gradients(tensors, y.detach(), final_state.detach())["initial_state"].dtype == state_dtype


def test_autocast_changes_nothing(device: torch.device) -> None:
    tensors = inputs(device, 2, 9)
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    with torch.autocast(device.type, torch.bfloat16):
        inside, traced = conv(**tensors), compiled(**tensors)
    assert all(torch.equal(a, b) for a, b in zip(inside, conv(**tensors), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(inside, traced, strict=True))


def test_swish_is_silu(device: torch.device) -> None:
    tensors = inputs(device, 2, 9)
    assert torch.equal(conv("swish", **tensors)[0], conv("silu", **tensors)[0])


@pytest.mark.parametrize(
    "view",
    [
        lambda p: p[..., D : 2 * D],
        lambda p: p[..., ::3],
        lambda p: p[..., :D].transpose(1, 2).contiguous().transpose(1, 2),
        lambda p: p[:, :1, :D].expand(-1, 9, -1),
        lambda p: p[:1, :, :D].expand(2, -1, -1),
    ],
    ids=["slice", "inner_stride", "channels_first", "expanded_time", "expanded_batch"],
)
def test_views_are_read_through_their_strides(view: Any, device: torch.device) -> None:
    projection = torch.randn(2, 9, 3 * D, device=device, requires_grad=True)
    x = view(projection)
    more: dict[str, Any] = {name: t for name, t in inputs(device, 2, 9).items() if name != "x"}
    more["weight"] = torch.randn(W, D, device=device).mT
    y, final_state = conv(x=x, **more)
    z, expected_state = conv(x=x.contiguous(), **more)
    torch.testing.assert_close(y, z)
    torch.testing.assert_close(final_state, expected_state)
    assert y.is_contiguous()
    assert final_state.is_contiguous()
    grads = torch.autograd.grad((y.sum(), z.sum()), projection, retain_graph=True)
    (one,), (two,) = torch.autograd.grad(y.sum(), projection), torch.autograd.grad(z.sum(), projection)
    torch.testing.assert_close(one, two)
    torch.testing.assert_close(grads[0], one + two)


def test_one_tensor_in_two_places(device: torch.device) -> None:
    x = torch.randn(2, 9, D, device=device, requires_grad=True)
    weight = torch.randn(D, W, device=device)
    compiled = torch.compile(causal_conv1d, fullgraph=True, backend="aot_eager")
    wide = op_checks.leaf(x, True, torch.float64)
    (expected,) = torch.autograd.grad(CONTRACT.reference(wide, weight.double(), residual=wide)[0].sum(), wide)
    for fn in (causal_conv1d, compiled):
        (dx,) = torch.autograd.grad(fn(x, weight, residual=x)[0].sum(), x)
        assert op_checks.error_ratio(expected, dx) < 1e-5


def test_more_than_65536_tokens(device: torch.device) -> None:
    x, weight = torch.ones(1, 65600, 2, device=device), torch.randn(2, W, device=device)
    y, _ = causal_conv1d(x, weight, cu_seqlens=offsets([0, 65537, 65600], device))
    assert torch.equal(y[0, -60:], y[0, W : W + 60])
    assert torch.equal(y[0, 65537 : 65537 + W], y[0, :W])


def test_two_graphs_for_any_length(device: torch.device) -> None:
    def dense(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        arguments: dict[str, Any] = dict(zip(NAMES, tensors, strict=True))
        return conv(**arguments)

    calls = [tuple(inputs(device, 2, T).values()) for T in (1, 7, 64, 65, 130, 1000, 2, 3)]
    assert list(op_checks.graphs(dense, calls))[-1] <= 2


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
def test_two_graphs_for_any_packing(dynamic: bool | None, device: torch.device) -> None:
    def packed(cu_seqlens: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        arguments: dict[str, Any] = dict(zip(NAMES, tensors, strict=True))
        return conv(**arguments, cu_seqlens=cu_seqlens)

    calls = []
    for T, N in ((65, 1), (127, 2), (193, 3), (1024, 7), (65, 8), (127, 16)):
        cuts = sorted(torch.randint(0, T + 1, (N - 1,)).tolist())
        calls.append((offsets([0, *cuts, T], device), *inputs(device, 1, T, N).values()))
    assert list(op_checks.graphs(packed, calls, dynamic=dynamic))[-1] <= 2


def test_offsets_changed_in_place_are_followed(device: torch.device) -> None:
    x, weight = torch.randn(1, 30, D, device=device), torch.randn(D, W, device=device)
    compiled = torch.compile(causal_conv1d, fullgraph=True, backend="aot_eager")
    cu_seqlens = offsets([0, 10, 30], device)
    for cut in (10, 0, 29):
        cu_seqlens[1] = cut
        expected, _ = causal_conv1d(x, weight, cu_seqlens=offsets([0, cut, 30], device))
        for fn in (causal_conv1d, compiled):
            assert torch.equal(fn(x, weight, cu_seqlens=cu_seqlens)[0], expected)


def test_dynamic_graph_meets_nothing(device: torch.device) -> None:
    compiled = torch.compile(conv, fullgraph=True, dynamic=True, backend="aot_eager")
    for B, T in ((2, 9), (0, 9), (2, 0), (3, 20)):
        tensors = inputs(device, B, T)
        y, final_state = compiled(**tensors)
        assert torch.equal(final_state, conv(**tensors)[1])
        grads = torch.autograd.grad((y.sum(), final_state.sum()), list(tensors.values()))
        assert grads[1].any() == (B * T > 0)


@pytest.mark.parametrize("comprehensive_padding", [True, False], ids=["padding", "no_padding"])
def test_between_other_operators(comprehensive_padding: bool, device: torch.device) -> None:
    """Rows of a width that Inductor likes to pad, a permuted intermediate, and a result that is changed in place."""
    H, K = 21, 50
    wide = torch.randn(H * K, W, device=device, requires_grad=True)
    projection = torch.randn(16, H * K, device=device, requires_grad=True)
    x = torch.randn(2, 9, 16, device=device)

    def layer(x: Tensor, projection: Tensor, weight: Tensor) -> Tensor:
        q = (x @ projection).view(2, 9, H, K).transpose(1, 2).contiguous().transpose(1, 2).flatten(2)
        y, _ = causal_conv1d(q, weight, activation="silu")
        return l2norm(y.view(2, 9, H, K)).mul_(2).transpose(1, 2)

    compiled = torch.compile(layer, fullgraph=True, options={"comprehensive_padding": comprehensive_padding})
    y, z = compiled(x, projection, wide), layer(x, projection, wide)
    upstream = torch.randn_like(z)
    torch.testing.assert_close(y, z)
    grads, expected = (torch.autograd.grad(out, (projection, wide), upstream) for out in (y, z))
    for i in range(2):
        assert op_checks.error_ratio(expected[i], grads[i]) < 1e-5


def test_inference_mode_then_training(device: torch.device) -> None:
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    tensors = inputs(device, 2, 9)
    with torch.inference_mode():
        assert torch.equal(compiled(**tensors)[0], conv(**tensors)[0])
    torch.autograd.grad(compiled(**tensors)[0].sum(), list(tensors.values()))


def test_fake_tensors_hold_no_data_that_is_asked_for(device: torch.device) -> None:
    tensors = inputs(device, 1, 30, 7)
    with FakeTensorMode() as mode:
        fakes: dict[str, Any] = {name: mode.from_tensor(t) for name, t in tensors.items()}
        y, final_state = conv(**fakes, cu_seqlens=mode.from_tensor(offsets(EMPTIES, device)))
        grads = torch.autograd.grad((y.sum(), final_state.sum()), list(fakes.values()))
        cache = fakes["initial_state"].detach()
        step, _ = causal_conv1d_update(fakes["x"][:, :7].detach(), cache, None, fakes["weight"].detach())
    assert [d.shape for d in grads] == [t.shape for t in tensors.values()]
    assert step.shape == (1, 7, D)


def test_vmap(device: torch.device) -> None:
    tensors = inputs(device, 2, 9)
    more: dict[str, Any] = {name: t.detach() for name, t in tensors.items() if name not in ("x", "residual")}
    xs = torch.randn(3, 2, 9, D, device=device)
    y, final_state = torch.vmap(lambda x: conv(x=x, **more))(xs)
    for i, x in enumerate(xs):
        expected, expected_state = conv(x=x, **more)
        torch.testing.assert_close(y[i], expected)
        assert torch.equal(final_state[i], expected_state)


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool, device: torch.device) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor, state: Tensor, cu_seqlens: Tensor, cache: Tensor) -> Any:
            y, final_state = conv(x=x, weight=weight, initial_state=state, cu_seqlens=cu_seqlens)
            return y, final_state, causal_conv1d_update(x[0, :2], cache, None, weight)[0]

    def arguments(T: int) -> tuple[Tensor, ...]:
        t = {name: x.detach() for name, x in inputs(device, 1, T, 2).items()}
        return t["x"], t["weight"], t["initial_state"], offsets([0, 5, T], device), torch.randn(2, D, W, device=device)

    tokens = torch.export.Dim("T", min=2)
    shapes = ({1: tokens}, None, None, None, None)
    with torch.no_grad():
        exported = torch.export.export(Module(), arguments(9), dynamic_shapes=shapes, strict=strict)
    assert not any("fla_inductor" in str(node.target) for node in exported.run_decompositions().graph.nodes)
    one = arguments(65)
    two = tuple(t.clone() for t in one)
    for actual, expected in zip(exported.module()(*one), Module()(*two), strict=True):
        assert torch.equal(actual, expected)
    assert torch.equal(one[-1], two[-1])


def test_structure_does_not_depend_on_length_or_mode(device: torch.device) -> None:
    for T, enabled, wanted in itertools.product((1, 2, 65), (True, False), (True, False)):
        tensors = inputs(device, 2, T)
        with torch.set_grad_enabled(enabled):
            result = causal_conv1d(**tensors, output_final_state=wanted)
        assert isinstance(result, tuple)
        assert len(result) == 2
        assert (result[1] is not None) == wanted


def test_arguments_of_fla_that_change_nothing(device: torch.device) -> None:
    tensors = inputs(device, 2, 9)
    y, _ = causal_conv1d(**tensors, backend="triton", cu_seqlens_cpu=None, chunk_indices=None)
    assert torch.equal(y, causal_conv1d(**tensors)[0])


def test_packed_sequences_in_a_larger_batch_are_refused(device: torch.device) -> None:
    x, weight = torch.randn(2, 10, D, device=device), torch.randn(D, W, device=device)
    cu_seqlens = offsets([0, 10, 20], device)
    op_checks.assert_refuses(
        causal_conv1d, ValueError, "argument `cu_seqlens`: expected batch size 1", x, weight, cu_seqlens=cu_seqlens
    )
    flat, _ = causal_conv1d(x.view(1, 20, D), weight, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(flat.view(2, 10, D), causal_conv1d(x, weight)[0])


def test_bad_input() -> None:
    t = {name: x.detach() for name, x in inputs(torch.device("cpu"), 2, 9).items()}
    x, weight, bias, state = t["x"], t["weight"], t["bias"], t["initial_state"]
    cu_seqlens = torch.tensor([0, 1, 2, 9])

    def refuses(kind: type[Exception], text: str, *args: Any, **kwargs: Any) -> None:
        op_checks.assert_refuses(causal_conv1d, kind, text, *args, **kwargs)

    for activation in ("relu", "sigmoid"):
        text = "causal_conv1d: argument `activation`: expected one of None, 'silu', 'swish', got"
        refuses(ValueError, text, x, weight, activation=activation)
    refuses(ValueError, r"argument `weight`: expected a torch.Tensor \[D, W\], got None", x)
    refuses(ValueError, r"argument `weight`: expected shape \[D, W\] = \[12, \*\]", x, weight[:5])
    refuses(ValueError, "argument `weight`: expected shape .* with W >= 1", x, weight[:, :0])
    refuses(ValueError, r"argument `x`: expected shape \[B, T, D\]", x[0], weight)
    refuses(ValueError, r"argument `bias`: expected shape \[D\]", x, weight, bias[:5])
    refuses(ValueError, r"argument `residual`: expected shape \[B, T, D\]", x, weight, residual=x[:, :3])
    text = r"argument `initial_state`: expected shape \[N, D, W\] = "
    refuses(ValueError, text + r"\[2, 12, 4\]", x, weight, initial_state=state[:1])
    refuses(ValueError, text + r"\[3, 12, 4\]", x[:1], weight, initial_state=state, cu_seqlens=cu_seqlens)
    refuses(TypeError, "argument `x`: expected dtype .* got torch.float64", x.double(), weight)
    refuses(TypeError, "argument `weight`: expected dtype .* got torch.int64", x, weight.long())
    refuses(TypeError, "argument `x`: expected a torch.Tensor, got None", None, weight)
    refuses(TypeError, "argument `cu_seqlens`: .* int32 or int64", x[:1], weight, cu_seqlens=cu_seqlens.float())
    refuses(ValueError, "argument `weight`: expected device cpu .* got meta", x, weight.to("meta"))
    for values in ([0, 5, 10], [1, 9], [0, 5, 3, 9]):
        with pytest.raises(ValueError, match="argument `cu_seqlens`: expected non-decreasing offsets"):
            causal_conv1d(x[:1], weight, cu_seqlens=torch.tensor(values))
    with pytest.raises(TypeError, match="seq_idx"):
        causal_conv1d(x, weight, seq_idx=None)  # type: ignore[call-arg]


@pytest.mark.parametrize("dtype", op_checks.DTYPES, ids=str)
@pytest.mark.parametrize("name", op_checks.sample_ids(UPDATE_CONTRACT))
def test_update_reference(name: str, dtype: torch.dtype, device: torch.device) -> None:
    op_checks.assert_matches_reference(
        UPDATE_CONTRACT, op_checks.get_sample(UPDATE_CONTRACT, device, dtype, name), dtype
    )


@pytest.mark.parametrize("backend", op_checks.BACKENDS)
@pytest.mark.parametrize("name", ["packed", "long_cache"])
def test_update_compiles_in_every_backend(name: str, backend: str, device: torch.device) -> None:
    sample = op_checks.get_sample(UPDATE_CONTRACT, device, torch.bfloat16, name)
    op_checks.assert_compiles(UPDATE_CONTRACT, sample, backend, 1e-3)


def test_update_says_what_it_writes() -> None:
    arguments = UPDATE_CONTRACT.op._schema.arguments
    assert [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write] == ["cache"]


@pytest.mark.parametrize("name", ["batch", "long_cache", "view_of_pool"])
def test_update_passes_opcheck(name: str, device: torch.device) -> None:
    sample = op_checks.get_sample(UPDATE_CONTRACT, device, torch.float32, name)
    torch.library.opcheck(UPDATE_CONTRACT.op, (), dict(sample.kwargs))


def test_update_writes_one_layer_of_a_pool(device: torch.device) -> None:
    """The rest of the pool is neither written nor copied, and a later read sees the update."""
    L, N = 40, 5
    x, weight = torch.randn(N, D, device=device), torch.randn(D, W, device=device)
    pool = torch.randn(L, N, D, W, device=device)

    def step(x: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = causal_conv1d_update(x, pool[1], None, weight, None, "silu")
        z, _ = causal_conv1d_update(y, pool[2], None, weight)
        return z, pool[1:3] + 0

    eager = pool.clone()
    expected = step(x, eager)
    actual, code = _compat.run_and_get_code(lambda: torch.compile(step, fullgraph=True)(x, pool))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(eager, pool)
    assert f"({L}, {N}, {D}, {W})" not in "".join(line for line in code[0].splitlines() if "= empty_strided" in line)


def test_update_keeps_what_is_older_in_a_long_cache(device: torch.device) -> None:
    cache = torch.arange(6.0, device=device).repeat(1, 2, 1)
    weight = torch.tensor([[1.0, 10.0, 100.0, 1000.0]], device=device).expand(2, -1)
    y, _ = causal_conv1d_update(torch.full((1, 2), 9.0, device=device), cache, None, weight)
    assert y.tolist() == [[3 + 40 + 500 + 9000] * 2]
    assert cache[0, 0].tolist() == [1, 2, 3, 4, 5, 9]


def test_update_has_gradients(device: torch.device) -> None:
    """Through the cache as well: it is part of the graph once it holds a token that has a gradient."""
    xs = torch.randn(3, 2, D, device=device, requires_grad=True)
    weight = torch.randn(D, W, device=device, requires_grad=True)
    results = []
    for fn in (causal_conv1d_update, torch.compile(causal_conv1d_update, fullgraph=True, backend="aot_eager")):
        cache = torch.zeros(2, D, W, device=device)
        total = torch.zeros((), device=device)
        for x in xs:
            total = total + fn(x, cache, None, weight, None, "silu")[0].square().sum()
        results.append(torch.autograd.grad(total, (xs, weight)))
    y, _ = causal_conv1d(xs.transpose(0, 1), weight, activation="silu")
    expected = torch.autograd.grad(y.square().sum(), (xs, weight))
    for result in results:
        torch.testing.assert_close(result, expected)


def test_update_in_inference_mode(device: torch.device) -> None:
    with torch.inference_mode():
        x, cache = torch.randn(2, D, device=device), torch.zeros(2, D, W, device=device)
        weight = torch.randn(D, W, device=device)
        y, _ = causal_conv1d_update(x, cache, None, weight)
    torch.testing.assert_close(y, x * weight[:, -1])
    assert torch.equal(cache[..., -1], x)


def test_update_bad_input() -> None:
    x, cache, weight = torch.randn(3, D), torch.randn(3, D, W), torch.randn(D, W)
    before = cache.clone()

    def refuses(kind: type[Exception], text: str, *args: Any) -> None:
        op_checks.assert_refuses(causal_conv1d_update, kind, text, *args)

    refuses(ValueError, "causal_conv1d_update: argument `activation`", x, cache, None, weight, None, "gelu")
    refuses(ValueError, "argument `weight`: .* got None", x, cache)
    refuses(TypeError, "argument `cache`: expected a torch.Tensor, got None", x, None, None, weight)
    refuses(ValueError, r"argument `cache`: expected shape \[N, D, W'\] = \[3, 12, \*\]", x, cache[:2], None, weight)
    refuses(ValueError, "argument `cache`: .* with W' >= W = 4", x, cache[..., 1:], None, weight)
    refuses(ValueError, r"argument `x`: expected shape \[N, D\]", torch.randn(3, 2, D), cache, None, weight)
    refuses(ValueError, "argument `residual`: expected shape that of `x`", x, cache, x[:, None], weight)
    refuses(TypeError, "argument `cache`: expected dtype .* got torch.float64", x, cache.double(), None, weight)
    assert torch.equal(cache, before)
