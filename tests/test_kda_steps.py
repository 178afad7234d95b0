"""KDA's recurrence for the CPU, forward and backward: the loops of the reference, and the C++ kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import op_checks
import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import fla_inductor
import fla_inductor.custom_ops.kda_steps
from fla_inductor import _compat
from fla_inductor.custom_ops.kda import make_sample
from fla_inductor.reference import kda as reference

forward = torch.ops.fla_inductor._kda_steps.default
backward = torch.ops.fla_inductor._kda_steps_backward.default


def inputs(
    B: int = 2,
    T: int = 70,
    H: int = 1,
    HV: int = 2,
    K: int = 24,
    V: int = 40,
    cu: tuple[int, ...] | None = None,
    headwise: bool = False,
    dtype: torch.dtype = torch.float32,
) -> list[Any]:
    N = B if cu is None else len(cu) - 1

    def rn(*size: int) -> Tensor:
        return torch.randn(size, dtype=dtype)

    return [
        rn(B, T, H, K) * K**-0.5,
        torch.nn.functional.normalize(rn(B, T, H, K), dim=-1),
        rn(B, T, HV, V),
        torch.rand(B, T, HV, K, dtype=dtype) ** 0.2,
        torch.rand(B, T, HV, V if headwise else 1, dtype=dtype),
        rn(N, HV, K, V),
        None if cu is None else torch.tensor(cu, dtype=torch.int32),
    ]


def both(arguments: list[Any], upstream: list[Tensor]) -> list[Tensor]:
    return [*forward(*arguments), *backward(*upstream, *arguments)]


def double(arguments: list[Any]) -> list[Any]:
    return [x.double() if x is not None and x.is_floating_point() else x for x in arguments]


def assert_close(expected: list[Tensor], actual: list[Tensor], bound: float) -> None:
    for i, (x, y) in enumerate(zip(expected, actual, strict=True)):
        assert op_checks.error_ratio(x, y) < bound, i


SHAPES: dict[str, dict[str, Any]] = {
    "packed": {"B": 1, "H": 2, "HV": 6, "T": 100, "cu": (0, 0, 5, 5, 70, 90, 90)},
    "narrow": {"K": 5, "V": 7, "T": 1},
    "wide": {"K": 256, "V": 96, "T": 34},
    "headwise": {"headwise": True, "T": 40},
    "no_sequence": {"B": 1, "T": 9, "cu": (0,)},
    "double": {"dtype": torch.float64, "T": 40},
}


def upstream(arguments: list[Any]) -> list[Tensor]:
    return [torch.randn_like(arguments[2]), torch.randn_like(arguments[5])]


@pytest.mark.parametrize("name", ["double", "packed", "headwise"])
def test_backward_of_the_loops_is_their_autograd(name: str) -> None:
    x = double(inputs(**SHAPES[name]))
    leaves = [t.requires_grad_() for t in x[:6]]
    d = upstream(x)
    with torch.enable_grad():
        log_decay = leaves[3].log().detach().requires_grad_()
        arguments: list[Any] = [*leaves[:3], log_decay.exp(), *leaves[4:], x[6]]
        o, final = reference.steps(*arguments)
        expected = torch.autograd.grad([o, final], [*leaves[:3], log_decay, *leaves[4:]], d)
    H = x[0].shape[2]
    dq, dk, *others = reference.steps_backward(*[*d, *(t.detach() for t in x[:6]), x[6]])
    ours = [dq.unflatten(2, (H, -1)).sum(3), dk.unflatten(2, (H, -1)).sum(3), *others]
    assert_close(list(expected), ours, 1e-12)


@pytest.mark.parametrize("name", SHAPES)
def test_compiled(name: str, fresh_compile: None) -> None:
    x = inputs(**SHAPES[name])
    d = upstream(x)
    if x[6] is not None:
        # tokens of no sequence are not read
        for t in (*x[:5], d[0]):
            t[:, x[6][-1] :] = float("nan")
    clean = [t if t is None else torch.nan_to_num(t) for t in x]
    expected = both(double(clean), double([d[0].nan_to_num(), d[1]]))
    actual = torch.compile(both, fullgraph=True)(x, d)
    assert all(t.is_contiguous() for t in actual)
    assert_close(expected, actual, 1e-12 if x[0].dtype == torch.float64 else 2e-6)


def test_strided_inputs_and_one_tensor_for_several_arguments(fresh_compile: None) -> None:
    x = inputs(K=16, V=16)
    x[0] = x[1] = torch.randn(70, 2, 16, 1).permute(1, 0, 3, 2) * 0.2
    x[3] = torch.full((1, 1, 1, 1), 0.9).expand(2, 70, 2, 16)
    x[5] = x[5].transpose(-1, -2)
    d = [x[2], x[5]]
    assert_close(both(double(x), double(d)), torch.compile(both, fullgraph=True)(x, d), 2e-6)


def test_sizes_may_be_symbolic(fresh_compile: None) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(both, fullgraph=True, backend=counter, dynamic=True)
    for T, cu in ((20, (0, 3, 20)), (33, (0, 0, 9, 30)), (70, (0, 35, 60))):
        x = inputs(B=1, T=T, cu=cu)
        d = upstream(x)
        assert_close(both(double(x), double(d)), compiled(x, d), 2e-6)
    assert counter.frame_count <= 2


def test_wrong_offsets_read_nothing_out_of_bounds(fresh_compile: None) -> None:
    x = inputs(B=1, T=20, cu=(0, 10, 20))
    compiled = torch.compile(both, fullgraph=True)
    compiled(x, upstream(x))
    x[6] = torch.tensor([0, 30, 25], dtype=torch.int32)
    compiled(x, upstream(x))


def test_many_threads_and_one(fresh_compile: None) -> None:
    x = inputs(HV=4, V=64)
    d = upstream(x)
    results = []
    for threads in (1, 4):
        torch._dynamo.reset()
        with torch._inductor.config.patch("cpp.threads", threads):
            results.append(torch.compile(both, fullgraph=True)(x, d))
    for one, many in zip(*results, strict=True):
        assert torch.equal(one, many)


def test_refuses_what_it_cannot_compute() -> None:
    x = inputs(T=3)
    with pytest.raises(TypeError, match="`k`"):
        forward(x[0], x[1].double(), *x[2:])
    with pytest.raises(ValueError, match="`init`"):
        forward(*x[:5], x[5][:1], None)
    leaf = x[0].requires_grad_()
    with pytest.raises(RuntimeError, match="not differentiable"):
        forward(leaf, *x[1:])[0].sum().backward()


@pytest.mark.parametrize(
    "chunks", [pytest.param(False, id="no_states"), pytest.param(True, id="states", marks=pytest.mark.slow)]
)
def test_the_public_operator_decomposes_to_it(chunks: bool, fresh_compile: None) -> None:
    """A training step holds one kernel forward and one backward, and no call of an operator in Python."""
    sample = make_sample(torch.device("cpu"), torch.float32, "step", B=2, T=70, HV=4)
    arguments = {n: sample.kwargs[n] for n in sample.grad}
    flags = {n: x for n, x in sample.kwargs.items() if n not in arguments}

    def fn(arguments: dict[str, Any]) -> tuple[Tensor, ...]:
        return fla_inductor.chunk_kda(**arguments, **flags, return_intermediate_states=chunks)

    def step(run: Any) -> list[Tensor]:
        leaves = {n: t.detach().requires_grad_() for n, t in arguments.items()}
        outputs = run(leaves)
        return [*outputs, *torch.autograd.grad(outputs[0].square().sum() + outputs[1].sum(), list(leaves.values()))]

    actual, code = _compat.run_and_get_code(lambda: step(torch.compile(fn, fullgraph=True)))
    assert_close(step(fn), actual, 1e-5)
    text = "\n".join(code)
    assert "torch.ops.fla_inductor" not in text
    assert (text.count("struct Problem {"), text.count("struct Gradients {")) == (2 + chunks, 1)
    assert ("chunk_scan" in text) == chunks


@pytest.mark.aoti
def test_an_aotinductor_package_needs_no_python(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
            o, ht = fla_inductor.chunk_kda(
                q, k, v, g, beta, output_final_state=True, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True
            )
            return o, ht

    sample = make_sample(torch.device("cpu"), torch.float32, "package", T=70)
    args = tuple(sample.kwargs[n] for n in ("q", "k", "v", "g", "beta"))
    T = torch.export.Dim("T", min=2, max=4096)
    exported = torch.export.export(Model(), args, dynamic_shapes=[{1: T}] * 5)
    package = _compat.aoti_compile_and_package(exported, tmp_path / "kda.pt2")
    torch.save((args, Model()(*args)), tmp_path / "data.pt")
    script = f"""
import torch
import torch._dynamo.testing
args, expected = torch.load({str(tmp_path / "data.pt")!r})
model = torch._inductor.aoti_load_package({str(package)!r})
for x, y in zip(expected, model(*args)):
    assert (x - y).norm() < 1e-5 * x.norm()
assert not hasattr(torch.ops.fla_inductor, "chunk_kda")
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, timeout=300)
