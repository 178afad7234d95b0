"""The Kimi Delta Attention layer, with the parameters of FLA's KimiDeltaAttention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fla_inductor import _compat
from fla_inductor._checks import fail
from fla_inductor.custom_ops.kda import chunk_kda
from fla_inductor.custom_ops.recurrent_kda import fused_recurrent_kda
from fla_inductor.layers.cache import KDACache, KDALayerState
from fla_inductor.layers.norm_gated import FusedRMSNormGated
from fla_inductor.layers.short_conv import ShortConvolution

# a raw gate or beta at which softplus and sigmoid are exactly zero, and which float16 can hold
CLOSED = -1e4


@_compat.called_by_dynamo
def _refuse(argument: str, expected: str, got: object, kind: type[Exception] = ValueError) -> None:
    """Called by Dynamo itself while it traces a bad call, so that the error is the same eager and compiled."""
    fail("KimiDeltaAttention", argument, expected, got, kind)


class KimiDeltaAttention(nn.Module):
    """Kimi Delta Attention: a delta rule whose state decays per key channel, in place of softmax attention.

    Per value head, with the decayed state D_t = Diag(exp(g_t)) S_{t-1}:
    S_t = D_t + beta_t k_t (v_t - D_t^T k_t)^T, o_t = S_t^T q_t / sqrt(K).
    q, k and v come from a projection, a short convolution and silu, q and k are normalised, beta is the sigmoid of a
    projection, and g = -exp(A_log) softplus(f(x) + dt_bias), or lower_bound sigmoid(exp(A_log) (f(x) + dt_bias)).

    Args:
        hidden_size: size of the input and output vectors.
        expand_v: V / K; `head_dim * expand_v` must be a whole number.
        head_dim: K, size of a query or key head.
        num_heads: H, number of query and key heads.
        num_v_heads: HV, number of value heads, a multiple of H; None means H.
        mode: "chunk" or "fused_recurrent": the operator for calls without gradients. With gradients it is always
            "chunk", and a single token without gradients always takes the recurrent step; the function is the same.
        use_short_conv: whether q, k and v pass through a short convolution.
        allow_neg_eigval: beta in (0, 2) instead of (0, 1).
        safe_gate: promises decays in [lower_bound, 0), see `chunk_kda`; needs `lower_bound`.
        lower_bound: lower end of the natural-log decay of one step; None for the unbounded gate.
        conv_size: W, width of the convolutions.
        conv_bias: whether the convolutions have a bias.
        layer_idx: place of this layer's state in a `KDACache`; needed for caching only.
        norm_eps: eps of the output norm.

    Raises:
        ValueError: sizes that do not fit, an unknown mode, or `safe_gate` without a `lower_bound` in [-5, 0).

    Source: fla.layers.KimiDeltaAttention; Kimi Linear, arXiv 2510.26692. A state_dict moves both ways.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.expand_v = expand_v
        self.head_dim = head_dim
        self.num_heads = num_heads
        self.num_v_heads = num_heads if num_v_heads is None else num_v_heads
        self.mode = mode
        self.use_short_conv = use_short_conv
        self.allow_neg_eigval = allow_neg_eigval
        self.safe_gate = safe_gate
        self.lower_bound = lower_bound
        self.conv_size = conv_size
        self.conv_bias = conv_bias
        self.layer_idx = layer_idx
        self._check_arguments()
        self.head_k_dim = head_dim
        self.head_v_dim = round(head_dim * expand_v)
        self.key_dim = num_heads * self.head_k_dim
        self.value_dim = self.num_v_heads * self.head_v_dim
        self.gate_dim = self.num_v_heads * self.head_k_dim

        self.q_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        if use_short_conv:
            self.q_conv1d = ShortConvolution(self.key_dim, conv_size, bias=conv_bias, activation="silu")
            self.k_conv1d = ShortConvolution(self.key_dim, conv_size, bias=conv_bias, activation="silu")
            self.v_conv1d = ShortConvolution(self.value_dim, conv_size, bias=conv_bias, activation="silu")
        self.f_proj = nn.Sequential(
            nn.Linear(hidden_size, self.head_v_dim, bias=False),
            nn.Linear(self.head_v_dim, self.gate_dim, bias=False),
        )
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(self.gate_dim, dtype=torch.float32))
        self.g_proj = nn.Sequential(
            nn.Linear(hidden_size, self.head_v_dim, bias=False),
            nn.Linear(self.head_v_dim, self.value_dim, bias=True),
        )
        self.o_norm = FusedRMSNormGated(self.head_v_dim, activation="sigmoid", eps=norm_eps)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)
        self._init_gate()

    def _check_arguments(self) -> None:
        op = "KimiDeltaAttention"
        if self.mode not in ("chunk", "fused_recurrent"):
            fail(op, "mode", '"chunk" or "fused_recurrent"', repr(self.mode))
        width = self.head_dim * self.expand_v
        if width < 1 or not math.isclose(width, round(width), rel_tol=1e-5):
            fail(op, "expand_v", f"a whole number for head_dim * expand_v with head_dim {self.head_dim}", self.expand_v)
        if self.num_v_heads % self.num_heads:
            fail(op, "num_v_heads", f"a multiple of num_heads = {self.num_heads}", self.num_v_heads)
        if self.safe_gate and (self.lower_bound is None or not -5 <= self.lower_bound < 0):
            fail(op, "lower_bound", "a number in [-5, 0) with safe_gate", self.lower_bound)

    @torch.no_grad()
    def _init_gate(self) -> None:
        """exp(A_log) uniform in [1, 16] (1 with `safe_gate`), softplus(dt_bias) log-uniform in [1e-3, 0.1]."""
        if self.safe_gate:
            self.A_log.zero_()
        else:
            self.A_log.uniform_(1, 16).log_()
        step = self.dt_bias.uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))
        for parameter in (self.A_log, self.dt_bias):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: KDACache | None = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, None, KDACache | None]:
        """Attend over `hidden_states`, continuing from `past_key_values`.

        Args:
            hidden_states: [B, T, hidden_size]; B is 1 with `cu_seqlens`.
            attention_mask: [B, T] or longer (its last T columns count), zero for padding; ignored with `cu_seqlens`.
                The padding stands to the left of each sequence, or, without `use_cache`, to the right. Real tokens get
                what they would get without padding, padded ones zeros.
            past_key_values: states after the tokens before these; None at the start.
            use_cache: whether to store the states after these tokens, in `past_key_values` or in a new cache.
            output_attentions: must be False: no attention matrix exists.
            cu_seqlens: int32 or int64 offsets [N + 1] of the N sequences packed into `hidden_states`.

        Returns:
            The output [B, T, hidden_size], None, and the cache (None if neither given nor asked for).

        Raises:
            ValueError, TypeError: an argument that does not fit; the text names it.
        """
        self._check_call(hidden_states, attention_mask, past_key_values, use_cache, output_attentions)
        keep = None
        if attention_mask is not None and cu_seqlens is None:
            keep = self._keep(attention_mask, hidden_states.shape[1], use_cache)
            hidden_states = hidden_states.masked_fill(~keep, 0)
        if use_cache and past_key_values is None:
            past_key_values = KDACache()
        state = None
        if past_key_values is not None and self.layer_idx is not None:
            state = past_key_values.get(self.layer_idx)

        q, k, v, conv = self._queries_keys_values(hidden_states, state, use_cache, cu_seqlens)
        g, beta = self.f_proj(hidden_states), self.b_proj(hidden_states)
        if keep is not None:
            g, beta = g.masked_fill(~keep, CLOSED), beta.masked_fill(~keep, CLOSED)
        initial_state = None if state is None else state.recurrent
        o, final_state = self._attend(q, k, v, g, beta, initial_state, use_cache, cu_seqlens)
        if past_key_values is not None and use_cache and self.layer_idx is not None:
            past_key_values.update(self.layer_idx, KDALayerState(final_state, conv))

        gate = self.g_proj(hidden_states).unflatten(-1, (self.num_v_heads, self.head_v_dim))
        o = self.o_proj(self.o_norm(o, gate).flatten(2))
        if keep is not None:
            o = o.masked_fill(~keep, 0)
        return o, None, past_key_values

    def _check_call(
        self, x: Tensor, mask: Tensor | None, cache: KDACache | None, use_cache: bool, output_attentions: bool
    ) -> None:
        if x.dim() != 3 or x.shape[2] != self.hidden_size:
            _refuse("hidden_states", f"shape [B, T, hidden_size = {self.hidden_size}]", [int(n) for n in x.shape])
        if output_attentions:
            _refuse("output_attentions", "False (linear attention forms no attention matrix)", output_attentions)
        if cache is not None and not isinstance(cache, KDACache):
            _refuse("past_key_values", "a fla_inductor.layers.KDACache or None", type(cache).__name__, TypeError)
        if (use_cache or cache is not None) and self.layer_idx is None:
            _refuse("layer_idx", "a number given to the constructor when states are cached", None)
        if mask is not None and (mask.dim() != 2 or mask.shape[0] != x.shape[0] or mask.shape[1] < x.shape[1]):
            _refuse(
                "attention_mask", f"shape [B, >= T] = [{x.shape[0]}, >= {x.shape[1]}]", [int(n) for n in mask.shape]
            )

    def _keep(self, mask: Tensor, tokens: int, use_cache: bool) -> Tensor:
        """[B, T, 1], True at real tokens; what the mask holds is checked on the CPU only, where that costs no wait."""
        keep = mask[:, mask.shape[1] - tokens :] != 0
        if keep.device.type == "cpu" and not torch.compiler.is_compiling() and not _compat.is_fake(keep):
            starts, ends = keep[:, 1:] & ~keep[:, :-1], keep[:, :-1] & ~keep[:, 1:]
            if bool((starts.any(1) & ends.any(1)).any()):
                _refuse("attention_mask", "padding on one side of a sequence", "padding on both or inside")
            if use_cache and bool(ends.any()):
                _refuse("attention_mask", "padding on the left with use_cache", "padding on the right")
        return keep.unsqueeze(-1)

    def _queries_keys_values(
        self, x: Tensor, state: KDALayerState | None, use_cache: bool, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor] | None]:
        """q and k [B, T, H, K], v [B, T, HV, V], and the states of the convolutions."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        conv = None
        if self.use_short_conv:
            past = (None, None, None) if state is None or state.conv is None else state.conv
            q, state_q = self.q_conv1d(q, cache=past[0], output_final_state=use_cache, cu_seqlens=cu_seqlens)
            k, state_k = self.k_conv1d(k, cache=past[1], output_final_state=use_cache, cu_seqlens=cu_seqlens)
            v, state_v = self.v_conv1d(v, cache=past[2], output_final_state=use_cache, cu_seqlens=cu_seqlens)
            conv = (state_q, state_k, state_v) if use_cache else None
        else:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        q, k = (y.unflatten(-1, (self.num_heads, self.head_k_dim)) for y in (q, k))
        return q, k, v.unflatten(-1, (self.num_v_heads, self.head_v_dim)), conv

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        output_final_state: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Any]:
        arguments: dict[str, Any] = {
            "g": g.unflatten(-1, (self.num_v_heads, self.head_k_dim)),
            "beta": beta,
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "initial_state": initial_state,
            "output_final_state": output_final_state,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.allow_neg_eigval,
            "lower_bound": self.lower_bound,
            "state_v_first": True,
            "cu_seqlens": cu_seqlens,
        }
        if not torch.is_grad_enabled() and (self.mode == "fused_recurrent" or q.shape[1] == 1):
            return fused_recurrent_kda(q, k, v, **arguments)
        return chunk_kda(q, k, v, safe_gate=self.safe_gate, **arguments)[:2]
