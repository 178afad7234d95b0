"""Every KDA template with the dtypes and ranks of its tensors, for compile tests and resource reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fla_inductor.templates import kda
from fla_inductor.templates.render import Kernel, render
from fla_inductor.tuning.kda import kda_config

RANKS = dict.fromkeys(("q", "k", "v", "g", "do", "o", "h0", "dht", "dq", "dk"), 4) | {"beta": 3, "cu_seqlens": 1}


def problem(
    K: int = 128, V: int = 128, dtype: torch.dtype = torch.bfloat16, sm: int = 90, **changes: Any
) -> kda.KdaProblem:
    work = "float32" if dtype == torch.float32 else "bfloat16"
    base: dict[str, Any] = {
        "H": 32,
        "HV": 32,
        "K": K,
        "V": V,
        "chunk_size": 64,
        "scale": 0.1,
        "work_dtype": work,
        "varlen": False,
        "use_gate": True,
        "lower_bound": None,
        "has_A": True,
        "has_bias": True,
        "norm": True,
        "sigmoid": True,
        "allow_neg_eigval": False,
        "v_first": True,
        "has_h0": True,
        "has_ht": True,
        "config": kda_config(work, K, (sm // 10, sm % 10)),
    }
    return kda.KdaProblem(**{**base, **changes})


def kernels(p: kda.KdaProblem, work: str) -> Iterator[tuple[Kernel, dict[str, str], Any]]:
    """(kernel, dtypes of its tensors, configuration) of each template."""
    inputs = dict.fromkeys(("q", "k", "v", "g", "beta", "do", "o", "out", "DQ", "DK"), work)
    fixed = dict.fromkeys(("A_log", "dt_bias", "h0", "ht", "dht", "dh0", "RK", "DA", "DBIAS"), "float32")
    tiles = {name: dtype for name, (_, dtype) in {**p.tile_shapes(), **p.backward_shapes()}.items()}
    dtypes = {**inputs, **fixed, **tiles, "STATES": p.work_dtype, "cu_seqlens": "int32"}
    c = p.config
    table = [
        ("kda_prepare", p.prepare(), c.prepare),
        ("kda_scan", p.scan(False, False, True), c.scan),
        ("kda_scan", p.scan(True, True, False), c.scan),
        ("kda_scan_backward", p.scan_backward(True), c.scan_backward),
        ("kda_grad_intra", p.grad_intra(True), c.grad_intra),
        ("kda_grad_intra", p.grad_intra(False), c.grad_intra),
        ("kda_grad_input", p.grad_input(), c.grad_input),
        ("kda_recurrent", p.recurrent(False), c.recurrent),
    ]
    for name, constants, config in table:
        kernel = render(name, {**constants, "INDEX_DTYPE": "tl.int32"})
        out = {"kda_prepare": "float32"}.get(name, work)
        yield kernel, {**dtypes, "out": out}, config


def ranks(kernel: Kernel) -> dict[str, int]:
    output = {"kda_prepare": 3, "kda_grad_intra": 3}.get(kernel.name, 4)
    return {**RANKS, "out": output}
