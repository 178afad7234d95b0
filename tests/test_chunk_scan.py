"""The state recurrence over chunks: eager, and its C++ kernel under torch.compile and in AOTInductor packages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fla_inductor.custom_ops.chunk_scan  # noqa: F401  (defines the operator)

scan = torch.ops.fla_inductor._chunk_scan.default
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    from fla_inductor.lowerings.chunk_scan import register

    register()
    register()


def inputs(
    heads: int = 3,
    chunks: int = 5,
    tokens: int = 7,
    keys: int = 12,
    values: int = 20,
    rows: int = 3,
    dtype: torch.dtype = torch.float32,
    restart: list[int] | None = None,
) -> Inputs:
    """Random operands that keep the state's size near one; every third chunk restarts unless `restart` is given."""
    if restart is None:
        restart = [c % rows if c % 3 == 1 else -1 for c in range(chunks)]
    x = torch.randn(heads, chunks, tokens, keys, dtype=dtype) * 0.3 * max(tokens, 1) ** -0.5
    y = torch.randn(heads, chunks, tokens, keys, dtype=dtype) * max(keys, 1) ** -0.5
    return (
        torch.rand(heads, chunks, keys, dtype=dtype),
        x,
        y,
        torch.randn(heads, chunks, keys, values, dtype=dtype),
        torch.randn(heads, rows, keys, values, dtype=dtype),
        torch.tensor(restart, dtype=torch.int64),
    )


def reference(decay: Tensor, x: Tensor, y: Tensor, z: Tensor, init: Tensor, restart: Tensor, reverse: bool) -> Tensor:
    """The definition, one p and one chunk after the other, in float64."""
    decay, x, y, z, init = (t.double() for t in (decay, x, y, z, init))
    out = torch.full(z.shape, float("nan"), dtype=torch.float64)
    for p in range(z.shape[0]):
        state = torch.zeros(z.shape[2:], dtype=torch.float64)
        order = range(z.shape[1])
        for c in reversed(order) if reverse else order:
            start = int(restart[c])
            state = init[p, start] if start >= 0 else state
            state = torch.diag(decay[p, c]) @ state - x[p, c].T @ (y[p, c] @ state) + z[p, c]
            out[p, c] = state
    return out


