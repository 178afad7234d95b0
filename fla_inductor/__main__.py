"""Command line: `python -m fla_inductor demo`."""

from __future__ import annotations

import importlib.util
import sys

_NEEDED = {"typer": "cli", "rich": "cli", "matplotlib": "bench"}


def main() -> None:
    """Run the command line, or exit with the command that installs what it needs."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        extras = ",".join(sorted({_NEEDED[name] for name in missing}))
        sys.exit(f"fla_inductor: missing {', '.join(missing)}; install with: pip install 'fla-inductor[{extras}]'")
    from fla_inductor.tools.cli import app

    app(prog_name="python -m fla_inductor")


if __name__ == "__main__":
    main()
