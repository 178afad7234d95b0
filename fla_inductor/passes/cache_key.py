"""Makes this package part of Inductor's cache key.

Inductor's caches hash graphs, configuration and torch's own sources, not lowerings registered from outside: after an
upgrade of this package they would go on serving the old kernels. A graph pass that does nothing but carry a hash of the
package's files in its `uuid` closes the gap.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

_SUFFIXES = {".py", ".jinja", ".json"}


@functools.cache
def package_hash() -> str:
    """SHA-256 over names and contents of the package's source, template and tuning files."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in _SUFFIXES):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


class PackageKey(CustomGraphPass):
    """Runs the pass that was configured before, if any, and adds the package's hash to its key."""

    def __init__(self, inner: Any = None) -> None:
        self.inner = inner

    def __call__(self, graph: torch.fx.Graph) -> None:
        if self.inner is not None:
            self.inner(graph)

    def uuid(self) -> Any:
        inner = self.inner.uuid() if isinstance(self.inner, CustomGraphPass) else None
        if self.inner is not None and inner is None:
            return None  # a pass without a key of its own turns caching off, here as anywhere
        return ("fla_inductor", package_hash(), inner)


def install() -> None:
    """Chain in front of whatever pass the user configured; calling it again changes nothing."""
    current = config.post_grad_custom_pre_pass
    if not isinstance(current, PackageKey):
        config.post_grad_custom_pre_pass = PackageKey(current)
