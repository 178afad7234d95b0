"""What became of each operator of this package in a compiled function."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fla_inductor import _compat
from fla_inductor._library import NAMESPACE

_KERNEL = re.compile(r"^(\w+) = async_compile\.(\w+)\(", re.MULTILINE)
_EXTERN = re.compile(r"^\s+(?:\w+ = )?(?:extern_kernels|torch\.ops\.aten)\.(\w+)", re.MULTILINE)
_CALL = re.compile(rf"^\s+(?:\w+ = )?torch\.ops\.{NAMESPACE}\.(\w+)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Graph:
    """What Dynamo captured: how often each operator of this package is called, and the breaks in the graph."""

    calls: collections.Counter[str]
    breaks: int


@dataclasses.dataclass(frozen=True)
class Kernels:
    """What Inductor generated: names of kernels, and counts of library calls and of our operators called whole."""

    fused: tuple[str, ...]
    templates: tuple[str, ...]
    extern: collections.Counter[str]
    called: collections.Counter[str]

    def fate(self, op: str) -> str:
        """What became of operator `op`, from the names of the kernels, which list the operators that they come from."""
        if self.called[op]:
            return "one call each"
        name = re.compile(rf"_{op}(?!_backward)(?=_)")
        templates = [kernel for kernel in self.templates if name.search(kernel)]
        fused = [kernel for kernel in self.fused if name.search(kernel)]
        if not templates and not fused:
            return "dissolved into the kernels around it"
        shared = sum(bool(_neighbours(kernel, op)) for kernel in (*templates, *fused))
        counts = [(templates, "template"), (fused, "kernel")]
        parts = [f"{len(names)} {kind}{'s' * (len(names) > 1)}" for names, kind in counts if names]
        return f"{' and '.join(parts)}, {shared} shared with its neighbours"


def _neighbours(kernel: str, op: str) -> str:
    """What a kernel's name lists beside `op`, its backward, and operators that move no data."""
    return re.sub(
        rf"^\w+?_fused|_{op}_backward|_{op}|__?unsafe_view|_view|_slice|_squeeze|_unbind|_split|_\d+$", "", kernel
    )


def trace(fn: Callable[..., Any], *args: Any) -> Graph:
    """Capture `fn(*args)` with Dynamo, without compiling it."""
    explained = torch._dynamo.explain(fn)(*args)
    calls: collections.Counter[str] = collections.Counter()
    for module in explained.graphs:
        for node in module.graph.nodes:
            overload = getattr(node.target, "default", node.target)
            if isinstance(overload, torch._ops.OpOverload) and overload.namespace == NAMESPACE:
                calls[overload._schema.name.split("::")[1]] += 1
    return Graph(calls, explained.graph_break_count)


def compile_and_count(fn: Callable[[], Any]) -> tuple[Any, Kernels]:
    """Result of `fn`, which runs a compiled function for the first time, and what was generated for it."""
    result, codes = _compat.run_and_get_code(fn)
    return result, count(codes)


def count(codes: Sequence[str]) -> Kernels:
    """Sort the kernels and calls of Inductor's output code."""
    names = [name for code in codes for name, _ in _KERNEL.findall(code)]
    templates = tuple(name for name in names if name.startswith("triton_tem") or "template" in name)
    return Kernels(
        fused=tuple(name for name in names if name not in templates),
        templates=templates,
        extern=collections.Counter(name for code in codes for name in _EXTERN.findall(code)),
        called=collections.Counter(name for code in codes for name in _CALL.findall(code)),
    )
