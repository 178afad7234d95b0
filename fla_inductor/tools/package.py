"""AOTInductor packages: made here, checked in a process that knows nothing of this package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from fla_inductor import _compat

# run in the other process; everything it needs is in torch and in the two files
_RUN = """
import sys
import torch

package, inputs, outputs = sys.argv[1:]
model = torch._inductor.aoti_load_package(package)
torch.save([model(x) for x in torch.load(inputs)], outputs)
assert not [name for name in sys.modules if name.startswith("fla_inductor")], "fla_inductor was imported"
"""


def export(model: nn.Module, tokens: Tensor, path: Path) -> Path:
    """Compile `model(tokens)` ahead of time for any number of tokens T in [2, 2^20], `tokens` being [B, T]."""
    length = torch.export.Dim("T", min=2, max=2**20)
    with torch.no_grad():
        exported = torch.export.export(model, (tokens,), dynamic_shapes=({1: length},))
    return _compat.aoti_compile_and_package(exported, path)


def run_in_fresh_process(package: Path, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs of the package for each input, from a Python that imports torch and no part of fla_inductor.

    Raises RuntimeError with that process's messages if it fails.
    """
    given, made = package.with_suffix(".in.pt"), package.with_suffix(".out.pt")
    torch.save(list(inputs), given)
    # -P: the current folder, which may hold this package, is not searched for modules
    isolated = ["-P"] if sys.version_info >= (3, 11) else []
    command = [sys.executable, *isolated, "-c", _RUN, str(package), str(given), str(made)]
    child = subprocess.run(command, capture_output=True, text=True, cwd=package.parent, check=False)
    if child.returncode:
        raise RuntimeError(f"{package.name} failed in a fresh process:\n{child.stderr}")
    outputs: list[Tensor] = torch.load(made)
    given.unlink()
    made.unlink()
    return outputs
