"""Every operator x every sample of its contract: what PyTorch itself can check, tracing, export and packaging.

Numbers against the float64 references are in the operators' own test files and, for the kernels, in test_kernels and
test_gpu. Compiling with Inductor takes long on two cores, so there a subset stands for the rest; everything cheap runs
on all samples. With a GPU the same tests run there too; packages for it are in test_gpu.

`opcheck` looks at what is registered for an operator. The operators other than KDA's are decompositions with nothing
registered, which only their schemas and results can get wrong: their own files check these.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import op_checks
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fla_inductor.contract import REGISTRY, OpContract, Sample
from fla_inductor.custom_ops import kda, recurrent_kda

CPU = torch.device("cpu")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
CASES = [(op, name) for op, contract in REGISTRY.items() for name in op_checks.sample_ids(contract)]
IDS = ["-".join(case) for case in CASES]
KDA = [case for case in CASES if case[0] in ("chunk_kda", "fused_recurrent_kda")]


def _sample(op: str, name: str, device: str, dtype: torch.dtype = torch.float32) -> tuple[OpContract, Sample]:
    contract = REGISTRY[op]
    return contract, op_checks.get_sample(contract, torch.device(device), dtype, name)


def _arguments(op: str, sample: Sample, grad: bool) -> tuple[Any, ...]:
    """The operator's own arguments for a call of the public function."""
    fields = (kda.Forward if op == "chunk_kda" else recurrent_kda.Recurrent)._fields
    values: dict[str, Any] = {n: op_checks.leaf(x, grad and n in sample.grad) for n, x in sample.kwargs.items()}
    defaults: dict[str, Any] = {"scale": sample.kwargs["q"].shape[-1] ** -0.5, "chunk_size": 64, "safe_gate": False}
    flags = ("output_final_state", "allow_neg_eigval", "state_v_first")
    defaults |= dict.fromkeys(flags, False) | {"save_states": sample.kwargs.get("disable_recompute", False)}
    return tuple(values.get(n, defaults.get(n)) for n in fields)


@DEVICES
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize(("op", "name"), KDA, ids=["-".join(case) for case in KDA])
def test_opcheck(op: str, name: str, grad: bool, device: str) -> None:
    """Schema, autograd registration, fake tensors, and AOT dispatch with dynamic shapes."""
    _, sample = _sample(op, name, device)
    torch.library.opcheck(getattr(torch.ops.fla_inductor, op).default, _arguments(op, sample, grad))


@DEVICES
@pytest.mark.parametrize(("op", "name"), CASES, ids=IDS)
def test_fake_results_are_real_ones(op: str, name: str, device: str) -> None:
    """Shapes, strides and dtypes; and no output is an input."""
    contract, sample = _sample(op, name, device, torch.bfloat16)
    if "mutates" in contract.features:
        sample = Sample(name, {**sample.kwargs, "cache": sample.kwargs["cache"].clone()})
    real = contract.public(**sample.kwargs)
    with FakeTensorMode() as mode:
        kwargs = {n: mode.from_tensor(x) if isinstance(x, Tensor) else x for n, x in sample.kwargs.items()}
        fake = contract.public(**kwargs)
    for a, b in zip(_tensors(real), _tensors(fake), strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    if "mutates" not in contract.features:
        inputs = {x.untyped_storage().data_ptr() for x in sample.kwargs.values() if isinstance(x, Tensor)}
        assert not inputs & {x.untyped_storage().data_ptr() for x in _tensors(real) if x.numel()}


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [x for x in result if x is not None]


@DEVICES
@pytest.mark.parametrize(("op", "name"), KDA, ids=["-".join(case) for case in KDA])
def test_traces_whole_forward_and_backward(op: str, name: str, device: str, fresh_compile: None) -> None:
    """One graph, no break; the same numbers as eager."""
    contract, sample = _sample(op, name, device)
    compiled = torch.compile(contract.public, fullgraph=True, backend="aot_eager")
    eager, traced = (op_checks.call(fn, contract, sample) for fn in (contract.public, compiled))
    for name_, x in [*eager.outputs.items(), *eager.grads.items()]:
        assert torch.equal(x, {**traced.outputs, **traced.grads}[name_]), name_


@DEVICES
@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_at_most_two_graphs_over_lengths(op: str, device: str, fresh_compile: None) -> None:
    contract = REGISTRY[op]
    compiled = torch.compile(contract.public, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (1, 7, 64, 65, 130, 1000):
        sample = kda.make_sample(torch.device(device), torch.float32, "lengths", T=T, state=False)
        o, ht = compiled(**sample.kwargs)
        o_eager, ht_eager = contract.public(**sample.kwargs)
        assert op_checks.error_ratio(o_eager, o) < 1e-5
        assert op_checks.error_ratio(ht_eager, ht) < 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


class Module(torch.nn.Module):
    """A public function with its flags bound, as `torch.export` wants it."""

    def __init__(self, contract: OpContract, sample: Sample) -> None:
        super().__init__()
        self.fn = contract.public
        self.flags = {n: x for n, x in sample.kwargs.items() if not isinstance(x, Tensor)}

    def forward(self, tensors: dict[str, Tensor]) -> Any:
        return [x for x in self.fn(**tensors, **self.flags) if x is not None]


@DEVICES
@pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])
@pytest.mark.parametrize(("op", "name"), KDA, ids=["-".join(case) for case in KDA])
def test_export_keeps_one_node(op: str, name: str, strict: bool, device: str) -> None:
    contract, sample = _sample(op, name, device)
    tensors = {n: x for n, x in sample.kwargs.items() if isinstance(x, Tensor)}
    program = torch.export.export(Module(contract, sample), (tensors,), strict=strict)
    nodes = [n for n in program.graph.nodes if str(n.target) == f"fla_inductor.{op}.default"]
    assert len(nodes) == 1
    for expected, x in zip(_tensors(contract.public(**sample.kwargs)), program.module()(tensors), strict=True):
        assert torch.equal(expected, x)