def error_ratio(expected: Tensor, got: Tensor) -> float:
    assert got.shape == expected.shape
    if expected.numel() == 0:
        return 0.0
    return float((got.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def strided(arguments: Inputs) -> Inputs:
    """The same values behind other strides: transposed, stepped, offset and broadcast."""
    decay, x, y, z, init, restart = arguments
    return (
        decay[:1].expand_as(decay),
        x.mT.contiguous().mT,
        y.transpose(0, 1).contiguous().transpose(0, 1),
        z.mT.contiguous().mT,
        torch.cat((init, init), 3).repeat_interleave(2, 1)[:, ::2, :, init.shape[3] :],
        torch.stack((restart, restart + 100), 1)[:, 0],
    )


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("layout", [tuple, strided])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_eager(
    dtype: torch.dtype, bound: float, layout: Callable[[Inputs], Inputs], reverse: bool, poisoned_memory: None
) -> None:
    arguments = layout(inputs(dtype=dtype))
    before = [t.clone() for t in arguments]
    out = scan(*arguments, reverse)
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert error_ratio(reference(*arguments, reverse), out) < bound
    assert all(torch.equal(a, b) for a, b in zip(arguments, before, strict=True))


def test_restart_ignores_what_came_before() -> None:
    decay, x, y, z, init, restart = inputs(restart=[-1, -1, 2, -1, -1])
    z[:, :2] = float("nan")
    out = scan(decay, x, y, z, init, restart, False)
    assert out[:, :2].isnan().all()
    assert error_ratio(reference(decay, x, y, z, init, restart, False)[:, 2:], out[:, 2:]) < 1e-6


@pytest.mark.parametrize("reverse", [False, True])
def test_opcheck(reverse: bool) -> None:
    torch.library.opcheck(scan, (*inputs(), reverse))
    torch.library.opcheck(scan, (*strided(inputs()), reverse))


def test_is_not_differentiable() -> None:
    decay, *others = inputs()
    out = scan(decay.requires_grad_(), *others, False)
    with pytest.raises(RuntimeError, match="_chunk_scan is not differentiable"):
        out.sum().backward()


BAD = {
    "decay": (TypeError, lambda t: t.bfloat16()),
    "x": (ValueError, lambda t: t[..., 1:]),
    "y": (ValueError, lambda t: t[:, :, 1:]),
    "z": (TypeError, lambda t: t.double()),
    "init": (ValueError, lambda t: t[1:]),
    "restart": (TypeError, lambda t: t.int()),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_argument(name: str, fresh_compile: None) -> None:
    kind, spoil = BAD[name]
    arguments = dict(zip(BAD, inputs(), strict=True))
    arguments[name] = spoil(arguments[name])
    message = rf"_chunk_scan: argument `{name}`: expected .*, got "
    with pytest.raises(kind, match=message):
        scan(*arguments.values(), False)
    with pytest.raises(kind, match=message):
        torch.compile(lambda *a: scan(*a, False), fullgraph=True, backend="eager")(*arguments.values())


def test_restart_past_init(fresh_compile: None) -> None:
    arguments = inputs(rows=3, restart=[-1, 3, -1, -1, -1])
    with pytest.raises(ValueError, match="argument `restart`: expected indices below R = 3"):
        scan(*arguments, False)
    compiled = torch.compile(lambda *a: scan(*a, False), fullgraph=True)
    with pytest.raises(RuntimeError, match="argument `restart`: expected indices below R"):
        compiled(*arguments)
    arguments[5][1] = 2
    assert error_ratio(reference(*arguments, False), compiled(*arguments)) < 1e-6


@pytest.mark.parametrize("reverse", [False, True])
def test_compiled_static(reverse: bool, fresh_compile: None, poisoned_memory: None) -> None:
    compiled = torch.compile(lambda *a: scan(*a, reverse), fullgraph=True, dynamic=False)
    arguments = inputs(tokens=9, keys=13, values=37)
    out = compiled(*arguments)
    assert out.stride() == scan(*arguments, reverse).stride()
    assert error_ratio(reference(*arguments, reverse), out) < 1e-6


@pytest.mark.parametrize("reverse", [False, True])
def test_compiled_dynamic_number_of_chunks(reverse: bool, fresh_compile: None) -> None:
    graphs = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(lambda *a: scan(*a, reverse), fullgraph=True, backend=graphs)
    for chunks in (5, 2, 33, 1, 8):
        arguments = inputs(chunks=chunks)
        for tensor, dim in zip(arguments, (1, 1, 1, 1, None, 0), strict=True):
            if dim is not None and chunks > 1:
                torch._dynamo.mark_dynamic(tensor, dim)
        assert error_ratio(reference(*arguments, reverse), compiled(*arguments)) < 1e-6
    assert graphs.frame_count == 2


def test_compiled_sizes(fresh_compile: None) -> None:
    """One graph with every size symbolic: all widths, tails of rows and columns, and sizes that use other threads."""
    compiled = torch.compile(lambda *a: scan(*a, False), fullgraph=True, dynamic=True)
    sizes = [
        (2, 3, 4, 8, 16),
        (3, 2, 5, 9, 31),
        (2, 2, 3, 2, 64),
        (5, 2, 64, 65, 48),
        (7, 2, 9, 33, 65),
        (2, 2, 7, 6, 200),
    ]
    for heads, chunks, tokens, keys, values in sizes:
        arguments = inputs(heads, chunks, tokens, keys, values)
        assert error_ratio(reference(*arguments, False), compiled(*arguments)) < 1e-6


def test_compiled_float64(fresh_compile: None) -> None:
    compiled = torch.compile(lambda *a: scan(*a, True), fullgraph=True)
    arguments = inputs(values=37, dtype=torch.float64)
    assert error_ratio(reference(*arguments, True), compiled(*arguments)) < 1e-14


@pytest.mark.parametrize("settings", [{"cpp.simdlen": 1}, {"cpp.threads": 1}, {"cpp_wrapper": True}])
def test_compiled_with_other_settings(settings: dict[str, Any], fresh_compile: None) -> None:
    """No vector instructions, one thread, and the wrapper in C++."""
    compiled = torch.compile(lambda *a: scan(*a, False), fullgraph=True, options=settings)
    arguments = inputs(heads=2, values=37)
    assert error_ratio(reference(*arguments, False), compiled(*arguments)) < 1e-6


@pytest.mark.parametrize("empty", ["heads", "chunks", "tokens", "keys", "values", "rows"])
def test_empty_sizes(empty: str, fresh_compile: None) -> None:
    settings: dict[str, Any] = {empty: 0}
    if empty == "rows":
        settings["restart"] = [-1] * 5
    arguments = inputs(**settings)
    expected = reference(*arguments, False)
    assert error_ratio(expected, scan(*arguments, False)) < 1e-6
    assert error_ratio(expected, torch.compile(lambda *a: scan(*a, False), fullgraph=True)(*arguments)) < 1e-6


def test_compiled_strides(fresh_compile: None) -> None:
    from torch._inductor.utils import run_and_get_code

    arguments = strided(inputs(values=37))
    out, (code,) = run_and_get_code(torch.compile(lambda *a: scan(*a, False), fullgraph=True), *arguments)
    assert error_ratio(reference(*arguments, False), out) < 1e-6
    assert code.count("async_compile.cpp_pybinding(") == 1, "an input was copied"


def surrounded(decay: Tensor, x: Tensor, y: Tensor, z: Tensor, init: Tensor, restart: Tensor) -> tuple[Tensor, ...]:
    """Pointwise producers and consumers, views of computed values, one tensor in two places, two scans in a row."""
    rows = torch.where(restart >= 0, restart, -1)
    first = scan((-decay).exp(), (x * 2).mT.contiguous().mT, y.tanh(), (z + 1).mT.relu().mT, init * 0.5, rows, False)
    again = y * 0.3
    second = scan(decay[:, 1:], again[:, 1:], again[:, :-1], first[:, :-1], first[:, 2:4], rows[1:].clamp(max=1), True)
    return first.sigmoid(), second.transpose(1, 2) * 2 + first[:, 1:].transpose(1, 2), second


def surrounded_reference(*arguments: Tensor) -> tuple[Tensor, ...]:
    decay, x, y, z, init, restart = (t.double() if t.is_floating_point() else t for t in arguments)
    first = reference((-decay).exp(), x * 2, y.tanh(), (z + 1).relu(), init * 0.5, restart, False)
    again = y * 0.3
    second = reference(
        decay[:, 1:], again[:, 1:], again[:, :-1], first[:, :-1], first[:, 2:4], restart[1:].clamp(max=1), True
    )
    return first.sigmoid(), second.transpose(1, 2) * 2 + first[:, 1:].transpose(1, 2), second


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_a_larger_graph(dynamic: bool, fresh_compile: None) -> None:
    from torch._inductor.utils import run_and_get_code

    compiled = torch.compile(surrounded, fullgraph=True, dynamic=dynamic)
    arguments = inputs(chunks=6)
    outputs, (code,) = run_and_get_code(compiled, *arguments)
    for expected, got in zip(surrounded_reference(*arguments), outputs, strict=True):
        assert error_ratio(expected, got) < 1e-6
    executed = "\n".join(line for line in code.splitlines() if not line.lstrip().startswith("#"))
    assert "fla_inductor" not in executed
    assert "extern_kernels." not in executed


def test_compiled_one_tensor_in_two_places(fresh_compile: None) -> None:
    decay, x, _, z, _, restart = inputs(chunks=5, rows=5)
    compiled = torch.compile(lambda d, x, z, r: scan(d, x, x, z, z, r, False), fullgraph=True)
    assert error_ratio(reference(decay, x, x, z, z, restart, False), compiled(decay, x, z, restart)) < 1e-6


LOAD = """
import json, sys
import torch
package, data, output = sys.argv[1:]
run = torch._inductor.aoti_load_package(package)
results = []
for arguments in torch.load(data):
    try:
        results.append(run(*arguments))
    except RuntimeError as error:
        results.append(str(error))
torch.save(results, output)
modules = [m for m in sys.modules if m.startswith("fla")]
print(json.dumps({"modules": modules, "ops": hasattr(torch.ops.fla_inductor, "_chunk_scan")}))
"""


class Surrounded(torch.nn.Module):
    def forward(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        return surrounded(*arguments)


@pytest.mark.aoti
def test_aot_inductor_in_a_fresh_process(tmp_path: Path) -> None:
    chunks = torch.export.Dim("chunks", min=4, max=2**20)
    dynamic = ({1: chunks}, {1: chunks}, {1: chunks}, {1: chunks}, None, {0: chunks})
    exported = torch.export.export(Surrounded(), inputs(chunks=6), dynamic_shapes=(dynamic,))
    package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "scan.pt2"))

    with zipfile.ZipFile(package) as archive:
        sources = {n: archive.read(n).decode() for n in archive.namelist() if n.endswith((".cpp", ".json"))}
    wrappers = [text for name, text in sources.items() if name.endswith(".cpp")]
    assert wrappers
    for text in sources.values():
        code = re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE)
        assert "fla_inductor" not in code
        assert not re.search(r"proxy_executor_call|aoti_torch_call_dispatcher", code)

    calls = [inputs(chunks=n) for n in (6, 4, 17)]
    bad = inputs(chunks=6, restart=[-1, -1, -1, 3, -1, -1])
    torch.save([*calls, bad], tmp_path / "inputs.pt")
    command = [sys.executable, "-I", "-c", LOAD, package, str(tmp_path / "inputs.pt"), str(tmp_path / "outputs.pt")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == {"modules": [], "ops": False}
    *results, refused = torch.load(tmp_path / "outputs.pt")
    assert isinstance(refused, str)
    for arguments, outputs in zip(calls, results, strict=True):
        for expected, got in zip(surrounded_reference(*arguments), outputs, strict=True):
            assert error_ratio(expected, got) < 1e-6


class Alone(torch.nn.Module):
    def forward(self, *arguments: Tensor) -> Tensor:
        return scan(*arguments, False)


@pytest.mark.aoti
def test_aot_inductor_single_chunk(tmp_path: Path) -> None:
    chunks = torch.export.Dim("chunks", min=1, max=2**20)
    dynamic = ({1: chunks}, {1: chunks}, {1: chunks}, {1: chunks}, None, {0: chunks})
    exported = torch.export.export(Alone(), inputs(chunks=5), dynamic_shapes=(dynamic,))
    package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "scan.pt2"))
    run = torch._inductor.aoti_load_package(package)
    for n in (5, 1, 40):
        arguments = inputs(chunks=n)
        assert error_ratio(reference(*arguments, False), run(*arguments)) < 1e-6
