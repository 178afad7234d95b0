#!/usr/bin/env bash
# The checks that people and CI run; `make lint` brings the tools.
set -euo pipefail
cd "$(dirname "$0")"
ruff check .
ruff format --check .
mypy
