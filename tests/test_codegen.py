"""What Inductor makes of the KDA operators for CUDA without a GPU: which kernels, what fuses, that each compiles."""

from __future__ import annotations

from typing import Any

import nogpu
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

nogpu.install()

import fla_inductor  # noqa: E402
from fla_inductor.lowerings import kda_cpu  # noqa: E402

# graphs with a backward are traced on the CPU and moved to CUDA: there the operators must stay whole
kda_cpu.DECOMPOSE = False

FLAGS: dict[str, Any] = {
    "use_gate_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


def inputs(
    T: int = 512,
    H: int = 2,
    HV: int = 2,
    K: int = 128,
    V: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    grad: bool = False,
) -> tuple[Tensor, ...]:
    def new(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return nogpu.cuda(*size, dtype=dtype, requires_grad=grad)

    return (
        new(1, T, H, K),
        new(1, T, H, K),
        new(1, T, HV, V),
        new(1, T, HV, K),
        new(1, T, HV),
        new(HV, dtype=torch.float32),
        new(HV * K, dtype=torch.float32),
    )


def chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, **kwargs: Any
) -> Tensor:
    return fla_inductor.chunk_kda(q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, **FLAGS, **kwargs)[0]


def with_neighbours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Cheap producers of every input, a cast and a gate after the output."""
    o = chunk(F.silu(q), k.sigmoid(), v * 2, g + 1, beta - 1, A_log, dt_bias)
    return o.float() * torch.sigmoid(v.float())


def templates(launches: list[str]) -> list[str]:
    return [name for name in launches if name.startswith("triton_tem")]


T_IS_DYNAMIC = [(i, 1) for i in range(5)]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic_T"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_forward_is_two_kernels_with_producers_and_consumer_fused(dynamic: bool, dtype: torch.dtype) -> None:
    capture = nogpu.capture(with_neighbours, lambda: inputs(dtype=dtype), mark_dynamic=T_IS_DYNAMIC if dynamic else ())
    launches = capture.launches()
    assert len(launches) == 2, launches
    assert templates(launches) == launches


def test_all_sizes_dynamic_specialises_on_heads_only() -> None:
    assert len(nogpu.capture(with_neighbours, inputs, dynamic=True).launches()) == 2


def test_producers_are_kernels_of_their_own_when_fusion_is_off() -> None:
    config = {"prologue_fusion": False, "epilogue_fusion": False}
    launches = nogpu.capture(with_neighbours, inputs, config=config).launches()
    assert len(templates(launches)) == 2
    assert len(launches) > 2


@pytest.mark.parametrize("state", ["none", "in_and_out"])
def test_no_kernel_fills_or_copies_outputs(state: str) -> None:
    def fn(*args: Tensor) -> Any:
        if state == "none":
            return chunk(*args)
        names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
        kwargs: dict[str, Any] = dict(zip(names, args, strict=True))
        return fla_inductor.chunk_kda(**kwargs, output_final_state=True, **FLAGS)

    make = inputs if state == "none" else lambda: (*inputs(), nogpu.cuda(1, 2, 128, 128))
    launches = nogpu.capture(fn, make).launches()
    assert templates(launches) == launches
    assert len(launches) == 2


def test_packed_sequences_need_no_chunk_table() -> None:
    def fn(*args: Tensor) -> Tensor:
        *rest, cu = args
        return chunk(*rest, cu_seqlens=cu)

    launches = nogpu.capture(
        fn, lambda: (*inputs(), nogpu.cuda(5, dtype=torch.int32)), mark_dynamic=[*T_IS_DYNAMIC, (7, 0)]
    ).launches()
    assert templates(launches) == launches
    assert len(launches) == 2


def test_a_tensor_passed_twice() -> None:
    def fn(q: Tensor, *rest: Tensor) -> Tensor:
        return chunk(q, q, q, *rest[2:])

    assert len(nogpu.capture(fn, inputs).launches()) == 2


@pytest.mark.parametrize(("recompute", "expected"), [(True, 5), (False, 4)], ids=["recompute", "saved_states"])
def test_backward_kernels(recompute: bool, expected: int) -> None:
    """Tiles, states unless saved, reverse scan, two gradient kernels; and two sums over chunks for the parameters."""
    capture = nogpu.capture(
        lambda *a: chunk(*a, disable_recompute=not recompute), lambda: inputs(grad=True), backward=True
    )
    forward, backward = capture.launches(0), capture.launches(1)
    assert len(forward) == 2, forward
    assert len(templates(backward)) == expected, backward
    assert len(backward) == expected + 2, backward


def test_grouped_heads_add_one_sum_each_for_q_and_k() -> None:
    capture = nogpu.capture(chunk, lambda: inputs(HV=4, grad=True), backward=True)
    assert len(capture.launches(1)) == 5 + 2 + 2, capture.launches(1)


def test_recurrent_is_one_kernel() -> None:
    def step(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, h0: Tensor
    ) -> Any:
        return fla_inductor.fused_recurrent_kda(
            F.silu(q),
            k,
            v,
            g,
            beta,
            A_log,
            dt_bias,
            initial_state=h0,
            output_final_state=True,
            state_v_first=True,
            **FLAGS,
        )

    assert len(nogpu.capture(step, lambda: (*inputs(T=1), nogpu.cuda(1, 2, 128, 128))).launches()) == 1


@pytest.mark.parametrize("sm", [80, 90, 100])
def test_generated_kernels_compile(sm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The templates as Inductor renders them, with fused producers and consumer, forward and backward."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (sm // 10, sm % 10))
    forward = nogpu.capture(with_neighbours, lambda: inputs(HV=4, K=96, V=64), mark_dynamic=T_IS_DYNAMIC)
    backward = nogpu.capture(chunk, lambda: inputs(grad=True), backward=True)
    kernels = forward.kernels + [k for k in backward.kernels if k.graph == 1]
    for kernel in kernels:
        assert nogpu.compile_kernel(kernel, sm=sm).asm["cubin"], kernel.name
