"""KDA's kernels: the constants of each template, its grid and scratch tensors, and the eager launches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fla_inductor.custom_ops.kda import Backward, Forward, work_dtype
from fla_inductor.custom_ops.recurrent_kda import Recurrent
from fla_inductor.templates.render import OUTPUT, launch
from fla_inductor.tuning.kda import KdaConfig, kda_config


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class KdaProblem:
    """What is static about a call: sizes, flags and dtypes. Everything a template's text depends on."""

    H: int
    HV: int
    K: int
    V: int
    chunk_size: int
    scale: float
    work_dtype: str
    varlen: bool
    use_gate: bool
    lower_bound: float | None
    has_A: bool
    has_bias: bool
    norm: bool
    sigmoid: bool
    allow_neg_eigval: bool
    v_first: bool
    has_h0: bool
    has_ht: bool
    config: KdaConfig

    @property
    def BKB(self) -> int:
        """Channels of K in one block of the state: at most two blocks of 128, or three of 64 for K up to 192.

        Never 32: Hopper's products with a tile that narrow come out wrong (Triton 3.6, see docs/performance.md).
        """
        return 128 if 64 < self.K <= 128 or self.K > 192 else 64

    @property
    def KP(self) -> int:
        return math.ceil(self.K / self.BKB) * self.BKB

    @property
    def VP(self) -> int:
        return max(16, next_power_of_2(self.V)) if self.V <= 64 else math.ceil(self.V / 64) * 64

    @property
    def bounded(self) -> bool:
        """Gates of at most five nats a step: 16 of them stay within the anchored range."""
        return self.use_gate and self.lower_bound is not None and self.lower_bound >= -5.0

    def slots(self, batch: Any, tokens: Any, sequences: Any) -> Any:
        """Chunks in a batch: exact when dense, the static bound when packed (see device/segment.py)."""
        chunks = (tokens + self.chunk_size - 1) // self.chunk_size
        return chunks + sequences if self.varlen else batch * chunks

    def walks(self, batch: Any, sequences: Any) -> Any:
        """Sequences a scan walks; when packed, the tail of tokens without a sequence counts as one."""
        return sequences + 1 if self.varlen else batch

    def constants(self) -> dict[str, Any]:
        """Constants common to all chunk kernels."""
        wide = self.work_dtype == "float32"
        return {
            "H": self.H,
            "HV": self.HV,
            "K": self.K,
            "V": self.V,
            "KP": self.KP,
            "BT": self.chunk_size,
            "DT": f"tl.{self.work_dtype}",
            "PREC": "'tf32x3'" if wide else "'tf32'",
            "VARLEN": self.varlen,
        }

    def _gate(self) -> dict[str, Any]:
        return {
            "GATE": 0 if not self.use_gate else (1 if self.lower_bound is None else 2),
            "LOWER_BOUND": float(self.lower_bound or 0.0),
            "HAS_A": self.has_A,
            "HAS_BIAS": self.has_bias,
            "NORM": self.norm,
        }

    def _gram(self) -> dict[str, Any]:
        return {
            "NLEVEL": self.chunk_size.bit_length() - 1,
            "BOUNDED": self.bounded,
            "PRODUCT": self.config.PRODUCT and self.work_dtype != "float32",
        }

    def _beta(self) -> dict[str, Any]:
        return {"SIGMOID": self.sigmoid, "BETA_SCALE": 2.0 if self.allow_neg_eigval else 1.0}

    def prepare(self) -> dict[str, Any]:
        # the entries of the inverse are bounded for normalised keys only, and only then does float16 hold them
        small = self.work_dtype != "float32" and self.norm
        return {
            **self.constants(),
            **self._gate(),
            **self._gram(),
            **self._beta(),
            "BK": min(self.config.prepare.BK, self.BKB),
            "INV_DTYPE": "tl.float16" if small else "tl.float32",
            "INV_PREC": "'tf32x3'" if self.work_dtype == "float32" else "'tf32'",
        }

    def _blocks(self) -> dict[str, Any]:
        return {"BKB": self.BKB, "NKB": self.KP // self.BKB, "V_FIRST": self.v_first}

    def _tile_v(self, BV: int) -> int:
        return min(BV, self.VP)

    def scan(self, store_states: bool, store_values: bool, has_ht: bool) -> dict[str, Any]:
        BV = self._tile_v(self.config.scan.BV)
        return {
            **self.constants(),
            **self._blocks(),
            "SCALE": self.scale,
            "BV": BV,
            "NV": self.VP // BV,
            "SPLIT": self.config.scan.SPLIT and self.work_dtype != "float32",
            "HAS_H0": self.has_h0,
            "HAS_HT": has_ht,
            "STORE_STATES": store_states,
            "STORE_VALUES": store_values,
        }

    def scan_backward(self, has_dht: bool) -> dict[str, Any]:
        BV = self._tile_v(self.config.scan_backward.BV)
        return {
            **self.constants(),
            **self._blocks(),
            "SCALE": self.scale,
            "BV": BV,
            "NV": self.VP // BV,
            "VP": self.VP,
            "HAS_H0": self.has_h0,
            "HAS_HT": has_dht,
        }

    def grad_intra(self, values: bool) -> dict[str, Any]:
        """`values`: kda_scan ran again and left Z."""
        return {
            **self.constants(),
            **self._beta(),
            "SCALE": self.scale,
            "VP": self.VP,
            "BV": self._tile_v(self.config.grad_intra.BV),
            "BKB": self.BKB,
            "VALUES": values,
        }

    def grad_input(self) -> dict[str, Any]:
        return {
            **self.constants(),
            **self._gate(),
            **self._gram(),
            "SCALE": self.scale,
            "VP": self.VP,
            "BV": self._tile_v(self.config.grad_input.BV),
            "BK": self.grad_BK,
        }

    @property
    def grad_BK(self) -> int:
        return min(self.config.grad_input.BK, self.BKB)

    def recurrent(self, headwise: bool) -> dict[str, Any]:
        VP = next_power_of_2(self.V)
        BV = min(self.config.recurrent.BV, VP)
        return {
            "H": self.H,
            "HV": self.HV,
            "K": self.K,
            "V": self.V,
            "KP": next_power_of_2(self.K),
            "BV": BV,
            "NV": VP // BV,
            "VARLEN": self.varlen,
            **self._gate(),
            **self._beta(),
            "SCALE": self.scale,
            "HEADWISE": headwise,
            "V_FIRST": self.v_first,
            "HAS_H0": self.has_h0,
            "HAS_HT": self.has_ht,
        }

    def tile_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Scratch of kda_prepare per (slot, value head): shape and dtype; RK is the template's own output."""
        C, KP, work = self.chunk_size, self.KP, self.work_dtype
        tiles: dict[str, tuple[tuple[int, ...], str]] = dict.fromkeys(("KH", "KG", "QG"), ((C, KP), work))
        tiles |= dict.fromkeys(("P", "INV"), ((C, C), work))
        return tiles | {"DEC": ((KP,), "float32"), "RQ": ((C,), "float32"), "BB": ((C,), "float32")}

    def backward_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Scratch of the backward kernels per (slot, value head), without the partial sums."""
        C, KP, VP, work = self.chunk_size, self.KP, self.VP, self.work_dtype
        shapes: dict[str, tuple[tuple[int, ...], str]] = {"ES": ((VP, KP), work)}
        shapes |= dict.fromkeys(("Y", "Z"), ((VP, C), work))
        shapes |= dict.fromkeys(("DP", "DM"), ((C, C), work))
        shapes |= {"DD": ((C,), "float32"), "SQ": ((C,), "float32"), "SK": ((C,), "float32")}
        return shapes


def make_problem(
    x: Any, heads: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device, chunk_size: int, has_ht: bool
) -> KdaProblem:
    """The problem of a call `x` (Forward, Backward or Recurrent) with `heads` H, K, HV, V and the dtypes of q, k, v."""
    H, K, HV, V = heads
    work = str(work_dtype(dtypes, K)).removeprefix("torch.")
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return KdaProblem(
        H=H,
        HV=HV,
        K=K,
        V=V,
        chunk_size=chunk_size,
        scale=float(x.scale),
        work_dtype=work,
        varlen=x.cu_seqlens is not None,
        use_gate=x.use_gate_in_kernel,
        lower_bound=x.lower_bound,
        has_A=x.A_log is not None,
        has_bias=x.dt_bias is not None,
        norm=x.use_qk_l2norm_in_kernel,
        sigmoid=x.use_beta_sigmoid_in_kernel,
        allow_neg_eigval=x.allow_neg_eigval,
        v_first=x.state_v_first,
        has_h0=x.initial_state is not None,
        has_ht=has_ht,
        config=kda_config(work, K, capability),
    )


def _scratch(
    shapes: Mapping[str, tuple[tuple[int, ...], str]], slots: int, HV: int, device: torch.device
) -> dict[str, Tensor]:
    return {
        name: torch.empty((slots, HV, *shape), dtype=getattr(torch, dtype), device=device)
        for name, (shape, dtype) in shapes.items()
    }


def _flat(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.reshape(-1).contiguous()


def _given(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: x for name, x in tensors.items() if x is not None}


def _launch(
    name: str, constants: dict[str, Any], programs: int, tensors: dict[str, Tensor], out: Tensor, config: Any
) -> None:
    launch(name, constants, programs, {**tensors, OUTPUT: out}, config.num_warps, config.num_stages)


def _prepare(p: KdaProblem, inputs: dict[str, Tensor], slots: int) -> dict[str, Tensor]:
    device = inputs["q"].device
    tiles = _scratch(p.tile_shapes(), slots, p.HV, device)
    tiles["RK"] = torch.empty((slots, p.HV, p.chunk_size), dtype=torch.float32, device=device)
    _launch("kda_prepare", p.prepare(), slots * p.HV, {**inputs, **tiles}, tiles["RK"], p.config.prepare)
    return tiles


def _scan(
    p: KdaProblem,
    inputs: dict[str, Tensor],
    tiles: dict[str, Tensor],
    walks: int,
    o: Tensor,
    ht: Tensor | None,
    store: Mapping[str, Tensor],
) -> None:
    """`store`: where to leave STATES, and with them, for the backward, Z."""
    constants = p.scan("STATES" in store, "Z" in store, ht is not None)
    tensors = {**inputs, **tiles, **store, **_given(ht=ht)}
    _launch("kda_scan", constants, walks * p.HV * constants["NV"], tensors, o, p.config.scan)


def _problem(x: Any, chunk_size: int, has_ht: bool) -> KdaProblem:
    heads = (*x.q.shape[2:], *x.v.shape[2:])
    return make_problem(x, heads, (x.q.dtype, x.k.dtype, x.v.dtype), x.q.device, chunk_size, has_ht)


def _inputs(x: Any) -> dict[str, Tensor]:
    """The tensors of a call under the names of the templates."""
    return _given(
        q=x.q,
        k=x.k,
        v=x.v,
        g=x.g,
        beta=x.beta,
        A_log=_flat(x.A_log),
        dt_bias=_flat(x.dt_bias),
        h0=x.initial_state,
        cu_seqlens=x.cu_seqlens,
    )


def _sequences(q: Tensor, cu_seqlens: Tensor | None) -> int:
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _state_shape(p: KdaProblem, sequences: int) -> tuple[int, ...]:
    return (sequences, p.HV, p.V, p.K) if p.v_first else (sequences, p.HV, p.K, p.V)


def _new_states(p: KdaProblem, q: Tensor, sequences: int) -> Tensor:
    slots = p.slots(1, q.shape[1], sequences)
    shape = (1 if p.varlen else q.shape[0], slots, p.HV, p.V, p.K)
    make = torch.zeros if p.varlen else torch.empty  # packed: slots that hold no chunk are never written
    return make(shape, dtype=getattr(torch, p.work_dtype), device=q.device)


def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`fla_inductor::chunk_kda` in two kernels."""
    x = Forward(*args)
    p = _problem(x, x.chunk_size, x.output_final_state)
    q, N = x.q, _sequences(x.q, x.cu_seqlens)
    inputs = _inputs(x)
    o = torch.empty(x.v.shape, dtype=q.dtype, device=q.device)
    ht = torch.empty(_state_shape(p, N), dtype=torch.float32, device=q.device) if x.output_final_state else None
    states = _new_states(p, q, N) if x.save_states else None
    tiles = _prepare(p, inputs, p.slots(q.shape[0], q.shape[1], N))
    _scan(p, inputs, tiles, p.walks(q.shape[0], N), o, ht, _given(STATES=states))
    return (
        o,
        q.new_empty(0, dtype=torch.float32) if ht is None else ht,
        q.new_empty(0, dtype=getattr(torch, p.work_dtype)) if states is None else states,
    )


def backward(*args: Any) -> tuple[Tensor, ...]:
    """`fla_inductor::chunk_kda_backward`: tiles again, states unless saved, reverse scan, two gradient kernels."""
    x = Backward(*args)
    p = _problem(x, x.chunk_size, has_ht=False)
    q, v, N = x.q, x.v, _sequences(x.q, x.cu_seqlens)
    slots, walks = p.slots(q.shape[0], q.shape[1], N), p.walks(q.shape[0], N)
    do = q.new_zeros(1).expand(v.shape) if x.do is None else x.do
    inputs = _inputs(x) | _given(do=do, dht=x.dht)
    tiles = _prepare(p, inputs, slots)
    saved = x.states is not None and x.states.numel() > 0
    states = x.states if x.states is not None and saved else _new_states(p, q, N)
    tensors = {**inputs, **tiles, **_scratch(p.backward_shapes(), slots, p.HV, q.device), "STATES": states}
    if not saved:
        tensors["o"] = torch.empty(v.shape, dtype=q.dtype, device=q.device)
        store = {name: tensors[name] for name in ("STATES", "Z")}
        _scan(p, inputs, tiles, walks, tensors["o"], None, store)
    dv, dbeta, dg = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (v, x.beta, x.g))
    h0 = x.initial_state
    dh0 = None if h0 is None else torch.empty(_state_shape(p, N), dtype=h0.dtype, device=q.device)

    reverse = p.scan_backward(x.dht is not None)
    c = p.config
    _launch(
        "kda_scan_backward", reverse, walks * p.HV * reverse["NV"], {**tensors, **_given(dh0=dh0)}, dv, c.scan_backward
    )
    _launch("kda_grad_intra", p.grad_intra(not saved), slots * p.HV, tensors, dbeta, c.grad_intra)
    dq, dk, dA, dbias = _grad_input(p, tensors, slots, dg)
    return (
        dq,
        dk,
        dv,
        dg,
        dbeta,
        q.new_empty(0) if x.A_log is None else dA.reshape(x.A_log.shape).to(x.A_log.dtype),
        q.new_empty(0) if x.dt_bias is None else dbias.reshape(x.dt_bias.shape).to(x.dt_bias.dtype),
        q.new_empty(0) if dh0 is None else dh0,
    )


