"""Everything that needs a GPU: `pytest -m gpu` on a machine that has one (about four minutes on an H200 with -n 8)."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import kda_behaviour
import kda_neighbours
import op_checks
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from triton.runtime.jit import JITFunction

import fla_inductor
from fla_inductor.contract import REGISTRY

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def _cases() -> list[tuple[str, str, torch.dtype]]:
    """Every sample in bfloat16, and by turns in float32 or float16: compiling the kernels is all the time goes into."""
    cases = []
    for op, contract in REGISTRY.items():
        for i, name in enumerate(op_checks.sample_ids(contract)):
            cases += [(op, name, torch.bfloat16), (op, name, (torch.float32, torch.float16)[i % 2])]
    return cases


CASES = _cases()


@pytest.mark.parametrize(
    ("op", "name", "dtype"), CASES, ids=[f"{op}-{name}-{str(dtype)[6:]}" for op, name, dtype in CASES]
)
def test_matches_reference(op: str, name: str, dtype: torch.dtype) -> None:
    contract = REGISTRY[op]
    op_checks.assert_matches_reference(contract, op_checks.get_sample(contract, CUDA, dtype, name), dtype)


@pytest.mark.parametrize(
    ("K", "V", "dtype"),
    [
        (8, 8, torch.bfloat16),
        (32, 64, torch.bfloat16),
        (64, 64, torch.bfloat16),
        (96, 128, torch.bfloat16),
        (100, 50, torch.bfloat16),
        (128, 128, torch.bfloat16),
        (192, 40, torch.bfloat16),
        (256, 256, torch.bfloat16),
        (64, 64, torch.float32),
        (128, 128, torch.float32),
        (256, 32, torch.float32),
    ],
)
def test_head_sizes(K: int, V: int, dtype: torch.dtype) -> None:
    """Tiles and instructions change with the head size, and on Hopper some combinations are miscompiled by Triton."""
    from fla_inductor.custom_ops.kda import make_sample

    contract = REGISTRY["chunk_kda"]
    sample = make_sample(CUDA, dtype, "sizes", T=200, HV=8, K=K, V=V)
    op_checks.assert_matches_reference(contract, sample, dtype)


@pytest.mark.parametrize(("K", "V"), [(16, 60), (64, 128), (128, 64), (32, 256)])
def test_every_length(K: int, V: int) -> None:
    kda_neighbours.every_length_and_head_size_of_users("cuda", K, V, (1, 2, 7, 8, 15, 16, 17, 63, 64, 65, 127))


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_no_A_log_is_unit_scale_bit_for_bit(lower_bound: float | None) -> None:
    kda_behaviour.no_A_log_is_unit_scale_bit_for_bit("cuda", lower_bound)


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_future_tokens_change_nothing_before_them(lower_bound: float | None, strong: bool) -> None:
    kda_behaviour.future_tokens_change_nothing_before_them("cuda", lower_bound, strong)


def test_minus_infinity_is_a_full_reset() -> None:
    kda_behaviour.minus_infinity_is_a_full_reset("cuda")


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_garbage_after_the_last_sequence_stays_there(op: str) -> None:
    kda_behaviour.garbage_after_the_last_sequence_stays_there("cuda", op)


def test_offsets_that_are_wrong_stay_in_bounds() -> None:
    kda_behaviour.offsets_that_are_wrong_stay_in_bounds("cuda")
    torch.cuda.synchronize()


def test_saved_states_give_the_gradients_of_recomputed_ones() -> None:
    kda_behaviour.saved_states_give_the_gradients_of_recomputed_ones("cuda")


def layer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Cheap producers of the inputs and a gate after the output."""
    o = fla_inductor.chunk_kda(
        F.silu(q), k.sigmoid(), v * 2, g, beta, A_log=A_log, dt_bias=dt_bias, **kda_behaviour.FLAGS
    )[0]
    return o.float() * torch.sigmoid(v.float())


