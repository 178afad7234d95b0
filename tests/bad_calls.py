"""Calls that every operator must refuse, each a sample with arguments replaced."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import op_checks
import torch
from torch import Tensor

from fla_inductor.contract import REGISTRY

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Bad:
    """One wrong argument. What replaces a value is a function of that value, or else the new value."""

    id: str
    argument: str
    """what is replaced, and what the message must name"""
    value: Any
    kind: type[Exception] = ValueError
    sample: str = ""
    """id of the sample; the operator's main sample if empty"""
    also: Mapping[str, Any] = field(default_factory=dict)
    """further arguments to replace"""
    any_argument: bool = False
    """the message may name another argument: two that do not fit each other"""

    def arguments(self, op: str) -> dict[str, Any]:
        sample = op_checks.get_sample(REGISTRY[op], CPU, torch.float32, self.sample or MAIN_SAMPLE[op])
        kwargs = dict(sample.kwargs)
        for name, value in {self.argument: self.value, **self.also}.items():
            kwargs[name] = value(kwargs[name]) if callable(value) else value
        return kwargs


# it has every tensor that the operator takes except offsets of packed sequences
MAIN_SAMPLE = {
    "chunk_kda": "gva",
    "fused_recurrent_kda": "permuted",
    "rms_norm_gated": "prenorm_residual",
    "causal_conv1d": "state_T9",
    "causal_conv1d_update": "batch",
    "fused_kda_gate": "softplus",
    "l2norm": "heads",
}


def calls() -> list[tuple[str, Bad]]:
    return [(op, bad) for op in REGISTRY for bad in (*_tensors(op), *BAD[op])]


def _tensors(op: str) -> Iterator[Bad]:
    """Each tensor of the main sample missing, in a dtype that does not fit, or on another device."""
    contract = REGISTRY[op]
    kwargs = op_checks.get_sample(contract, CPU, torch.float32, MAIN_SAMPLE[op]).kwargs
    tensors = [name for name, x in kwargs.items() if isinstance(x, Tensor)]
    for name in tensors:
        yield Bad(f"{name}_float64", name, Tensor.double, TypeError)
        yield Bad(f"{name}_int32", name, Tensor.int, TypeError)
        if len(tensors) > 1:
            yield Bad(f"{name}_on_another_device", name, _to_meta, any_argument=True)
        if "None" not in str(inspect.signature(contract.public).parameters[name].annotation):
            yield Bad(f"{name}_missing", name, None, TypeError)


def _to_meta(x: Tensor) -> Tensor:
    return x.to("meta")


def _resized(x: Tensor, width: int) -> Tensor:
    return x.new_zeros(*x.shape[:-1], width)


KDA = (
    Bad("q_3d", "q", lambda q: q[0]),
    Bad("k_fewer_heads", "k", lambda k: k[:, :, :1]),
    Bad("v_other_T", "v", lambda v: v[:, 1:]),
    Bad("v_other_B", "v", lambda v: v[:1]),
    Bad("g_other_K", "g", lambda g: g[..., 1:]),
    Bad("g_without_K", "g", lambda g: g[..., 0]),
    Bad("beta_fewer_heads", "beta", lambda beta: beta[..., 1:]),
    Bad("A_log_size", "A_log", lambda A_log: A_log[1:]),
    Bad("dt_bias_size", "dt_bias", lambda dt_bias: dt_bias[1:]),
    Bad("HV_no_multiple_of_H", "v", lambda v: v[:, :, :1]),
    *(
        Bad(f"K_{K}", "q", lambda q, K=K: _resized(q, K), also=dict.fromkeys("kg", lambda x, K=K: _resized(x, K)))
        for K in (0, 257)
    ),
    *(Bad(f"V_{V}", "v", lambda v, V=V: _resized(v, V)) for V in (0, 257)),
    Bad("states_too_few", "initial_state", lambda state: state[1:]),
    Bad("states_transposed", "initial_state", lambda state: state.mT),
    Bad("states_3d", "initial_state", lambda state: state[0]),
    Bad("states_not_one_for_each_sequence", "initial_state", lambda state: state[1:], sample="packed"),
    Bad("cu_seqlens_with_a_batch", "cu_seqlens", torch.tensor([0, 4])),
    Bad("cu_seqlens_float", "cu_seqlens", Tensor.float, TypeError, "packed"),
    Bad("cu_seqlens_2d", "cu_seqlens", lambda offsets: offsets[None], sample="packed"),
    Bad("cu_seqlens_on_another_device", "cu_seqlens", _to_meta, sample="packed"),
    Bad("doubled_without_sigmoid", "allow_neg_eigval", True, also={"use_beta_sigmoid_in_kernel": False}),
    Bad("A_log_without_gate", "A_log", lambda A_log: A_log, also={"use_gate_in_kernel": False, "dt_bias": None}),
    Bad("dt_bias_without_gate", "dt_bias", lambda bias: bias, also={"use_gate_in_kernel": False, "A_log": None}),
    *(Bad(f"lower_bound_{bound}", "lower_bound", bound) for bound in (0.0, 1.0, -float("inf"), float("nan"))),
)

