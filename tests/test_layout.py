"""That things are where CONTRIBUTING.md says: stems, docstrings, private imports, template text."""

from __future__ import annotations

import ast
import importlib.resources
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fla_inductor
from fla_inductor import layers
from fla_inductor._library import NAMESPACE
from fla_inductor.contract import REGISTRY

PACKAGE = Path(fla_inductor.__file__).parent
TESTS = Path(__file__).parent

# the recurrent form is the same function as the chunk form: one definition, one test file
SHARES = {"recurrent_kda": "kda"}

PRIVATE = ("torch._inductor", "torch._dynamo", "torch._C", "torch._subclasses")
MAY_USE_PRIVATE = {"_compat.py", "lowerings", "passes", "tools"}

EACH_OPERATOR = pytest.mark.parametrize("op", REGISTRY)


def modules(folder: str = "") -> list[Path]:
    return sorted((PACKAGE / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Every module that the file imports, and every dotted name in it that starts with `torch.`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and (name := ast.unparse(node)).startswith("torch."):
            yield name


# Stems


def test_every_public_operator_has_a_contract() -> None:
    """A name that starts with an underscore, or belongs to the backward of another operator, is not public."""
    defined = {
        name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{NAMESPACE}::")
    }
    public = {name for name in defined if not name.startswith("_") and name.removesuffix("_backward") == name}
    assert public == REGISTRY.keys()
    assert all(name.removesuffix("_backward") in defined for name in defined)


@EACH_OPERATOR
def test_every_stage_has_the_same_stem(op: str) -> None:
    contract = REGISTRY[op]
    folder, stem = contract.public.__module__.rsplit(".", 1)
    assert folder == "fla_inductor.custom_ops"
    shared = SHARES.get(stem, stem)
    assert sys.modules[contract.public.__module__].reference.__name__ == f"fla_inductor.reference.{shared}"
    assert (TESTS / f"test_{shared}.py").exists()
    assert contract.public is getattr(fla_inductor, op)
    assert op in fla_inductor.__all__
    assert contract.lowering == "decomposition" or (PACKAGE / contract.lowering).exists()


@EACH_OPERATOR
def test_template_text_is_part_of_the_package(op: str) -> None:
    folder = importlib.resources.files("fla_inductor.templates")
    for name in REGISTRY[op].templates:
        assert "{{" in folder.joinpath(f"{name}.py.jinja").read_text()


def test_every_template_belongs_to_a_contract() -> None:
    files = {path.name.removesuffix(".py.jinja") for path in (PACKAGE / "templates").glob("*.py.jinja")}
    assert files == {name for contract in REGISTRY.values() for name in contract.templates}


# Docstrings


def _documented() -> dict[str, Callable[..., Any]]:
    functions = {name: getattr(fla_inductor, name) for name in fla_inductor.__all__ if name != "layers"}
    classes = {name: getattr(layers, name) for name in layers.__all__}
    taken = {name: x for name, x in classes.items() if issubclass(x, torch.nn.Module)}
    return functions | taken


@pytest.mark.parametrize("name", _documented())
def test_docstring_names_every_argument(name: str) -> None:
    """In a line of its own: `name: what it is`, or `name, other: what they are`."""
    public = _documented()[name]
    text = inspect.getdoc(public) or ""
    described = {word for line in re.findall(r"^ +(\w+(?:, \w+)*): ", text, re.MULTILINE) for word in line.split(", ")}
    arguments = [
        name if p.kind is not p.VAR_KEYWORD else f"**{name}" for name, p in inspect.signature(public).parameters.items()
    ]
    assert [argument for argument in arguments if argument not in described] == []


@EACH_OPERATOR
def test_docstring_has_its_parts(op: str) -> None:
    text = inspect.getdoc(REGISTRY[op].public) or ""
    sections = re.findall(r"^(Args|Returns|Raises|Source): ?", text, re.MULTILINE)
    assert sections == ["Args", "Returns", "Raises", "Source"]
    assert re.match(r"[A-Z][^\n]*\.\n\n", text), "one sentence on the first line"


# Imports


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_private_torch_modules_are_used_in_few_places(path: Path) -> None:
    used = {name for name in imports(path) if re.match(rf"({'|'.join(map(re.escape, PRIVATE))})\b", name)}
    assert not used or path.relative_to(PACKAGE).parts[0] in MAY_USE_PRIVATE, used


@pytest.mark.parametrize("path", modules("reference"), ids=lambda path: path.stem)
def test_references_import_nothing_but_torch(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports(path)}
    assert roots - {"__future__", "torch"} <= sys.stdlib_module_names
