"""How many GPU kernels Inductor makes of the operators that it sees as aten operators, with their neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import nogpu
import pytest
import torch
from torch import Tensor

from fla_inductor.custom_ops.causal_conv1d import causal_conv1d
from fla_inductor.custom_ops.kda_gate import fused_kda_gate
from fla_inductor.custom_ops.l2norm import l2norm
from fla_inductor.custom_ops.rms_norm_gated import rms_norm_gated

B, T, H, K, W = 2, 300, 4, 64, 4
D = H * K
BF16 = torch.bfloat16


def half(*size: int, grad: bool = False) -> Tensor:
    return nogpu.cuda(*size, dtype=BF16, requires_grad=grad)


def single(*size: int, grad: bool = False) -> Tensor:
    return nogpu.cuda(*size, requires_grad=grad)


def conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    return causal_conv1d(x, weight, bias, activation="silu", cu_seqlens=cu_seqlens)[0]


def norm(x: Tensor, g: Tensor, weight: Tensor) -> Tensor:
    y = rms_norm_gated(x.relu(), g, weight, None, "sigmoid")
    assert isinstance(y, Tensor)
    return y * 2


def packed_inputs(grad: bool = False) -> tuple[Tensor, ...]:
    offsets = nogpu.cuda(9, dtype=torch.int64)
    return half(1, T, D, grad=grad), single(D, W, grad=grad), single(D, grad=grad), offsets


def launches(
    fn: Callable[..., Any], make: Callable[[], Sequence[Tensor]], dynamic: Sequence[int], backward: bool = False
) -> list[int]:
    """Kernels of the forward and of the backward graph, T being dynamic; each compiles for sm_90."""
    capture = nogpu.capture(
        fn,
        make,
        mark_dynamic=[(i, 1) for i in dynamic],
        backward=backward,
        # folding would run `torch.where`'s scalar on the device
        config={"joint_graph_constant_folding": False},
    )
    for kernel in capture.kernels:
        assert nogpu.compile_kernel(kernel).asm["cubin"]
    return [len(capture.launches(i)) for i in range(len(capture.codes))]


@pytest.mark.parametrize(
    ("fn", "make", "dynamic"),
    [
        (conv, lambda: (half(B, T, D), single(D, W), single(D)), [0]),
        (lambda x, w: l2norm(conv(x, w).unflatten(-1, (H, K))), lambda: (half(B, T, D), half(D, W)), [0]),
        (fused_kda_gate, lambda: (half(B, T, H, K), single(H), single(D)), [0]),
        (norm, lambda: (half(B, T, H, K), half(B, T, H, K), single(K)), [0, 1]),
    ],
    ids=["conv", "conv_l2norm", "gate", "norm_with_neighbours"],
)
def test_one_kernel(fn: Any, make: Any, dynamic: list[int]) -> None:
    assert launches(fn, make, dynamic) == [1]


def test_convolutions_of_q_k_v_share_a_kernel() -> None:
    def project(x: Tensor, weight: Tensor) -> list[Tensor]:
        q, k, v = (conv(part, weight).unflatten(-1, (H, K)) for part in x.chunk(3, -1))
        return [l2norm(q), l2norm(k), v]

    assert launches(project, lambda: (half(B, T, 3 * D), half(D, W)), [0])[0] <= 2


def test_packed_convolution_searches_once() -> None:
    """One small kernel finds the sequence of each token, the other one convolves."""
    assert launches(conv, packed_inputs, [0]) == [2]


def test_training_writes_nothing_extra_in_the_forward() -> None:
    """Backward: gradient of the pre-activation, of x, partial sums, and a last sum for each column and the bias."""
    forward, backward = launches(
        conv, lambda: (half(B, T, D, grad=True), single(D, W, grad=True), single(D, grad=True)), [0], backward=True
    )
    assert forward == 1
    assert backward <= 3 + W + 1
    assert launches(conv, lambda: packed_inputs(grad=True), [0], backward=True)[0] == 2


@pytest.mark.parametrize(
    ("fn", "make", "dynamic", "backward_kernels"),
    [
        (l2norm, lambda: (half(B, T, H, K, grad=True),), [0], 1),
        (norm, lambda: (*(half(B, T, H, K, grad=True) for _ in range(2)), single(K, grad=True)), [0, 1], 3),
        (fused_kda_gate, lambda: (half(B, T, H, K, grad=True), single(H, grad=True), single(D, grad=True)), [0], 5),
    ],
    ids=["l2norm", "norm_with_neighbours", "gate"],
)
def test_training(fn: Any, make: Any, dynamic: list[int], backward_kernels: int) -> None:
    forward, backward = launches(fn, make, dynamic, backward=True)
    assert forward == 1
    assert backward <= backward_kernels
