"""Compiles fla-core's autotuning candidates in parallel, so that its first timed call only has to run them.

    FLA_CACHE_RESULTS=0 python benchmarks/warm_fla.py --shape 1x8192x32x128 --workers 12

Triton's autotuner compiles candidates one after the other. Here each worker compiles its share of every kernel's
candidates into Triton's disk cache; which one wins is still decided, later, by fla-core's own autotuning.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import Any


def _compile_share(worker: int, workers: int, shape: str) -> None:
    from triton.runtime import autotuner

    bench = autotuner.Autotuner._bench
    seen: dict[int, int] = {}

    def only_mine(self: Any, *args: Any, config: Any, **kwargs: Any) -> Any:
        """Others' candidates are not run; the first of a kernel always is, since one has to win."""
        count = seen[id(self)] = seen.get(id(self), -1) + 1
        if count and count % workers != worker:
            return [float("inf")] * 3
        return bench(self, *args, config=config, **kwargs)

    autotuner.Autotuner._bench = only_mine
    import kda
    import torch
    from fla.ops.kda import chunk_kda

    x = kda.make(*(int(n) for n in shape.split("x")))
    kda.step(chunk_kda, x, torch.randn_like(x["v"]), torch.randn_like(x["initial_state"]))()
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="1x8192x32x128")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--worker", type=int)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        _compile_share(arguments.worker, arguments.workers, arguments.shape)
        return
    command = [sys.executable, __file__, "--shape", arguments.shape, "--workers", str(arguments.workers)]
    children = [subprocess.Popen([*command, "--worker", str(i)], env=os.environ) for i in range(arguments.workers)]
    codes = [child.wait() for child in children]
    print("warm_fla: exit codes", codes)


if __name__ == "__main__":
    main()
