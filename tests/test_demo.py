"""The command line and the demonstration."""

from __future__ import annotations

import collections
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console
from typer.testing import CliRunner

import fla_inductor.__main__ as command_line
from fla_inductor.layers import KDACache
from fla_inductor.tools import cli, corpus, demo, fusion, package
from fla_inductor.tools.byte_lm import ByteLM, ByteLMConfig

ROOT = Path(__file__).parent.parent
TINY = ByteLMConfig(hidden_size=32, num_layers=2, num_heads=2, head_dim=16, mlp_size=48)


def test_text_is_real_and_large_enough():
    data = corpus.load()
    assert data.dtype == torch.uint8
    assert 1_000_000 < data.numel() <= 4_000_000
    files = list(corpus.text_files())
    assert files == list(corpus.text_files())
    assert b"def " in bytes(data[:100_000].tolist())


def test_text_of_a_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(256)) * 20)
    data = corpus.load(path)
    assert bytes(data.tolist()) == path.read_bytes()
    train, held_out = (corpus.Batches(data, 4, 33, torch.device("cpu"), held_out=h) for h in (False, True))
    assert train.data.numel() + held_out.data.numel() == data.numel()
    batch = train.draw()
    assert batch.shape == (4, 33)
    assert batch.dtype == torch.int64
    assert not torch.equal(batch, train.draw())
    with pytest.raises(ValueError, match="text of 5120 bytes: expected over"):
        corpus.Batches(data, 4, 600, torch.device("cpu"), held_out=True)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_generation_equals_the_chunk_path(temperature):
    model = ByteLM(TINY).eval()
    prompt = torch.randint(256, (2, 70))
    tokens, logits = model.generate(prompt, 9, temperature)
    with torch.no_grad():
        whole = model(torch.cat([prompt, tokens[:, :-1]], 1))[:, -9:]
    assert demo.error_ratio(whole, logits) < 1e-5
    if not temperature:
        assert torch.equal(tokens, whole.argmax(-1))


def test_a_cache_continues_the_model():
    model = ByteLM(TINY).eval()
    tokens, cache = torch.randint(256, (1, 20)), KDACache()
    with torch.no_grad():
        pieces = [model(piece, cache) for piece in tokens.split([1, 3, 16], 1)]
        assert demo.error_ratio(model(tokens), torch.cat(pieces, 1)) < 1e-5


def test_error_ratio_of_nonsense_is_infinite():
    assert demo.error_ratio(torch.ones(3), torch.tensor([1.0, torch.nan, 1.0])) == float("inf")


CODE = """
cpp_fused_add_0 = async_compile.cpp_pybinding(['float*'], r'''x''')
triton_tem_fused_chunk_kda_1 = async_compile.triton('triton_tem_fused_chunk_kda_1', '''x''')
triton_poi_fused_fused_kda_gate_2 = async_compile.triton('triton_poi_fused_fused_kda_gate_2', '''x''')
cpp_fused__unsafe_view_chunk_kda_silu_view_3 = async_compile.cpp_pybinding(['float*'], r'''x''')
cpp_fused_chunk_kda_chunk_kda_backward_slice_4 = async_compile.cpp_pybinding(['float*'], r'''x''')
cpp_fused_chunk_kda_backward_5 = async_compile.cpp_pybinding(['float*'], r'''x''')
def call(args):
        cpp_fused_add_0(buf0)
        extern_kernels.mm(arg0, arg1, out=buf0)
        extern_kernels.mm(arg0, arg1, out=buf1)
        buf3 = torch.ops.fla_inductor.chunk_kda_backward.default(buf0)
        buf4 = torch.ops.aten.sort.stable(buf0)
"""


def test_fusion_is_read_from_generated_code():
    kernels = fusion.count([CODE])
    assert [name[-1] for name in kernels.fused] == ["0", "2", "3", "4", "5"]
    assert kernels.templates == ("triton_tem_fused_chunk_kda_1",)
    assert kernels.extern == collections.Counter(mm=2, sort=1)
    assert kernels.called == collections.Counter(chunk_kda_backward=1)
    assert kernels.fate("chunk_kda") == "1 template and 2 kernels, 1 shared with its neighbours"
    assert kernels.fate("chunk_kda_backward") == "one call each"
    assert kernels.fate("fused_kda_gate") == "1 kernel, 0 shared with its neighbours"
    assert kernels.fate("l2norm") == "dissolved into the kernels around it"


def test_trace_counts_operators():
    graph = fusion.trace(ByteLM(TINY).loss, torch.randint(256, (1, 9)))
    assert graph.breaks == 0
    assert graph.calls == collections.Counter(causal_conv1d=6, chunk_kda=2, rms_norm_gated=2)


def test_a_package_that_fails_is_reported(tmp_path):
    broken = tmp_path / "broken.pt2"
    broken.write_bytes(b"not a package")
    with pytest.raises(RuntimeError, match="broken\\.pt2 failed in a fresh process"):
        package.run_in_fresh_process(broken, [torch.zeros(1)])


@pytest.mark.parametrize(("passed", "status"), [(True, 0), (False, 1)])
def test_exit_status(monkeypatch, tmp_path, passed, status):
    calls = []

    def run(*arguments: object) -> bool:
        calls.append(arguments)
        return passed

    monkeypatch.setattr(demo, "run", run)
    result = CliRunner().invoke(cli.app, ["demo", "--steps", "3", "--out", str(tmp_path)])
    assert result.exit_code == status
    assert calls == [("cpu", 3, None, tmp_path)]


@pytest.mark.parametrize("arguments", [["--device", "tpu"], ["--steps", "0"], ["--text", "no such file"]])
def test_bad_options(arguments):
    result = CliRunner().invoke(cli.app, ["demo", *arguments])
    assert result.exit_code == 2
    assert arguments[0] in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_cuda_without_a_gpu_is_refused():
    result = CliRunner().invoke(cli.app, ["demo", "--device", "cuda"])
    assert result.exit_code == 2
    assert "torch.cuda.is_available() is False" in result.output


def test_missing_extras_are_named(monkeypatch):
    find = importlib.util.find_spec
    missing = {"typer", "matplotlib"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in missing else find(name, *rest))
    with pytest.raises(SystemExit) as stopped:
        command_line.main()
    assert str(stopped.value) == (
        "fla_inductor: missing typer, matplotlib; install with: pip install 'fla-inductor[bench,cli]'"
    )


def test_a_failed_comparison_is_remembered(tmp_path):
    console = Console(file=(tmp_path / "log").open("w"))
    run = demo.Demo("cpu", 1, None, tmp_path, console)
    run.check_close("same", torch.ones(3), torch.ones(3), 1e-6)
    assert run.passed
    run.check_close("different", torch.ones(3), torch.zeros(3), 1e-6)
    run.check_close("same", torch.ones(3), torch.ones(3), 1e-6)
    assert not run.passed


@pytest.mark.slow
@pytest.mark.aoti
def test_demo_from_end_to_end(tmp_path):
    command = [sys.executable, "-m", "fla_inductor", "demo", "--steps", "10", "--out", str(tmp_path)]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout + child.stderr
    assert "FAILED" not in child.stdout
    assert "every comparison held" in child.stdout
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"loss.png", "byte_lm.pt2"}