def _grad_input(
    p: KdaProblem, tensors: dict[str, Tensor], slots: int, dg: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launches the last kernel and reduces its partial sums: over value heads for q, k, over chunks for parameters."""
    q, k = tensors["q"], tensors["k"]
    B, T = q.shape[:2]
    grouped = p.HV != p.H
    shape = (B, T, p.HV, p.K)
    dq = torch.empty(shape, dtype=torch.float32 if grouped else q.dtype, device=q.device)
    dk = torch.empty(shape, dtype=torch.float32 if grouped else k.dtype, device=q.device)
    NK = p.KP // p.grad_BK
    dA = torch.empty((slots, p.HV, NK), dtype=torch.float32, device=q.device)
    dbias = torch.empty((slots, p.HV, p.KP), dtype=torch.float32, device=q.device)
    written = {"DQ": dq, "DK": dk, "DA": dA, "DBIAS": dbias}
    _launch("kda_grad_input", p.grad_input(), slots * p.HV * NK, {**tensors, **written}, dg, p.config.grad_input)
    if grouped:
        dq = dq.view(B, T, p.H, -1, p.K).sum(3).to(q.dtype)
        dk = dk.view(B, T, p.H, -1, p.K).sum(3).to(k.dtype)
    return dq, dk, dA.sum((0, 2)), dbias.sum(0)[:, : p.K]


def recurrent(*args: Any) -> tuple[Tensor, Tensor]:
    """`fla_inductor::fused_recurrent_kda` in one kernel."""
    x = Recurrent(*args)
    p = _problem(x, 64, x.output_final_state)
    q, N = x.q, _sequences(x.q, x.cu_seqlens)
    o = torch.empty(x.v.shape, dtype=x.v.dtype, device=q.device)
    ht = torch.empty(_state_shape(p, N), dtype=torch.float32, device=q.device) if x.output_final_state else None
    constants = p.recurrent(x.beta.dim() == 4)
    programs = p.walks(q.shape[0], N) * p.HV * constants["NV"]
    _launch("kda_recurrent", constants, programs, _inputs(x) | _given(ht=ht), o, p.config.recurrent)
    return o, q.new_empty(0, dtype=torch.float32) if ht is None else ht
