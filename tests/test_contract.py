"""What every operator in `contract.REGISTRY` promises, on every sample; with `-m gpu` the same functions on CUDA.

Checks that compile code use the samples in `contract_support.PICKS`, where the reason for each is.
Numbers against the float64 references are in the operators' own test files and, for the kernels, in test_kernels and
test_gpu. Compiling with Inductor takes most of a minute a graph on two cores, so there a subset stands for the rest;
everything cheap runs on all samples.

import contextlib
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import bad_calls
import contract_support as support
import op_checks
import pytest
import torch
from contract_support import FP32, Batch, Case, every_sample, parametrize, picked
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._subclasses import FakeTensorMode

from fla_inductor.contract import REGISTRY
from fla_inductor.tools.package import run_in_fresh_process

pytestmark = pytest.mark.usefixtures("fresh_compile")

EACH_OPERATOR = pytest.mark.parametrize("op", REGISTRY)
# the same bound for every output and gradient: eager and compiled round the same float32 numbers
COMPILED = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}


def on_each_device(op: str) -> Iterator[Case]:
    yield from (case for case in every_sample("cpu") if case.op == op)
    yield from picked("gpu", "cuda", op)


# Inductor and AOTInductor come first: the longest jobs should not start last


@parametrize([*picked("inductor"), *picked("gpu", "cuda")])
def test_inductor(case: Case) -> None:
    contract, sample = case.load()
    op_checks.assert_compiles(contract, sample, "inductor", COMPILED[case.dtype])
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


@parametrize([*picked("any_T"), *picked("any_T", "cuda")])
def test_inductor_for_any_length(case: Case) -> None:
    assert_two_graphs(case, "inductor", COMPILED[case.dtype])
