"""KimiDeltaAttention: FLA's parameters, caching in pieces, padding, packing, compilation."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from fla_inductor.layers import FusedRMSNormGated, KDACache, KimiDeltaAttention, ShortConvolution

# what FLA 0.6.0 gives a layer of these sizes: hidden 32, K 8, V 12, H 2, HV 4, W 4, with convolution biases
SIZES: dict[str, Any] = {"hidden_size": 32, "head_dim": 8, "num_heads": 2, "num_v_heads": 4, "expand_v": 1.5}
FLA_STATE_DICT = {
    "A_log": (4,),
    "dt_bias": (32,),
    "q_proj.weight": (16, 32),
    "k_proj.weight": (16, 32),
    "v_proj.weight": (48, 32),
    "q_conv1d.weight": (16, 1, 4),
    "q_conv1d.bias": (16,),
    "k_conv1d.weight": (16, 1, 4),
    "k_conv1d.bias": (16,),
    "v_conv1d.weight": (48, 1, 4),
    "v_conv1d.bias": (48,),
    "f_proj.0.weight": (12, 32),
    "f_proj.1.weight": (32, 12),
    "b_proj.weight": (4, 32),
    "g_proj.0.weight": (12, 32),
    "g_proj.1.weight": (48, 12),
    "g_proj.1.bias": (48,),
    "o_norm.weight": (12,),
    "o_proj.weight": (32, 48),
}


def make_layer(**changes: Any) -> KimiDeltaAttention:
    return KimiDeltaAttention(**{**SIZES, "layer_idx": 0, **changes})


def error_ratio(expected: Tensor, actual: Tensor) -> float:
    expected, actual = expected.detach().double(), actual.detach().double()
    return float((expected - actual).square().mean().sqrt() / expected.square().mean().sqrt())


def test_parameters_are_those_of_fla():
    layer = make_layer(conv_bias=True)
    assert {name: tuple(x.shape) for name, x in layer.state_dict().items()} == FLA_STATE_DICT
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32


def test_arguments_and_defaults_are_those_of_fla():
    defaults = {name: p.default for name, p in inspect.signature(KimiDeltaAttention).parameters.items()}
    assert defaults == {
        "hidden_size": 2048,
        "expand_v": 1,
        "head_dim": 128,
        "num_heads": 16,
        "num_v_heads": None,
        "mode": "chunk",
        "use_short_conv": True,
        "allow_neg_eigval": False,
        "safe_gate": False,
        "lower_bound": None,
        "conv_size": 4,
        "conv_bias": False,
        "layer_idx": None,
        "norm_eps": 1e-5,
    }
    call = [
        "self",
        "hidden_states",
        "attention_mask",
        "past_key_values",
        "use_cache",
        "output_attentions",
        "cu_seqlens",
    ]
    assert list(inspect.signature(KimiDeltaAttention.forward).parameters) == call


def test_state_dict_moves_between_layers():
    one, two = make_layer(), make_layer()
    two.load_state_dict(one.state_dict())
    x = torch.randn(2, 21, 32)
    assert torch.equal(one(x)[0], two(x)[0])


def test_initial_gate_is_that_of_fla():
    layer = KimiDeltaAttention(hidden_size=32, head_dim=64, num_heads=16)
    rate, step = layer.A_log.exp(), torch.nn.functional.softplus(layer.dt_bias)
    assert 1 <= rate.min() < 4 < 12 < rate.max() <= 16
    assert 1e-3 * 0.999 <= step.min() < 2e-3 < 5e-2 < step.max() <= 0.1 * 1.001
    assert make_layer(safe_gate=True, lower_bound=-5.0).A_log.eq(0).all()


VARIANTS: list[dict[str, Any]] = [
    {},
    {"use_short_conv": False},
    {"conv_bias": True, "allow_neg_eigval": True, "mode": "fused_recurrent"},
    {"safe_gate": True, "lower_bound": -5.0},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda c: "-".join(c) or "default")
@pytest.mark.parametrize(
    "pieces", [(1, 3, 64, 65, 67), (200,), (70,) + (1,) * 20 + (110,)], ids=["odd", "one", "decode"]
)
@torch.no_grad()
def test_pieces_equal_the_whole(changes, pieces):
    layer = make_layer(**changes)
    x = torch.randn(2, 200, 32)
    whole, _, none = layer(x)
    assert none is None
    cache, outputs = KDACache(), []
    for piece in x.split(list(pieces), 1):
        o, _, same = layer(piece, past_key_values=cache, use_cache=True)
        assert same is cache
        outputs.append(o)
    assert error_ratio(whole, torch.cat(outputs, 1)) < 1e-5
    _, _, at_once = layer(x, use_cache=True)
    assert at_once is not None
    for mine, theirs in zip(flat(cache), flat(at_once), strict=True):
        assert error_ratio(theirs, mine) < 1e-5


def flat(cache: KDACache) -> list[Tensor]:
    state = cache.get(0)
    assert state is not None
    return [state.recurrent, *(state.conv or ())]


@torch.no_grad()
def test_shapes_of_the_state():
    _, _, cache = make_layer()(torch.randn(3, 2, 32), use_cache=True)
    assert [list(x.shape) for x in flat(cache)] == [[3, 4, 12, 8], [3, 16, 4], [3, 16, 4], [3, 48, 4]]
    assert flat(cache)[0].dtype == torch.float32


@torch.no_grad()
def test_a_copy_of_the_cache_is_a_snapshot():
    layer, x = make_layer(), torch.randn(1, 9, 32)
    _, _, cache = layer(x[:, :8], use_cache=True)
    snapshot = cache.copy()
    first = layer(x[:, 8:], past_key_values=cache, use_cache=True)[0]
    assert not torch.equal(flat(snapshot)[0], flat(cache)[0])
    assert torch.equal(layer(x[:, 8:], past_key_values=snapshot, use_cache=True)[0], first)


@torch.no_grad()
def test_without_use_cache_the_cache_is_read_only():
    layer, x = make_layer(), torch.randn(1, 9, 32)
    _, _, cache = layer(x[:, :8], use_cache=True)
    before = flat(cache)
    o, _, same = layer(x[:, 8:], past_key_values=cache)
    assert same is cache
    assert all(a is b for a, b in zip(before, flat(cache), strict=True))
    assert error_ratio(layer(x)[0][:, 8:], o) < 1e-5


def padded(x: Tensor, lengths: Sequence[int], left: bool) -> tuple[Tensor, Tensor]:
    """`x` with garbage in the padding, and the mask."""
    tokens = torch.arange(x.shape[1])
    length = torch.tensor(lengths)[:, None]
    mask = tokens >= x.shape[1] - length if left else tokens < length
    return torch.where(mask[..., None], x, torch.nan), mask


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda c: "-".join(c) or "default")
@torch.no_grad()
def test_left_padding_equals_no_padding(changes):
    layer, lengths = make_layer(**changes), [67, 130, 1, 0]
    x, mask = padded(torch.randn(4, 130, 32), lengths, left=True)
    o, _, cache = layer(x, attention_mask=mask.long(), use_cache=True)
    following = torch.randn(4, 2, 32)
    o2 = layer(following, attention_mask=torch.cat([mask, mask.new_ones(4, 2)], 1), past_key_values=cache)[0]
    for i, length in enumerate(lengths):
        start = 130 - length
        assert o[i, :start].eq(0).all()
        alone = layer(torch.cat([x[i, start:], following[i]])[None])[0][0]
        assert error_ratio(alone, torch.cat([o[i, start:], o2[i]])) < 1e-5


@torch.no_grad()
def test_left_padding_longer_than_the_first_piece():
    layer = make_layer()
    x, mask = padded(torch.randn(2, 40, 32), [25, 40], left=True)
    cache, outputs = KDACache(), []
    for start in (0, 10, 20):
        seen = start + (10 if start < 20 else 20)
        piece = layer(x[:, start:seen], attention_mask=mask[:, :seen], past_key_values=cache, use_cache=True)[0]
        outputs.append(piece)
    alone = layer(x[:1, 15:])[0]
    assert error_ratio(alone, torch.cat(outputs, 1)[:1, 15:]) < 1e-5


def parameter_gradients(layer: KimiDeltaAttention) -> list[Tensor]:
    return [p.grad.flatten() for p in layer.parameters() if p.grad is not None]


def test_padding_leaves_gradients_alone():
    layer, lengths = make_layer(), [20, 33]
    clean = torch.randn(2, 33, 32)
    alone = [clean[0, :20].clone().requires_grad_(), clean[1].clone().requires_grad_()]
    for sequence in alone:
        layer(sequence[None])[0].square().sum().backward()
    expected = torch.cat([*(x.grad.flatten() for x in alone if x.grad is not None), *parameter_gradients(layer)])
    for left in (True, False):
        x, mask = padded(torch.stack([clean[0].roll(13 if left else 0, 0), clean[1]]), lengths, left)
        x.requires_grad_()
        layer.zero_grad()
        layer(x, attention_mask=mask)[0].square().sum().backward()
        assert x.grad is not None
        assert x.grad[~mask].eq(0).all()
        assert error_ratio(expected, torch.cat([x.grad[mask].flatten(), *parameter_gradients(layer)])) < 1e-5


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@torch.no_grad()
def test_packed_sequences_equal_separate_ones(dtype):
    layer, lengths = make_layer(), [0, 67, 1, 0, 40]
    sequences = [torch.randn(1, n, 32) for n in lengths]
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(dtype)
    o, _, cache = layer(torch.cat(sequences, 1), use_cache=True, cu_seqlens=offsets)
    for i, sequence in enumerate(sequences):
        if not sequence.shape[1]:
            assert all(x[i].eq(0).all() for x in flat(cache))
            continue
        alone, _, its_cache = layer(sequence, use_cache=True)
        assert error_ratio(alone, o[:, offsets[i] : offsets[i + 1]]) < 1e-5
        for mine, theirs in zip(flat(cache), flat(its_cache), strict=True):
            assert error_ratio(theirs[0], mine[i]) < 1e-5


def test_offsets_win_over_a_mask():
    layer, x = make_layer(), torch.randn(1, 9, 32)
    offsets = torch.tensor([0, 4, 9])
    masked = layer(x, attention_mask=torch.zeros(1, 9), cu_seqlens=offsets)[0]
    assert torch.equal(masked, layer(x, cu_seqlens=offsets)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype):
    layer, x = make_layer(), torch.randn(2, 70, 32)
    expected = layer(x)[0]
    low = make_layer().to(dtype)
    low.load_state_dict(layer.state_dict())
    o = low(x.to(dtype))[0]
    assert o.dtype == dtype
    assert error_ratio(expected, o) < 3e-2
    with torch.autocast("cpu", dtype=dtype):
        mixed = layer(x)[0]
    assert mixed.dtype == dtype
    assert error_ratio(expected, mixed) < 3e-2


BAD_CONSTRUCTION = [
    ({"expand_v": 1.3}, "expand_v"),
    ({"num_v_heads": 3}, "num_v_heads"),
    ({"mode": "parallel"}, "mode"),
    ({"safe_gate": True}, "lower_bound"),
    ({"safe_gate": True, "lower_bound": -6.0}, "lower_bound"),
]


@pytest.mark.parametrize(("changes", "argument"), BAD_CONSTRUCTION, ids=lambda x: str(x))
def test_bad_construction(changes, argument):
    with pytest.raises(ValueError, match=f"KimiDeltaAttention: argument `{argument}`: expected .*, got "):
        make_layer(**changes)


def test_an_unknown_argument_is_an_error():
    with pytest.raises(TypeError, match="head_size"):
        KimiDeltaAttention(head_size=64)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="cu_seqlen"):
        make_layer()(torch.randn(1, 3, 32), cu_seqlen=None)
    with pytest.raises(ValueError, match="activation"):
        ShortConvolution(4, 4, activation="relu")
    with pytest.raises(ValueError, match="activation"):
        FusedRMSNormGated(4, activation="relu")


# by argument; what a mask holds is looked at in eager mode only
BAD_CALLS: list[tuple[dict[str, Any], str, type[Exception]]] = [
    ({"hidden_states": torch.zeros(2, 7, 31)}, "hidden_states", ValueError),
    ({"hidden_states": torch.zeros(7, 32)}, "hidden_states", ValueError),
    ({"attention_mask": torch.ones(2, 1, 7, 7)}, "attention_mask", ValueError),
    ({"attention_mask": torch.ones(2, 6)}, "attention_mask", ValueError),
    ({"attention_mask": torch.ones(3, 7)}, "attention_mask", ValueError),
    ({"output_attentions": True}, "output_attentions", ValueError),
    ({"past_key_values": {}}, "past_key_values", TypeError),
    ({"cu_seqlens": torch.tensor([0, 3, 7])}, "cu_seqlens", ValueError),
]
BAD_MASKS: list[dict[str, Any]] = [
    {"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1, 1]] * 2)},
    {"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 0]] * 2)},
    {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]] * 2), "use_cache": True},
]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("arguments", "name", "kind"), BAD_CALLS, ids=[f"{i}-{c[1]}" for i, c in enumerate(BAD_CALLS)])
def test_bad_call(arguments, name, kind, compiled, fresh_compile):
    layer = make_layer()
    call = torch.compile(layer, fullgraph=True, backend="eager") if compiled else layer
    with pytest.raises(kind, match=f"argument `{name}`: expected .*, got "):
        call(**{"hidden_states": torch.randn(2, 7, 32), **arguments})


@pytest.mark.parametrize("arguments", BAD_MASKS)
def test_bad_mask(arguments):
    with pytest.raises(ValueError, match=r"argument `attention_mask`: expected padding .*, got padding "):
        make_layer()(torch.randn(2, 7, 32), **arguments)


def test_caching_needs_a_layer_index():
    with pytest.raises(ValueError, match="layer_idx"):
        make_layer(layer_idx=None)(torch.randn(1, 3, 32), use_cache=True)


def gradients(layer: KimiDeltaAttention, fn: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    layer.zero_grad()
    o = fn(*args, **kwargs)[0]
    o.square().sum().backward()
    return o.detach(), torch.cat(parameter_gradients(layer))


def test_compiled_training_with_padding(fresh_compile):
    layer = make_layer()
    x, mask = padded(torch.randn(2, 70, 32), [70, 33], left=True)
    # Inductor compiles the same layer in the demonstration (test_demo.py)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected, expected_gradients = gradients(layer, layer, x, attention_mask=mask)
    o, grads = gradients(layer, compiled, x, attention_mask=mask)
    assert error_ratio(expected, o) < 1e-5
    assert error_ratio(expected_gradients, grads) < 1e-5


def test_compiled_decoding_compiles_three_graphs(fresh_compile):
    """Prefill without a state, a step with one, and no more however many steps follow."""
    layer, x = make_layer(), torch.randn(2, 40, 32)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.no_grad():
        whole = layer(x)[0]
        cache = KDACache()
        pieces = x.split([20] + [1] * 20, 1)
        outputs = [compiled(piece, past_key_values=cache, use_cache=True)[0] for piece in pieces]
    assert error_ratio(whole, torch.cat(outputs, 1)) < 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


def test_three_layers_are_one_graph(fresh_compile):
    layers = torch.nn.ModuleList(make_layer(layer_idx=i) for i in range(3))

    def stack(x: Tensor) -> Tensor:
        for layer in layers:
            x = x + layer(x)[0]
        return x

    explained = torch._dynamo.explain(stack)(torch.randn(1, 9, 32))
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)
    ops = [str(node.target) for node in explained.graphs[0].graph.nodes if "fla_inductor.chunk_kda" in str(node.target)]
    assert len(ops) == 3


def test_three_layers_train_as_one_graph(fresh_compile):
    """Forward and backward of a loop over layers, with the operator in both graphs; nothing falls back to eager."""
    layers = torch.nn.ModuleList(make_layer(layer_idx=i) for i in range(3))
    seen: list[str] = []

    def record(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if "fla_inductor.chunk_kda" in str(node.target))
        return make_boxed_func(graph)

    @torch.compile(backend=aot_autograd(fw_compiler=record, bw_compiler=record))
    def stack(x: Tensor) -> Tensor:
        for layer in layers:
            x = x + layer(x)[0]
        return x

    stack(torch.randn(1, 9, 32)).sum().backward()
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert seen == ["fla_inductor.chunk_kda.default"] * 3 + ["fla_inductor.chunk_kda_backward.default"] * 3
    assert all(p.grad is not None for layer in layers for p in layer.parameters())


def test_exports_with_any_length():
    layer = make_layer().eval()
    length = torch.export.Dim("T", min=2, max=4096)
    with torch.no_grad():
        program = torch.export.export(layer, (torch.randn(2, 70, 32),), dynamic_shapes={"hidden_states": {1: length}})
        for tokens in (2, 64, 65, 200):
            x = torch.randn(2, tokens, 32)
            assert error_ratio(layer(x)[0], program.module()(x)[0]) < 1e-5