def arguments(T: int, grad: bool = False) -> list[Tensor]:
    x = kda_behaviour.inputs("cuda", T=T, K=128, V=128)
    return [x[n].requires_grad_(grad) for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")]


def test_producers_and_consumer_fuse(fresh_compile: None) -> None:
    with torch.no_grad():
        x = arguments(300)
        o, (code, *_) = run_and_get_code(torch.compile(layer, fullgraph=True), *x)
        launches = [line.split(".run(")[0].strip() for line in code.splitlines() if ".run(" in line]
        assert len(launches) == 2, launches
        assert all(name.startswith("triton_tem") for name in launches), launches
        assert op_checks.error_ratio(layer(*x), o) < 5e-3


@kda_neighbours.parametrize_padding
def test_projections_with_odd_rows(padding: tuple[bool, bool], fresh_compile: None) -> None:
    kda_neighbours.projections_with_odd_rows("cuda", padding, 1.5e-2)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
@pytest.mark.parametrize("name", kda_neighbours.CONSUMERS)
def test_consumer_is_the_same_fused(name: str, fused: bool, fresh_compile: None) -> None:
    kda_neighbours.consumer_is_the_same_fused("cuda", name, fused, 5e-3)


@pytest.mark.parametrize("clone", [True, False], ids=["cloned", "replayed"])
@pytest.mark.parametrize("mark", [True, False], ids=["marked", "unmarked"])
def test_decode_loop_feeds_states_back(mark: bool, clone: bool, fresh_compile: None) -> None:
    kda_neighbours.decode_loop_feeds_states_back(mark, clone)


def test_kernels_are_compiled_once_for_all_lengths() -> None:
    """After two lengths there is nothing left to compile, forward or backward."""
    counts = []
    with mock.patch.object(JITFunction, "_do_compile", autospec=True, side_effect=JITFunction._do_compile) as compile_:
        for T in (64, 65, 1, 130, 1000, 1024, 77):
            kda_behaviour.run(kda_behaviour.inputs("cuda", T=T, K=64, V=48, HV=3))
            counts.append(compile_.call_count)
    assert counts[0] > 0
    assert counts[1:] == counts[1:2] * (len(counts) - 1)


FIRST_CALL = """
import torch
import kda_behaviour, op_checks, fla_inductor
x = kda_behaviour.inputs("cuda", T=100, K=64, V=64)
graph = torch.cuda.CUDAGraph()
with torch.no_grad():
    with torch.cuda.graph(graph):
        o, ht = fla_inductor.chunk_kda(**x, output_final_state=True, **kda_behaviour.FLAGS)
    graph.replay()
    expected, expected_ht = fla_inductor.chunk_kda(**x, output_final_state=True, **kda_behaviour.FLAGS)
assert torch.equal(o, expected) and torch.equal(ht, expected_ht)
"""


def test_the_first_call_ever_may_be_captured(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", FIRST_CALL], check=True, env=environment)


def test_one_graph_for_all_lengths(fresh_compile: None) -> None:
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for T in (1, 7, 64, 65, 130, 1000):
            x = arguments(T)
            assert op_checks.error_ratio(layer(*x), compiled(*x)) < 5e-3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def _gradients(fn: Callable[..., Tensor], T: int) -> list[Tensor]:
    x = arguments(T, grad=True)
    return list(torch.autograd.grad(fn(*x).square().sum(), x))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_training_step(fresh_compile: None, mode: str) -> None:
    """Under reduce-overhead the step is captured as CUDA graphs, or the test fails."""
    with config.patch({"triton.cudagraph_or_error": mode == "reduce-overhead"}):
        compiled = torch.compile(layer, fullgraph=True, mode=mode)
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            grads = [grad.clone() for grad in _gradients(compiled, 300)]
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
    for name, expected, grad in zip(names, _gradients(layer, 300), grads, strict=True):
        # eager rounds the output to bfloat16 before the gate, compiled code need not; A_log is two cancelling sums
        assert op_checks.error_ratio(expected, grad) < (5e-2 if name == "A_log" else 1.5e-2), name


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_packed_sequences_do_not_synchronise(op: str) -> None:
    x = {n: t.requires_grad_() for n, t in kda_behaviour.inputs("cuda", T=90).items()}
    cu = torch.tensor([0, 30, 30, 75], dtype=torch.int32, device=CUDA)
    fn = getattr(fla_inductor, op)

    def step() -> None:
        o, _ = fn(**x, cu_seqlens=cu, **kda_behaviour.FLAGS)
        torch.autograd.grad(o.float().sum(), list(x.values()))

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_kernels_are_captured_by_hand_and_follow_new_offsets() -> None:
    x = kda_behaviour.inputs("cuda", T=200, K=64, V=64)
    cu = torch.tensor([0, 50, 120, 200], dtype=torch.int32, device=CUDA)

    def run() -> Any:
        return fla_inductor.chunk_kda(**x, cu_seqlens=cu, output_final_state=True, **kda_behaviour.FLAGS)

    with torch.no_grad():
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o, ht = run()
        cu.copy_(torch.tensor([0, 3, 180, 190], dtype=torch.int32))
        graph.replay()
        o_eager, ht_eager = run()
    assert torch.equal(o, o_eager)
    assert torch.equal(ht, ht_eager)


class Layer(torch.nn.Module):
    def forward(self, *x: Tensor) -> Tensor:
        return layer(*x)


LOADER = """
import sys, torch
package, data = sys.argv[1:]
model = torch._inductor.aoti_load_package(package)
for x, expected in torch.load(data, map_location="cuda"):
    o = model(*x)
    ratio = ((o.double() - expected.double()).square().mean() / expected.double().square().mean()).sqrt().item()
    assert ratio < 5e-3, ratio
assert "fla_inductor" not in sys.modules
"""


def test_aotinductor_package_runs_without_python_operators(tmp_path: Path) -> None:
    T = torch.export.Dim("T", min=2, max=1 << 18)
    shapes = (tuple({1: T} if i < 5 else None for i in range(7)),)
    with torch.no_grad(), config.patch({"aot_inductor.custom_op_libs": [":libstdc++.so.6"]}):
        program = torch.export.export(Layer(), tuple(arguments(320)), dynamic_shapes=shapes)
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
        cases = [(x, layer(*x)) for x in (arguments(n) for n in (320, 77, 1000))]
    files = zipfile.ZipFile(package)
    sources = "".join(files.read(n).decode(errors="ignore") for n in files.namelist() if n.endswith(".cpp"))
    assert "aoti_torch_proxy_executor_call_function(" not in sources
    assert "fla_inductor::" not in sources
    torch.save(cases, tmp_path / "cases.pt")
    subprocess.run([sys.executable, "-c", LOADER, package, str(tmp_path / "cases.pt")], check=True, cwd=tmp_path)
