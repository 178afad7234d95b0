"""Inductor's side of the operators; imported only once Inductor is loaded (see `_autoload`)."""

from __future__ import annotations

import functools


@functools.cache
def register() -> None:
    """Register all lowerings and decompositions, and make the package part of Inductor's cache key."""
    from fla_inductor.lowerings import chunk_scan, kda, kda_cpu, kda_steps
    from fla_inductor.passes import cache_key

    chunk_scan.register()
    kda_steps.register()
    kda_cpu.register()
    kda.register()
    cache_key.install()