def _one_node_a_sample(op: str, names: list[str]) -> tuple[torch.nn.Module, list[dict[str, Tensor]], Any]:
    """Several samples of an operator as one module, since the C++ compiler is what takes the time."""
    contract = REGISTRY[op]
    samples = [op_checks.get_sample(contract, CPU, torch.float32, name) for name in names]
    modules = torch.nn.ModuleList([Module(contract, sample) for sample in samples])
    tensors = [{n: x for n, x in s.kwargs.items() if isinstance(x, Tensor)} for s in samples]

    class All(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.modules_ = modules

        def forward(self, all_tensors: list[dict[str, Tensor]]) -> Any:
            return [m(t) for m, t in zip(self.modules_, all_tensors, strict=True)]

    return All(), tensors, [[x for x in contract.public(**s.kwargs) if x is not None] for s in samples]


LOADER = """
import sys, torch
package, data = sys.argv[1:]
tensors, expected = torch.load(data)
results = torch._inductor.aoti_load_package(package)(tensors)
for a, b in zip(torch.utils._pytree.tree_leaves(expected), torch.utils._pytree.tree_leaves(results), strict=True):
    assert ((a - b).square().mean().sqrt() / a.square().mean().sqrt()).item() < 1e-5
assert "fla_inductor" not in sys.modules
"""


@pytest.mark.aoti
@pytest.mark.parametrize(
    ("op", "names"),
    [("chunk_kda", ["gva", "bounded", "packed"]), ("fused_recurrent_kda", ["step", "packed"])],
    ids=["chunk_kda", "fused_recurrent_kda"],
)
def test_packages_need_no_python(op: str, names: list[str], tmp_path: Path) -> None:
    """The package runs in a process without this package, and its source names no operator of ours."""
    module, tensors, expected = _one_node_a_sample(op, names)
    with torch.no_grad():
        program = torch.export.export(module, (tensors,))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "op.pt2"))
    files = zipfile.ZipFile(package)
    source = "".join(files.read(n).decode(errors="ignore") for n in files.namelist() if n.endswith(".cpp"))
    code = "\n".join(line for line in source.splitlines() if not line.lstrip().startswith("//"))
    assert "aoti_torch_proxy_executor_call_function(" not in code
    assert "fla_inductor::" not in code
    torch.save((tensors, expected), tmp_path / "data.pt")
    subprocess.run([sys.executable, "-c", LOADER, package, str(tmp_path / "data.pt")], check=True, cwd=tmp_path)


INDUCTOR = [("chunk_kda", "gva"), ("fused_recurrent_kda", "step")]
ON_GPU = [(*case, "cuda") for case in KDA]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "name", "device"),
    [*((*case, "cpu") for case in INDUCTOR), *(pytest.param(*case, marks=pytest.mark.gpu) for case in ON_GPU)],
)
def test_inductor_forward_and_backward(op: str, name: str, device: str, fresh_compile: None) -> None:
    contract, sample = _sample(op, name, device)
    compiled = torch.compile(contract.public, fullgraph=True)
    eager, fused = (op_checks.call(fn, contract, sample) for fn in (contract.public, compiled))
    for name_, x in [*eager.outputs.items(), *eager.grads.items()]:
        assert op_checks.error_ratio(x, {**fused.outputs, **fused.grads}[name_]) < 1e-5, name_


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "name"), KDA, ids=["-".join(case) for case in KDA])
def test_cuda_graphs(op: str, name: str, fresh_compile: None) -> None:
    """Forward and backward are captured: anything in the way is an error."""
    contract, sample = _sample(op, name, "cuda", torch.bfloat16)
    options: dict[str, Any] = {"triton.cudagraphs": True, "triton.cudagraph_or_error": True}
    compiled = torch.compile(contract.public, fullgraph=True, options=options)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        replayed = op_checks.call(compiled, contract, sample)
        grads = {name: x.clone() for name, x in replayed.grads.items()}
    eager = op_checks.call(contract.public, contract, sample)
    for name_, x in eager.grads.items():
        assert op_checks.error_ratio(x, grads[name_]) < 5e-3, name_
