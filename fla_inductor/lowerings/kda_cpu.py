"""KDA on the CPU: gates, norms and sigmoids decompose to aten, which Inductor's C++ backend fuses.

The recurrence is what remains, forward and backward one C++ kernel each (`kda_steps`). Only the states between chunks,
for those who ask for them, come from the chunk form; its own sequential piece is a C++ kernel too (`chunk_scan`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._inductor import decomposition

from fla_inductor.custom_ops import kda, recurrent_kda
from fla_inductor.reference import kda as reference

ops = torch.ops.fla_inductor

# off: CPU tensors stand for those of another device (graphs traced on the CPU and compiled for CUDA, in tests)
DECOMPOSE = True


def _decomposes(q: Tensor) -> bool:
    """On the CPU, and anywhere if the call is empty: templates want at least one token."""
    empty = isinstance(q.shape[0], int) and isinstance(q.shape[1], int) and q.shape[0] * q.shape[1] == 0
    return DECOMPOSE and (q.device.type == "cpu" or empty)


def _forward(x: kda.Forward | recurrent_kda.Recurrent, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    with torch.autocast(x.q.device.type, enabled=False):
        o, final_state = reference.token_forward(*x[:9], **_flags(x), walk=ops._kda_steps)
    return o.to(dtype), final_state if x.output_final_state else kda.absent(x.q, torch.float32)


def _flags(x: Any) -> dict[str, Any]:
    return {name: getattr(x, name) for name in ("scale", "state_v_first", *reference.Flags._fields)}


def _chunk_kda(*args: Any) -> Any:
    x = kda.Forward(*args)
    if not _decomposes(x.q):
        return NotImplemented
    states = kda.reference_forward(x, ops._chunk_scan)[2] if x.save_states else kda.absent(x.q, kda.states_dtype(x))
    return *_forward(x, x.q.dtype), states


def _chunk_kda_backward(*args: Any) -> Any:
    x = kda.Backward(*args)
    if not _decomposes(x.q):
        return NotImplemented
    with torch.autocast(x.q.device.type, enabled=False):
        grads = reference.token_backward(*x[:11], **_flags(x), walk=ops._kda_steps_backward)
    return kda.cast_gradients(x, grads)


def _fused_recurrent_kda(*args: Any) -> Any:
    x = recurrent_kda.Recurrent(*args)
    return _forward(x, x.v.dtype) if _decomposes(x.q) else NotImplemented


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
