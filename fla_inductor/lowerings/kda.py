"""KDA on CUDA: `chunk_kda` as two templates, its backward as five, `fused_recurrent_kda` as one.

Raw inputs are read through `load_input`, so that cheap producers are computed in the kernels' loads; `o` is written
through `store_output`, so that its pointwise consumer is computed in the store. CPU graphs never get here: there the
operators decompose (see `kda_cpu`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings, register_lowering

from fla_inductor.custom_ops.kda import Backward, Forward
from fla_inductor.custom_ops.recurrent_kda import Recurrent
from fla_inductor.lowerings import common
from fla_inductor.templates.kda import KdaProblem, make_problem

aten = torch.ops.aten
ops = torch.ops.fla_inductor

Box = ir.TensorBox


class _Call:
    """One call being lowered: its problem, symbolic sizes, and the tensors its kernels read and write, by name."""

    def __init__(self, x: Any, chunk_size: int, has_ht: bool) -> None:
        self.x = x
        q, v = x.q, x.v
        self.B, self.T = q.get_size()[:2]
        self.varlen = x.cu_seqlens is not None
        self.N = x.cu_seqlens.get_size()[0] - 1 if self.varlen else self.B
        self.device = q.get_device()
        heads = [common.static(s) for s in (*q.get_size()[2:], *v.get_size()[2:])]
        dtypes = (q.get_dtype(), x.k.get_dtype(), v.get_dtype())
        self.problem: KdaProblem = make_problem(x, heads, dtypes, self.device, chunk_size, has_ht)
        chunks = common.ceil_div(self.T, chunk_size)
        self.slots = chunks + self.N if self.varlen else self.B * chunks
        self.walks = self.N + 1 if self.varlen else self.B
        self.tensors: dict[str, Box] = {
            name: common.realize(box)
            for name, box in (
                ("q", q),
                ("k", x.k),
                ("v", v),
                ("g", x.g),
                ("beta", x.beta),
                ("A_log", _flat(x.A_log)),
                ("dt_bias", _flat(x.dt_bias)),
                ("h0", x.initial_state),
                ("cu_seqlens", x.cu_seqlens),
            )
            if box is not None
        }

    def add(self, **tensors: Box | None) -> list[str]:
        """Takes up the tensors that are given, and returns their names."""
        given = {name: box for name, box in tensors.items() if box is not None}
        self.tensors |= given
        return list(given)

    def add_tiles(self, shapes: dict[str, tuple[tuple[int, ...], str]]) -> list[str]:
        """Makes scratch buffers with one tile for each slot and value head."""
        return self.add(
            **{
                name: self.scratch((self.slots, self.problem.HV, *shape), getattr(torch, dtype))
                for name, (shape, dtype) in shapes.items()
            }
        )

    def emit(
        self,
        name: str,
        constants: dict[str, Any],
        programs: Any,
        written: list[str],
        shape: Any,
        dtype: torch.dtype,
        config: Any,
    ) -> Box:
        return common.emit(name, constants, programs, self.tensors, written, shape, dtype, config)

    def scratch(self, shape: tuple[Any, ...], dtype: torch.dtype) -> Box:
        return common.scratch(shape, dtype, self.device)

    def state(self, dtype: torch.dtype) -> Box:
        p = self.problem
        return self.scratch((self.N, p.HV, *((p.V, p.K) if p.v_first else (p.K, p.V))), dtype)

    def states(self) -> Box:
        p = self.problem
        work = getattr(torch, p.work_dtype)
        if not self.varlen:
            return self.scratch((self.B, common.ceil_div(self.T, p.chunk_size), p.HV, p.V, p.K), work)
        box = lowerings[aten.full](  # packed: slots that hold no chunk are never written
            [1, self.slots, p.HV, p.V, p.K], 0, dtype=work, device=self.device, layout=torch.strided, pin_memory=False
        )
        box.realize()
        return box

    def absent(self, dtype: torch.dtype) -> Box:
        return self.scratch((0,), dtype)


def _flat(x: Box | None) -> Any:
    """A parameter as a contiguous vector; kernels read it by plain pointer."""
    if x is None:
        return None
    numel = functools.reduce(lambda a, b: a * b, x.get_size(), 1)
    return ir.ExternKernel.require_contiguous(lowerings[aten.reshape](x, [numel]))


def _prepare(call: _Call) -> None:
    p = call.problem
    written = call.add_tiles(p.tile_shapes())
    call.add(
        RK=call.emit(
            "kda_prepare",
            p.prepare(),
            call.slots * p.HV,
            written,
            (call.slots, p.HV, p.chunk_size),
            torch.float32,
            p.config.prepare,
        )
    )


def _scan(call: _Call, dtype: torch.dtype, ht: Box | None, states: Box | None, values: bool = False) -> Box:
    p = call.problem
    constants = p.scan(states is not None, values, ht is not None)
    tiles = call.add_tiles({"Z": p.backward_shapes()["Z"]}) if values else []
    return call.emit(
        "kda_scan",
        constants,
        call.walks * p.HV * constants["NV"],
        tiles + call.add(ht=ht, STATES=states),
        call.x.v.get_size(),
        dtype,
        p.config.scan,
    )


def _lower_forward(*args: Any) -> tuple[Box, Box, Box]:
    """Templates kda_prepare and kda_scan."""
    x: Any = Forward(*args)
    if x.q.get_device().type != "cuda":
        return common.fallback(ops.chunk_kda.default, f"no template for device {x.q.get_device()}")(*args)
    call = _Call(x, x.chunk_size, x.output_final_state)
    _prepare(call)
    ht = call.state(torch.float32) if x.output_final_state else None
    states = call.states() if x.save_states else None
    o = _scan(call, x.q.get_dtype(), ht, states)
    return (
        o,
        call.absent(torch.float32) if ht is None else ht,
        call.absent(getattr(torch, call.problem.work_dtype)) if states is None else states,
    )


def _lower_backward(*args: Any) -> tuple[Box, ...]:
    """Templates kda_prepare, kda_scan unless states were saved, kda_scan_backward, kda_grad_intra, kda_grad_input."""
    x: Any = Backward(*args)
    if x.q.get_device().type != "cuda":
        return common.fallback(ops.chunk_kda_backward.default, f"no template for device {x.q.get_device()}")(*args)
    call = _Call(x, x.chunk_size, False)
    _prepare(call)
    saved = x.states is not None and len(x.states.get_size()) == 5
    if saved:
        call.add(STATES=common.realize(x.states))
    else:
        call.add(o=common.realize(_scan(call, x.q.get_dtype(), None, call.states(), values=True)))
    do = (
        x.do
        if x.do is not None
        else lowerings[aten.full](
            x.v.get_size(), 0, dtype=x.v.get_dtype(), device=call.device, layout=torch.strided, pin_memory=False
        )
    )
    call.add(do=common.realize(do), dht=None if x.dht is None else common.realize(x.dht))

    dh0 = call.state(x.initial_state.get_dtype()) if x.initial_state is not None else None
    dv = _scan_backward(call, dh0)
    dbeta = _grad_intra(call, not saved)
    dq, dk, dg, dA, dbias = _grad_input(call)
    none = call.absent(x.q.get_dtype())
    return (
        dq,
        dk,
        dv,
        dg,
        dbeta,
        none if dA is None else dA,
        none if dbias is None else dbias,
        none if dh0 is None else dh0,
    )


def _scan_backward(call: _Call, dh0: Box | None) -> Box:
    p, x = call.problem, call.x
    written = call.add_tiles({name: p.backward_shapes()[name] for name in ("ES", "Y")}) + call.add(dh0=dh0)
    constants = p.scan_backward(x.dht is not None)
    return call.emit(
        "kda_scan_backward",
        constants,
        call.walks * p.HV * constants["NV"],
        written,
        x.v.get_size(),
        x.v.get_dtype(),
        p.config.scan_backward,
    )


def _grad_intra(call: _Call, values: bool) -> Box:
    p, x = call.problem, call.x
    names = ("DP", "DM", "DD", "SQ", "SK", *(() if values else ("Z",)))
    written = call.add_tiles({name: p.backward_shapes()[name] for name in names})
    return call.emit(
        "kda_grad_intra",
        p.grad_intra(values),
        call.slots * p.HV,
        written,
        x.beta.get_size(),
        x.beta.get_dtype(),
        p.config.grad_intra,
    )


def _grad_input(call: _Call) -> tuple[Box, Box, Box, Box | None, Box | None]:
    p, x = call.problem, call.x
    grouped = p.HV != p.H
    shape = (call.B, call.T, p.HV, p.K)
    NK = p.KP // p.grad_BK
    written = call.add(
        DQ=call.scratch(shape, torch.float32 if grouped else x.q.get_dtype()),
        DK=call.scratch(shape, torch.float32 if grouped else x.k.get_dtype()),
        DA=call.scratch((call.slots, p.HV, NK), torch.float32) if p.has_A else None,
        DBIAS=call.scratch((call.slots, p.HV, p.KP), torch.float32) if p.has_bias else None,
    )
    dg = call.emit(
        "kda_grad_input",
        p.grad_input(),
        call.slots * p.HV * NK,
        written,
        x.g.get_size(),
        x.g.get_dtype(),
        p.config.grad_input,
    )
    t = call.tensors
    dq, dk = (
        _sum_groups(t[name], call, box.get_dtype()) if grouped else t[name] for name, box in (("DQ", x.q), ("DK", x.k))
    )
    dA = _parameter(t.get("DA"), [0, 2], None, x.A_log)
    dbias = _parameter(t.get("DBIAS"), [0], p.K, x.dt_bias)
    return dq, dk, dg, dA, dbias


def _sum_groups(box: Box, call: _Call, dtype: torch.dtype) -> Box:
    """Gradients of value heads added up over the q/k head they share."""
    p = call.problem
    box = lowerings[aten.reshape](box, [call.B, call.T, p.H, p.HV // p.H, p.K])
    return lowerings[torch.ops.prims.convert_element_type.default](lowerings[aten.sum](box, [3]), dtype)


def _parameter(partial: Box | None, axes: list[int], keep: int | None, parameter: Box | None) -> Box | None:
    """The gradient of a parameter from its partial sums over chunks."""
    if partial is None or parameter is None:
        return None
    total = lowerings[aten.sum](partial, axes)
    if keep is not None:
        total = lowerings[aten.slice](total, 1, 0, keep)
    total = lowerings[aten.reshape](total, parameter.get_size())
    return lowerings[torch.ops.prims.convert_element_type.default](total, parameter.get_dtype())


def _lower_recurrent(*args: Any) -> tuple[Box, Box]:
    """Template kda_recurrent."""
    x: Any = Recurrent(*args)
    if x.q.get_device().type != "cuda":
        return common.fallback(ops.fused_recurrent_kda.default, f"no template for device {x.q.get_device()}")(*args)
    call = _Call(x, 64, x.output_final_state)
    p = call.problem
    constants = p.recurrent(len(x.beta.get_size()) == 4)
    ht = call.state(torch.float32) if x.output_final_state else None
    o = call.emit(
        "kda_recurrent",
        constants,
        call.walks * p.HV * constants["NV"],
        call.add(ht=ht),
        x.v.get_size(),
        x.v.get_dtype(),
        p.config.recurrent,
    )
    return o, call.absent(torch.float32) if ht is None else ht


def register() -> None:
    """Register the lowerings of the forward, backward and recurrent operators."""
    register_lowering(ops.chunk_kda.default, type_promotion_kind=None)(_lower_forward)
    register_lowering(ops.chunk_kda_backward.default, type_promotion_kind=None)(_lower_backward)
    register_lowering(ops.fused_recurrent_kda.default, type_promotion_kind=None)(_lower_recurrent)
