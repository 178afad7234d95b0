"""The commands of `python -m fla_inductor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def about() -> None:
    """Linear-attention operators that torch.compile and AOTInductor see through."""


@app.command()
def demo(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    steps: Annotated[int, typer.Option(help="training steps", min=1)] = 100,
    text: Annotated[Path | None, typer.Option(help="file to train on", exists=True, dir_okay=False)] = None,
    out: Annotated[Path, typer.Option(help="folder for the loss curve and the package")] = Path("demo_output"),
) -> None:
    """Train a small KDA language model compiled, generate, export, and check every step."""
    from fla_inductor.tools.demo import SETTINGS, run

    if device not in SETTINGS:
        raise typer.BadParameter(f"expected {' or '.join(SETTINGS)}, got {device!r}", param_hint="--device")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch.cuda.is_available() is False", param_hint="--device")
    raise typer.Exit(0 if run(device, steps, text, out.resolve()) else 1)
