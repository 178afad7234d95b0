"""Compiles a rendered kernel for an architecture without a GPU, and reads registers and spills from the result."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fla_inductor.templates.render import Kernel

POINTERS = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "int64": "*i64", "int32": "*i32"}


def compile_kernel(
    kernel: Kernel, dtypes: Mapping[str, str], ranks: Mapping[str, int], sm: int, num_warps: int, num_stages: int
) -> Any:
    """`dtypes` names each tensor's dtype; the last of its `ranks` dimensions is contiguous, others step by 16."""
    names = kernel.fn.arg_names
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, name in enumerate(names):
        aligned = [["tt.divisibility", 16]]
        if i < len(kernel.tensors):
            signature[name] = POINTERS[dtypes[name]]
            attributes[(i,)] = aligned
            continue
        tensor, is_stride, dim = kernel.scalars[i - len(kernel.tensors)]
        if is_stride and dim == ranks[tensor] - 1:
            signature[name] = "constexpr"
            constants[(i,)] = 1
            continue
        signature[name] = "i32"
        if is_stride:
            attributes[(i,)] = aligned
    source = ASTSource(kernel.fn, signature, constants, attributes)
    return triton.compile(
        source, target=GPUTarget("cuda", sm, 32), options={"num_warps": num_warps, "num_stages": num_stages}
    )


def resources(binary: Any) -> dict[str, int]:
    """Registers, stack bytes (spills) and shared memory of a compiled kernel."""
    tool = shutil.which("cuobjdump") or str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}
    return {"registers": numbers["REG"], "stack": numbers["STACK"], "shared": binary.metadata.shared}
