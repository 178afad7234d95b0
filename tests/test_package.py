"""What is installed, and what importing it costs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import fla_inductor

ROOT = Path(__file__).parent.parent


def in_fresh_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_import_brings_neither_inductor_nor_triton():
    code = """
import json, sys, torch
before = set(sys.modules)
import fla_inductor
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    added = json.loads(in_fresh_process(code))
    assert "fla_inductor.custom_ops.kda" in added
    heavy = re.compile(r"(torch\._inductor|torch\._dynamo|triton|rich|typer|matplotlib|numpy)(\.|$)")
    assert [name for name in added if heavy.match(name)] == []


def test_works_without_triton():
    code = """
import sys
sys.modules["triton"] = None
import torch, fla_inductor
q = torch.randn(1, 5, 2, 8)
o, _ = fla_inductor.chunk_kda(q, q, q, -q.abs(), q[..., 0].sigmoid(), use_qk_l2norm_in_kernel=True)
print(list(o.shape))
"""
    assert json.loads(in_fresh_process(code)) == [1, 5, 2, 8]


def test_import_is_cheap():
    code = """
import time, torch
start = time.perf_counter()
import fla_inductor
print(time.perf_counter() - start)
"""
    assert min(float(in_fresh_process(code)) for _ in range(3)) < 0.3


@pytest.mark.parametrize("name", sorted(set(fla_inductor.__all__) - {"layers"}))
def test_public_function_has_an_operator(name):
    assert callable(getattr(fla_inductor, name))
    assert hasattr(torch.ops.fla_inductor, name)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_every_file_of_the_package(wheel):
    """Templates and py.typed too, and nothing that is not the package."""
    package = ROOT / "fla_inductor"
    files = {p.relative_to(ROOT).as_posix() for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert "fla_inductor/py.typed" in files
    assert any(name.endswith(".py.jinja") for name in files)
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert shipped == files


def test_wheel_metadata(wheel):
    (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    metadata = wheel.read(name).decode()
    assert f"\nVersion: {fla_inductor.__version__}\n" in metadata
    required = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    assert [r for r in required if "extra ==" not in r] == ["torch<2.15,>=2.11"]
    assert set(re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE)) == {"bench", "cli", "dev", "hf", "test"}


def test_changelog_names_the_version():
    assert f"## {fla_inductor.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_private_torch_modules_are_named_in_few_places():
    """torch._inductor is imported by the lowerings, the passes, and _compat.py, nowhere else."""
    allowed = {"lowerings", "passes", "_compat.py", "_autoload.py"}
    package = ROOT / "fla_inductor"
    found = [
        path.relative_to(package).as_posix()
        for path in sorted(package.rglob("*.py"))
        if path.relative_to(package).parts[0] not in allowed
        and re.search(r"^\s*(from|import) torch\._inductor", path.read_text(), re.MULTILINE)
    ]
    assert found == []


README = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [pytest.param(c, marks=pytest.mark.aoti if "aoti" in c else (), id=f"example-{i}") for i, c in enumerate(README)],
)
def test_examples_in_the_readme_run(code):
    """Inductor compiles the same layer in the demonstration (test_demo.py): once is enough."""
    in_fresh_process(code.replace("fullgraph=True)", 'fullgraph=True, backend="aot_eager")'))
