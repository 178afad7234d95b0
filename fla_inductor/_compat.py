"""Private torch APIs used outside `lowerings/`, each with the versions it was checked on (2.11, 2.13)."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


def is_fake(x: Tensor) -> bool:
    """True for tensors without data: fake, meta or functional wrappers of one."""
    from torch._subclasses.fake_tensor import is_fake

    return x.device.type == "meta" or bool(is_fake(x))


def under_tracing() -> bool:
    """True inside Dynamo, AOTAutograd or export."""
    return torch._guards.TracingContext.try_get() is not None


@functools.cache
def _dynamo_error(kind: type[Exception]) -> type[Exception]:
    """`kind`, made to pass through Dynamo unwrapped.

    Dynamo wraps whatever a fake kernel raises in TorchRuntimeError, except its own Unsupported: with fullgraph=True
    that one reaches the caller, and with fullgraph=False it causes a graph break, after which the eager check raises
    `kind`.
    """
    from torch._dynamo.exc import Unsupported

    def init(self: Any, message: str) -> None:
        try:
            Unsupported.__init__(self, message, gb_type="fla_inductor argument check")
        except TypeError:
            Unsupported.__init__(self, message)

    return type(kind.__name__, (Unsupported, kind), {"__init__": init})


def traceable_error(kind: type[Exception]) -> type[Exception]:
    """The class to raise for a bad argument: `kind` itself, or while Dynamo traces a subclass it lets through."""
    if "torch._dynamo" in sys.modules and under_tracing():
        return _dynamo_error(kind)  # type: ignore[arg-type]
    return kind


def run_and_get_code(fn: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Result of `fn` and the modules that Inductor generated while it ran; Dynamo forgets earlier graphs first."""
    from torch._inductor.utils import run_and_get_code

    return run_and_get_code(fn)


def aoti_compile_and_package(exported: torch.export.ExportedProgram, path: Path) -> Path:
    """Write an AOTInductor package that loads in any process.

    The package names libstdc++ as a library it needs: a compiler that links it statically otherwise makes a second copy
    of it, whose `std::regex` clashes with the first when a package for CUDA is loaded (torch 2.11).
    """
    from torch._inductor import aoti_compile_and_package, config

    libraries = [*(config.aot_inductor.custom_op_libs or []), ":libstdc++.so.6"] if _uses_cuda(exported) else None
    with config.patch({} if libraries is None else {"aot_inductor.custom_op_libs": libraries}):
        return Path(aoti_compile_and_package(exported, package_path=str(path)))


def _uses_cuda(exported: torch.export.ExportedProgram) -> bool:
    return any(x.device.type == "cuda" for x in exported.state_dict.values())


def called_by_dynamo(fn: Callable[P, T]) -> Callable[P, T]:
    """`torch.compiler.assume_constant_result` without importing Dynamo: while tracing, Dynamo itself calls `fn`."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn
