"""Registers the Inductor lowerings when, and only when, Inductor itself is loaded."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

# the module every way into Inductor imports first: torch.compile, AOTInductor, standalone compile
TRIGGER = "torch._inductor.compile_fx"


class _Loader(importlib.abc.Loader):
    """Runs the module's own loader, then registers."""

    def __init__(self, inner: importlib.abc.Loader) -> None:
        self.inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        _register()


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != TRIGGER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Loader(spec.loader)
        return spec


def _register() -> None:
    from fla_inductor import lowerings

    lowerings.register()


def install() -> None:
    """Register now if Inductor is loaded, else as soon as it is. Importing Inductor here would cost seconds."""
    if TRIGGER in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Finder())
