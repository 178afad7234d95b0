"""What users put around KDA: producers with odd layouts, consumers that fuse, decode loops, lengths of all kinds.

`test_kda` and `test_kda_compiled` run these on the CPU, `test_gpu` on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import kda_behaviour
import op_checks
import pytest
import torch
from torch import Tensor
from torch._inductor import config

import fla_inductor
from fla_inductor.contract import REGISTRY
from fla_inductor.custom_ops.kda import make_sample

H, K = 21, 50
PADDING = [(True, True), (True, False), (False, True), (False, False)]


def _projected(x: Tensor, w: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """q and k are slices of a product whose rows Inductor may pad, and lie heads first for a while."""
    B, T, _ = x.shape
    q, k = ((x @ part).view(B, T, H, K).transpose(1, 2).contiguous().transpose(1, 2) for part in w.unbind())
    o, _ = fla_inductor.chunk_kda(q, k, v, g, beta, **kda_behaviour.FLAGS)
    step, _ = fla_inductor.fused_recurrent_kda(q, k, v, g, beta, **kda_behaviour.FLAGS)
    y, _ = fla_inductor.causal_conv1d(q.flatten(2), w[0, :3].T.contiguous(), activation="silu")
    return o + step + y.view(B, T, H, K)


def projections_with_odd_rows(device: str, padding: tuple[bool, bool], tolerance: float) -> None:
    """Rows of 1,050 elements: above the length from which Inductor pads strides, and no multiple of 16 bytes."""
    generator = torch.Generator().manual_seed(5)

    def rn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, torch.bfloat16 if device == "cuda" else None)

    arguments = [rn(2, 40, 32), rn(2, 32, H * K), rn(2, 40, H, K), rn(2, 40, H, K), rn(2, 40, H)]

    def step(fn: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in arguments]
        o = fn(*leaves)
        return [o, *torch.autograd.grad(o.float().square().sum(), leaves)]

    comprehensive, shape = padding
    with config.patch(comprehensive_padding=comprehensive, shape_padding=shape):
        compiled = step(torch.compile(_projected, fullgraph=True))
    for i, (expected, x) in enumerate(zip(step(_projected), compiled, strict=True)):
        assert op_checks.error_ratio(expected, x) < tolerance, i


CONSUMERS: dict[str, Callable[[Tensor], Any]] = {
    "transposed": lambda o: o.transpose(1, 2).contiguous(),
    "relu": torch.relu,
    "reciprocal": lambda o: 1 / (o.abs() + 1),
    "two_users": lambda o: (torch.relu(o), o.float().sum(-1)),
    "cast": lambda o: o.float(),
    "second_op": lambda o: fla_inductor.l2norm(torch.sigmoid(o)),
    "in_place": lambda o: o.mul_(2).add_(1),
}


def consumer_is_the_same_fused(device: str, name: str, fused: bool, tolerance: float) -> None:
    x = kda_behaviour.inputs(device, T=70, dtype=torch.bfloat16 if device == "cuda" else torch.float32)

    def fn(x: dict[str, Any]) -> Any:
        return CONSUMERS[name](fla_inductor.chunk_kda(**x, **kda_behaviour.FLAGS)[0])

    with torch.no_grad(), config.patch(epilogue_fusion=fused, prologue_fusion=fused):
        results = torch.utils._pytree.tree_leaves(torch.compile(fn, fullgraph=True)(x))
        for expected, result in zip(torch.utils._pytree.tree_leaves(fn(x)), results, strict=True):
            assert (expected.dtype, expected.stride()) == (result.dtype, result.stride())
            assert op_checks.error_ratio(expected, result) < tolerance


def decode_loop_feeds_states_back(mark: bool, clone: bool) -> None:
    """Results of one replay are inputs of the next: right when cloned, as PyTorch asks for, else right or an error."""
    x = kda_behaviour.inputs("cuda", T=6, K=32, V=32)
    weight = torch.randn(64, 4, device="cuda", dtype=torch.bfloat16)
    arguments: dict[str, Any] = {"A_log": x.pop("A_log"), "dt_bias": x.pop("dt_bias"), "output_final_state": True}

    def step(token: dict[str, Any], conv_state: Tensor, state: Tensor) -> Any:
        v = token["v"]
        y, conv_state_out = fla_inductor.causal_conv1d(
            v.flatten(2), weight, initial_state=conv_state, output_final_state=True, activation="silu"
        )
        token = {**token, "v": y.view(v.shape)}
        o, state_out = fla_inductor.fused_recurrent_kda(
            **token, **arguments, initial_state=state, **kda_behaviour.FLAGS
        )
        return o, conv_state_out, state_out

    def loop(fn: Callable[..., Any]) -> list[Tensor]:
        conv_state = torch.zeros(1, 64, 4, device="cuda", dtype=torch.bfloat16)
        state = torch.zeros(1, 2, 32, 32, device="cuda")
        outputs = []
        for t in range(6):
            if mark:
                torch.compiler.cudagraph_mark_step_begin()
            o, conv_state, state = fn({n: t_.narrow(1, t, 1) for n, t_ in x.items()}, conv_state, state)
            outputs.append(o.clone())
            if clone:
                conv_state, state = conv_state.clone(), state.clone()
        return outputs

    with torch.no_grad():
        expected = loop(step)
        try:
            outputs = loop(torch.compile(step, fullgraph=True, mode="reduce-overhead"))
        except RuntimeError as error:
            if clone or "overwritten by a subsequent run" not in str(error):
                raise
            return
    for a, b in zip(expected, outputs, strict=True):
        assert op_checks.error_ratio(a, b) < 5e-3


def every_length_and_head_size_of_users(device: str, K: int, V: int, lengths: Iterable[int]) -> None:
    """Short, and next to the sizes of tiles; one kernel serves all lengths."""
    contract = REGISTRY["chunk_kda"]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    for T in lengths:
        sample = make_sample(torch.device(device), dtype, "lengths", T=T, K=K, V=V, HV=4)
        op_checks.assert_matches_reference(contract, sample, dtype)


def parametrize_padding(test: Any) -> Any:
    ids = [f"comprehensive_{a}-shape_{b}".lower() for a, b in PADDING]
    return pytest.mark.parametrize("padding", PADDING, ids=ids)(test)
