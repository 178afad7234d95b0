"""What every operator in `contract.REGISTRY` promises, on every sample; `-m gpu` runs the same functions on CUDA.

Checks that compile code run on the samples in `contract_support.PICKS`, where the reason for each stands.
"""

from __future__ import annotations

import contextlib
import inspect
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


# Compiled: first in the file, so that the longest jobs do not start last


@pytest.mark.aoti
@EACH_DEVICE
@EACH_OPERATOR
def test_aotinductor(op: str, device: str, tmp_path: Path) -> None:
    """A package of several samples gives the same numbers in a process that never imports this one, for any T."""
    batch = Batch(picked("gpu" if device == "cuda" else "aoti", device, op))
    # a compiler that links libstdc++ statically makes a second one, whose std::regex clashes with the first
    libraries = {"aot_inductor.custom_op_libs": [":libstdc++.so.6"]} if device == "cuda" else {}
    with torch.no_grad(), config.patch(libraries):
        path = str(tmp_path / "batch.pt2")
        package = Path(torch._inductor.aoti_compile_and_package(batch.export(strict=False), package_path=path))
    files = zipfile.ZipFile(package)
    source = "".join(files.read(name).decode() for name in files.namelist() if name.endswith(".cpp"))
    assert "aoti_torch_proxy_executor_call_function(" not in source
    assert "fla_inductor::" not in source
    inputs: list[Any] = [batch.inputs(), batch.inputs(T=130)]
    for x, outputs in zip(inputs, run_in_fresh_process(package, inputs), strict=True):
        batch.assert_equal(batch(x), outputs, support.compiled_bound)


@parametrize([*picked("inductor"), *picked("any_T"), *picked("gpu_any_T", "cuda")])
def test_inductor(case: Case) -> None:
    """Forward and backward; where tokens are dynamic, one graph serves every length."""
    contract, sample = case.load()
    bound = support.compiled_bound(contract, sample)
    op_checks.assert_compiles(contract, sample, "inductor", bound)
    assert not counters["graph_break"]


@parametrize(case for case in picked("gpu", "cuda") if "mutates" not in REGISTRY[case.op].features)
def test_cuda_graphs(case: Case) -> None:
    """Forward and backward are captured, or Inductor raises; not those that write into an argument that may move."""
    contract, sample = case.load()
    eager = op_checks.call(contract.public, contract, sample)
    with config.patch({"triton.cudagraph_or_error": True}):
        compiled = torch.compile(contract.public, fullgraph=True, mode="reduce-overhead")
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            result = op_checks.call(compiled, contract, sample)
    op_checks.assert_close(eager, result, support.compiled_bound(contract, sample))
