"""What every operator in `contract.REGISTRY` promises, on every sample; `-m gpu` runs the same functions on CUDA.

Checks that compile code run on the samples in `contract_support.PICKS`, where the reason for each stands.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import bad_calls
import contract_support as support
import op_checks
import pytest
import torch
from contract_support import Batch, Case, every_sample, parametrize, picked
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._subclasses import FakeTensorMode

from fla_inductor.contract import REGISTRY
from fla_inductor.tools.package import run_in_fresh_process

pytestmark = pytest.mark.usefixtures("fresh_compile")

EACH_OPERATOR = pytest.mark.parametrize("op", REGISTRY)
EACH_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


# Compiled by Inductor: first in the file, so that the longest jobs do not start last


@pytest.mark.aoti
@EACH_DEVICE
@EACH_OPERATOR
def test_aotinductor(op: str, device: str, tmp_path: Path) -> None:
    """A package of several samples gives the same numbers in a process that never imports this package, for any T."""
    batch = Batch(picked("gpu" if device == "cuda" else "aoti", device, op))
    # a compiler that links libstdc++ statically makes a second one, whose std::regex clashes with the first
    libraries = {"aot_inductor.custom_op_libs": [":libstdc++.so.6"]} if device == "cuda" else {}
    with config.patch(libraries):
        path = str(tmp_path / "batch.pt2")
        package = Path(torch._inductor.aoti_compile_and_package(batch.export(strict=False), package_path=path))
    files = zipfile.ZipFile(package)
    source = "".join(files.read(name).decode() for name in files.namelist() if name.endswith(".cpp"))
    assert source
    assert "aoti_torch_proxy_executor_call_function(" not in source
    assert "fla_inductor::" not in source
    inputs: list[Any] = [batch.inputs(), batch.inputs(T=130)]
    for x, outputs in zip(inputs, run_in_fresh_process(package, inputs), strict=True):
        batch.assert_equal(batch(x), dict(outputs), support.bound)


@parametrize([*picked("any_T"), *picked("gpu_any_T", "cuda")])
def test_inductor_for_any_length(case: Case) -> None:
    """One graph, forward and backward; T = 1 has one of its own, which `test_any_length` counts."""
    assert graphs_for_lengths(case, "inductor", [T for T in support.LENGTHS if T > 1]) == 1


@parametrize(picked("inductor"))
def test_inductor(case: Case) -> None:
    assert_compiles(case, "inductor", support.bound(case))


@parametrize(case for case in picked("gpu", "cuda") if "mutates" not in REGISTRY[case.op].features)
def test_cuda_graphs(case: Case) -> None:
    """Forward and backward are captured, or Inductor raises. What writes into an argument that may move is left out."""
    contract, sample = case.load()
    eager = op_checks.call(contract.public, contract, sample)
    with config.patch({"triton.cudagraph_or_error": True}):
        compiled = torch.compile(contract.public, fullgraph=True, mode="reduce-overhead")
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            result = op_checks.call(compiled, contract, sample)
    op_checks.assert_same(eager, result, support.bound(case))


# Traced


@parametrize(every_sample("cpu"))
def test_aot_autograd(case: Case) -> None:
    assert_compiles(case, "aot_eager", 0.0)


@EACH_OPERATOR
def test_dynamo(op: str) -> None:
    assert_compiles(next(case for case in every_sample("cpu") if case.op == op), "eager", 0.0)


def assert_compiles(case: Case, backend: str, tolerance: float) -> None:
    op_checks.assert_compiles(*case.load(), backend, tolerance)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


@parametrize([*support.with_any_length("cpu"), *picked("gpu_any_T", "cuda")])
def test_any_length(case: Case) -> None:
    _, sample = case.load()
    assert graphs_for_lengths(case, "aot_eager", support.lengths(sample)) <= 2


def graphs_for_lengths(case: Case, backend: str, lengths: list[int]) -> int:
    """Number of graphs after calls with each length, forward and backward as in eager mode."""
    contract, sample = case.load()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(contract.public, fullgraph=True, backend=counter)
    for T in lengths:
        resized = support.at_length(sample, T)
        eager = op_checks.call(contract.public, contract, resized)
        result = op_checks.call(support.with_dynamic_tokens(compiled, resized), contract, resized)
        op_checks.assert_same(eager, result, support.bound(case))
    assert not counters["graph_break"]
    return counter.frame_count


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non_strict"])
@EACH_DEVICE
@EACH_OPERATOR
def test_export(op: str, device: str, strict: bool) -> None:
    """One node a sample, or nothing but aten for an operator that dissolves; tokens are dynamic."""
    cases = picked("gpu", device, op) if device == "cuda" else [case for case in every_sample("cpu") if case.op == op]
    batch = Batch(cases)
    exported = batch.export(strict)
    targets = [node.target for node in exported.run_decompositions().graph.nodes if node.op == "call_function"]
    ours = [target for target in targets if "fla_inductor" in str(target)]
    assert ours == ([] if support.is_composite(REGISTRY[op]) else [REGISTRY[op].op] * len(cases))
    for T in (None, 130):
        batch.assert_equal(batch(batch.inputs(T)), exported.module()(batch.inputs(T)), lambda case: 0.0)


# Registered


@pytest.mark.parametrize("given", [True, False], ids=["as_given", "permuted"])
@parametrize([*every_sample("cpu"), *picked("gpu", "cuda")])
def test_opcheck(case: Case, given: bool) -> None:
    contract, sample = case.load()
    for op, arguments in support.operator_calls(contract, sample if given else support.permuted(sample)):
        torch.library.opcheck(op, arguments)


@parametrize(every_sample("cpu", "cuda"))
def test_fake_results_are_laid_out_as_real_ones(case: Case) -> None:
    contract, sample = case.load()
    real = op_checks.call(contract.public, contract, sample)
    with FakeTensorMode() as mode:
        kwargs = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in sample.kwargs.items()}
        fake = op_checks.call(contract.public, contract, support.replaced(sample, kwargs))
    # gradients of an operator that dissolves are aten's, whose fake softplus_backward has strides of its own
    aten = support.is_composite(contract)
    for expected, actual, strides in ((real.outputs, fake.outputs, True), (real.grads, fake.grads, not aten)):
        for name, x in expected.items():
            assert (x.shape, x.dtype, x.device) == (actual[name].shape, actual[name].dtype, actual[name].device), name
            assert x.stride() == actual[name].stride() or not strides, name


@parametrize(every_sample("cpu", "cuda"))
def test_outputs_are_contiguous_and_share_no_memory(case: Case) -> None:
    contract, sample = case.load()
    kwargs = support.copies(sample.kwargs)
    returned = contract.public(**kwargs)
    outputs = [x for x in ([returned] if isinstance(returned, Tensor) else returned) if isinstance(x, Tensor)]
    fresh = [x for x in outputs if not ("mutates" in contract.features and x is kwargs["cache"])]
    assert all(x.is_contiguous() for x in fresh)
    tensors = [x for x in (*kwargs.values(), *fresh) if isinstance(x, Tensor) and x.numel()]
    assert len({x.untyped_storage().data_ptr() for x in tensors}) == len(tensors)


# Numbers


@pytest.mark.parametrize("varying", [None, 1, 0], ids=["dense", "expanded_rows", "expanded_scalar"])
@parametrize(every_sample("cpu", "cuda"))
def test_matches_reference(case: Case, varying: int | None) -> None:
    """Outputs and every gradient against float64, under upstream gradients that are dense or expanded."""
    op_checks.assert_matches_reference(*case.load(), case.dtype, varying)


ONCE = [
    op for op, contract in REGISTRY.items() if "backward" in contract.features and not support.is_composite(contract)
]


@EACH_DEVICE
@pytest.mark.parametrize("op", ONCE)
def test_second_derivative_is_refused(op: str, device: str) -> None:
    contract, sample = Case(op, bad_calls.MAIN_SAMPLE[op], torch.float32, device).load()
    kwargs = {name: op_checks.leaf(x, name in sample.grad) for name, x in sample.kwargs.items()}
    inputs = [kwargs[name] for name in sample.grad]
    first = torch.autograd.grad(contract.public(**kwargs)[0].square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once differentiable"):
        torch.autograd.grad([x.square().sum() for x in first], inputs)


# Bad calls


def test_every_operator_has_bad_calls() -> None:
    assert bad_calls.BAD.keys() == bad_calls.MAIN_SAMPLE.keys() == REGISTRY.keys()


@pytest.mark.parametrize(("op", "bad"), [pytest.param(op, bad, id=f"{op}-{bad.id}") for op, bad in bad_calls.calls()])
def test_refuses(op: str, bad: bad_calls.Bad) -> None:
    """The same exception type and text from the function and from the compiled function."""
    public, kwargs = REGISTRY[op].public, bad.arguments(op)
    argument = r"\w+" if bad.any_argument else bad.argument
    with pytest.raises(bad.kind, match=rf"^{op}: argument `{argument}`: expected (.|\n)+, got ") as eager:
        public(**kwargs)
    with pytest.raises(bad.kind) as compiled:
        torch.compile(public, fullgraph=True, backend="eager")(**kwargs)
    assert compiled.type.__name__ == eager.type.__name__
    # Dynamo adds the place in the user's code
    assert str(compiled.value).split("\n\nfrom user code:")[0] == str(eager.value)


@EACH_OPERATOR
def test_refuses_an_argument_that_it_does_not_know(op: str) -> None:
    _, sample = Case(op, bad_calls.MAIN_SAMPLE[op], torch.float32).load()
    for fn in (REGISTRY[op].public, torch.compile(REGISTRY[op].public, fullgraph=True, backend="eager")):
        with pytest.raises(TypeError, match="unexpected keyword argument 'use_gate_in_kernels'"):
            fn(**sample.kwargs, use_gate_in_kernels=True)


@pytest.mark.gpu
@pytest.mark.parametrize("op", [op for op in REGISTRY if op != "l2norm"])
def test_refuses_tensors_of_two_devices(op: str) -> None:
    _, sample = Case(op, bad_calls.MAIN_SAMPLE[op], torch.float32, "cuda").load()
    for name, x in sample.kwargs.items():
        if isinstance(x, Tensor):
            with pytest.raises(ValueError, match=rf"^{op}: argument `\w+`: expected device c"):
                REGISTRY[op].public(**{**sample.kwargs, name: x.cpu()})