BAD: dict[str, tuple[Bad, ...]] = {
    "chunk_kda": (
        *KDA,
        *(Bad(f"chunk_size_{size}", "chunk_size", size) for size in (0, 16, 128)),
        *(Bad(f"safe_gate_{b}", "lower_bound", b, also={"safe_gate": True}) for b in (-5.5, 0.0, None)),
        Bad("cu_seqlens_cpu_alone", "cu_seqlens_cpu", torch.tensor([0, 4])),
        Bad("cu_seqlens_cpu_size", "cu_seqlens_cpu", torch.tensor([0, 4]), sample="packed"),
    ),
    "fused_recurrent_kda": KDA,
    "rms_norm_gated": (
        Bad("x_0d", "x", lambda x: x[0, 0, 0]),
        Bad("g_shape", "g", lambda g: g[:, 1:]),
        Bad("residual_shape", "residual", lambda residual: residual[0]),
        Bad("weight_size", "weight", lambda weight: weight[1:]),
        Bad("bias_size", "bias", torch.ones(23)),
        Bad("bias_float64", "bias", torch.ones(24, dtype=torch.float64), TypeError),
        *(Bad(f"activation_{name}", "activation", name) for name in ("relu", "", None)),
    ),
    "causal_conv1d": (
        Bad("x_2d", "x", lambda x: x[0]),
        Bad("no_weight", "weight", None),
        Bad("weight_channels", "weight", lambda weight: weight[1:]),
        Bad("weight_1d", "weight", lambda weight: weight[:, 0]),
        Bad("weight_without_columns", "weight", lambda weight: weight[:, :0]),
        Bad("bias_size", "bias", lambda bias: bias[1:]),
        Bad("residual_shape", "residual", lambda residual: residual[:, 1:]),
        Bad("states_too_few", "initial_state", lambda state: state[1:]),
        Bad("states_width", "initial_state", lambda state: state[..., 1:]),
        Bad("states_not_one_for_each_sequence", "initial_state", lambda state: state[1:], sample="varlen_state"),
        Bad("activation_relu", "activation", "relu"),
        Bad("cu_seqlens_with_a_batch", "cu_seqlens", torch.tensor([0, 4, 9])),
        Bad("cu_seqlens_float", "cu_seqlens", Tensor.float, TypeError, "varlen"),
        Bad("cu_seqlens_2d", "cu_seqlens", lambda offsets: offsets[None], sample="varlen"),
        Bad("cu_seqlens_on_another_device", "cu_seqlens", _to_meta, sample="varlen"),
    ),
    "causal_conv1d_update": (
        Bad("x_1d", "x", lambda x: x[0, 0]),
        Bad("x_two_tokens", "x", lambda x: torch.cat([x, x], 1)),
        Bad("cache_sequences", "cache", lambda cache: cache[1:]),
        Bad("cache_channels", "cache", lambda cache: cache[:, 1:]),
        Bad("cache_short", "cache", lambda cache: cache[..., 1:]),
        Bad("no_weight", "weight", None),
        Bad("weight_channels", "weight", lambda weight: weight[1:]),
        Bad("bias_size", "bias", lambda bias: bias[1:]),
        Bad("residual_shape", "residual", lambda residual: residual[1:]),
        Bad("activation_sigmoid", "activation", "sigmoid"),
    ),
    "fused_kda_gate": (
        Bad("g_1d", "g", lambda g: g[0, 0, 0]),
        Bad("A_log_size", "A_log", lambda A_log: A_log[1:]),
        Bad("dt_bias_size", "dt_bias", lambda dt_bias: dt_bias[1:]),
        Bad("output_float64", "output_dtype", torch.float64, TypeError),
    ),
    "l2norm": (
        Bad("x_0d", "x", lambda x: x[0, 0, 0, 0]),
        Bad("output_int8", "output_dtype", torch.int8, TypeError),
    ),
}
