"""Every rendered KDA kernel compiles for each architecture and fits its shared memory."""

from __future__ import annotations

from typing import Any

import cubin
import kda_kernels
import pytest
import torch

# bytes of shared memory that one block may use
SHARED_MEMORY = {80: 166912, 90: 232448, 100: 232448}

CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bounded": {"lower_bound": -5.0},
    "plain_gate": {"use_gate": False, "has_A": False, "has_bias": False, "norm": False, "sigmoid": False},
    "varlen": {"varlen": True, "v_first": False},
    "wide": {"K": 256, "V": 256},
    "narrow": {"K": 20, "V": 8, "chunk_size": 32},
    "fp32": {"dtype": torch.float32},
    "fp32_wide": {"dtype": torch.float32, "K": 256, "V": 192},
}
# every case on Hopper, the ones that differ in tiles or instructions elsewhere: compiling is all the time goes into
MATRIX = [(90, case) for case in CASES] + [(sm, case) for sm in (80, 100) for case in ("bf16", "wide", "fp32")]


@pytest.mark.parametrize(("sm", "case"), MATRIX, ids=[f"sm{sm}-{case}" for sm, case in MATRIX])
def test_kernels_compile(sm: int, case: str) -> None:
    problem = kda_kernels.problem(sm=sm, **CASES[case])
    work = "float32" if case.startswith("fp32") else "bfloat16"
    for kernel, dtypes, config in kda_kernels.kernels(problem, work):
        binary = cubin.compile_kernel(
            kernel, dtypes, kda_kernels.ranks(kernel), sm, config.num_warps, config.num_stages
        )
        assert binary.asm["cubin"], kernel.name
        assert binary.metadata.shared <= SHARED_MEMORY[sm], (kernel.name, binary.metadata.shared)
