"""Time of each KDA kernel on a GPU, for each configuration given.

    python benchmarks/tune_kda.py --shape 1x8192x32x128 kda_grad_input "BK=32" "BK=64,num_warps=8" kda_prepare "BK=32"

A kernel name opens a list of changes to its default configuration; without any, every kernel is timed as it is.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any
from unittest import mock

import kda as bench
import torch

import fla_inductor
from fla_inductor.templates import kda as templates

FIELDS = {f"kda_{field}": field for field in ("prepare", "scan", "scan_backward", "grad_intra", "grad_input")}


def launches(x: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    """Launches of one step by kernel: problem constants, grid and tensors, to be repeated."""
    found: dict[str, list[Any]] = {}

    def record(name: str, constants: Any, grid: int, tensors: Any, num_warps: int, num_stages: int) -> None:
        found.setdefault(name, [constants, grid, tensors, num_warps, num_stages])
        original(name, constants, grid, tensors, num_warps, num_stages)

    original = templates.launch
    with mock.patch.object(templates, "launch", record):
        bench.step(fla_inductor.chunk_kda, x, torch.randn_like(x["v"]), torch.randn_like(x["initial_state"]))()
    return found


def microseconds(name: str, launch: list[Any]) -> float:
    return 1e3 * bench.milliseconds(lambda: templates.launch(name, *launch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="1x8192x32x128", help="B x T x H x D")
    parser.add_argument("changes", nargs="*", help="kernel names, each followed by configurations")
    arguments = parser.parse_args()
    x = bench.make(*(int(n) for n in arguments.shape.split("x")))
    default, names = templates.kda_config, list(arguments.changes) or list(FIELDS)
    kernel = names[0]
    for word in names:
        if word in FIELDS:
            kernel, change = word, {}
        else:
            change = {key: eval(value) for key, value in (pair.split("=") for pair in word.split(","))}
        field = FIELDS[kernel]

        def config(*args: Any, field: str = field, change: dict[str, Any] = change) -> Any:
            base = default(*args)
            return replace(base, **{field: replace(getattr(base, field), **change)})

        with mock.patch.object(templates, "kda_config", config):
            try:
                print(f"{kernel} {change}: {microseconds(kernel, launches(x)[kernel]):.0f} us", flush=True)
            except Exception as error:  # a configuration that does not fit is a result too
                print(f"{kernel} {change}: {type(error).__name__}: {str(error)[:100]}", flush=True)


if __name__ == "__main__":
    main()
