"""Linear-attention operators under FLA's names that torch.compile and AOTInductor see through.

Importing this package defines the operators (`torch.ops.fla_inductor.*`). Inductor and Triton are imported when a
function is compiled or a GPU kernel runs.
"""

from __future__ import annotations

from fla_inductor import _autoload, layers
from fla_inductor.custom_ops.causal_conv1d import causal_conv1d, causal_conv1d_update
from fla_inductor.custom_ops.kda import chunk_kda
from fla_inductor.custom_ops.kda_gate import fused_kda_gate
from fla_inductor.custom_ops.l2norm import l2norm
from fla_inductor.custom_ops.recurrent_kda import fused_recurrent_kda
from fla_inductor.custom_ops.rms_norm_gated import rms_norm_gated

__version__ = "0.1.0"

_autoload.install()

__all__ = [
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_kda",
    "fused_kda_gate",
    "fused_recurrent_kda",
    "l2norm",
    "layers",
    "rms_norm_gated",
]
