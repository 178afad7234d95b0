"""chunk_kda on a GPU: error ratios against float64, and time of forward and forward+backward against fla-core.

    python benchmarks/kda.py --json benchmarks/results/kda_h200.json

Medians of triton.testing.do_bench, eager, in-kernel gate, l2norm and sigmoid of beta, initial and final state. FLA
comes last, since its first calls autotune for minutes; the file is written after each step, so that a run that is cut
short keeps what it measured. fla-core's other backends (TileLang, FlashKDA, FlashQLA) are switched off.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

import fla_inductor
from fla_inductor.reference import kda as reference

for switch in ("FLA_TILELANG", "FLA_FLASH_KDA", "FLA_FLASH_QLA"):
    os.environ.setdefault(switch, "0")

FLAGS: dict[str, Any] = {
    "use_gate_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "output_final_state": True,
    "state_v_first": True,
}
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
BARS = {
    "o": 0.005,
    "final_state": 0.005,
    "q": 0.008,
    "k": 0.008,
    "v": 0.008,
    "g": 0.015,
    "beta": 0.015,
    "A_log": 0.008,
    "dt_bias": 0.008,
    "initial_state": 0.008,
}


def make(B: int, T: int, H: int, D: int) -> dict[str, Tensor]:
    """Gates as FLA's layer initialises them: A in [1, 16], time steps log-uniform in [1e-3, 0.1]."""
    torch.manual_seed(0)

    def rn(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda").bfloat16()

    dt = torch.exp(torch.rand(H * D, device="cuda") * 4.6 - 6.9).clamp_min(1e-4)
    return {
        "q": rn(B, T, H, D),
        "k": rn(B, T, H, D),
        "v": rn(B, T, H, D),
        "g": rn(B, T, H, D),
        "beta": rn(B, T, H),
        "A_log": torch.log(torch.rand(H, device="cuda") * 15 + 1),
        "dt_bias": dt + torch.log(-torch.expm1(-dt)),
        "initial_state": torch.randn(B, H, D, D, device="cuda"),
    }


def milliseconds(fn: Callable[[], Any]) -> float:
    return float(triton.testing.do_bench(fn, warmup=25, rep=100, return_mode="median"))


def step(fn: Callable[..., Any], x: dict[str, Tensor], do: Tensor, dht: Tensor) -> Callable[[], Any]:
    """Forward and backward of `fn`; gradients of every input."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in x.items()}

    def run() -> Any:
        o, ht = fn(**leaves, **FLAGS)
        return o, ht, torch.autograd.grad([o, ht], list(leaves.values()), [do, dht])

    return run


def errors(x: dict[str, Tensor], do: Tensor, dht: Tensor) -> dict[str, float]:
    """Error ratios RMS(ref - x) / RMS(ref) of outputs and gradients against the chunk form in float64."""
    o, ht, grads = step(fla_inductor.chunk_kda, x, do, dht)()
    wide = {name: t.double() for name, t in x.items()}
    options = {name: flag for name, flag in FLAGS.items() if name != "output_final_state"}
    options |= {"scale": x["q"].shape[-1] ** -0.5, "allow_neg_eigval": False, "lower_bound": None, "chunk_size": 64}
    tensors = [wide[name] for name in NAMES] + [None]
    o_ref, ht_ref, _ = reference.chunk_forward(*tensors, **options)
    by_name = reference.chunk_backward(do.double(), dht.double(), *tensors, None, **options)
    pairs = {"o": (o_ref, o), "final_state": (ht_ref, ht)}
    keys = ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0")
    pairs |= {
        name: (by_name[key].reshape(x[name].shape), grad) for name, key, grad in zip(NAMES, keys, grads, strict=True)
    }
    return {
        name: float((a - b.detach().double()).square().mean().sqrt() / a.square().mean().sqrt())
        for name, (a, b) in pairs.items()
    }


def environment() -> dict[str, str]:
    versions = {"torch": torch.__version__, "triton": triton.__version__, "fla_inductor": fla_inductor.__version__}
    return {**versions, "device": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}


def against_fla(x: dict[str, Tensor], do: Tensor, dht: Tensor, row: dict[str, Any], save: Callable[[], None]) -> None:
    try:
        from fla.ops.kda import chunk_kda
    except ImportError as error:
        print(f"fla-core is not importable ({error}): no comparison")
        return
    row["fla_core"] = importlib.metadata.version("fla-core")
    with torch.no_grad():
        row["fla_forward_ms"] = milliseconds(lambda: chunk_kda(**x, **FLAGS))
    row["forward_ratio"] = row["fla_forward_ms"] / row["forward_ms"]
    save()
    row["fla_forward_backward_ms"] = milliseconds(step(chunk_kda, x, do, dht))
    row["forward_backward_ratio"] = row["fla_forward_backward_ms"] / row["forward_backward_ms"]
    save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/kda.json"))
    parser.add_argument("--shape", default="1x8192x32x128", help="B x T x H x D")
    parser.add_argument("--no-fla", action="store_true")
    arguments = parser.parse_args()
    B, T, H, D = (int(n) for n in arguments.shape.split("x"))
    x = make(B, T, H, D)
    do, dht = torch.randn_like(x["v"]), torch.randn_like(x["initial_state"])
    row: dict[str, Any] = {"op": "chunk_kda", "shape": arguments.shape, "dtype": "bfloat16", **environment()}

    def save() -> None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(row, indent=2) + "\n")
        print(json.dumps(row), flush=True)

    row["errors"] = errors(x, do, dht)
    row["within_bars"] = all(row["errors"][name] <= bar for name, bar in BARS.items())
    with torch.no_grad():
        row["forward_ms"] = milliseconds(lambda: fla_inductor.chunk_kda(**x, **FLAGS))
    row["forward_backward_ms"] = milliseconds(step(fla_inductor.chunk_kda, x, do, dht))
    save()
    if not arguments.no_fla:
        against_fla(x, do, dht, row, save)


if __name__ == "__main__":
    main()
