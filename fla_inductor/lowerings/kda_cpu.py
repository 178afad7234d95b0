"""KDA on the CPU: the operators decompose to aten, which Inductor's C++ backend fuses.

The one sequential piece, the recurrence over chunks, stays an operator with a C++ kernel of its own (`chunk_scan`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._inductor import decomposition

from fla_inductor.custom_ops import kda, recurrent_kda

ops = torch.ops.fla_inductor

# off: CPU tensors stand for those of another device (graphs traced on the CPU and compiled for CUDA, in tests)
DECOMPOSE = True


def _decomposes(q: Tensor) -> bool:
    """On the CPU, and anywhere if the call is empty: templates want at least one token."""
    empty = isinstance(q.shape[0], int) and isinstance(q.shape[1], int) and q.shape[0] * q.shape[1] == 0
    return DECOMPOSE and (q.device.type == "cpu" or empty)


def _chunk_kda(*args: Any) -> Any:
    x = kda.Forward(*args)
    return kda.reference_forward(x, ops._chunk_scan) if _decomposes(x.q) else NotImplemented


def _chunk_kda_backward(*args: Any) -> Any:
    x = kda.Backward(*args)
    return kda.reference_backward(x, ops._chunk_scan) if _decomposes(x.q) else NotImplemented


def _fused_recurrent_kda(*args: Any) -> Any:
    x = recurrent_kda.Recurrent(*args)
    if not _decomposes(x.q):
        return NotImplemented
    if x.cu_seqlens is None and isinstance(x.q.shape[1], int) and x.q.shape[1] == 1:
        return recurrent_kda.by_tokens(x)
    return recurrent_kda.by_chunks(x, ops._chunk_scan)


def register() -> None:
    """Add the decompositions to Inductor's table, and drop the copies of it made before."""
    table = {
        ops.chunk_kda.default: _chunk_kda,
        ops.chunk_kda_backward.default: _chunk_kda_backward,
        ops.fused_recurrent_kda.default: _fused_recurrent_kda,
    }
    for op, rule in table.items():
        decomposition.register_decomposition([op])(rule)
    decomposition.fast_random_decomps.cache_clear()
