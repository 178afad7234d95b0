"""Inductor lowerings of `_kda_steps` and `_kda_steps_backward` for the CPU: one C++ kernel each.

A C++ template writes one buffer: the results lie in it one after the other, and are views of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any

import torch
from torch._inductor import config, ir, lowering  # `lowering` first: importing cpp_template before it is circular
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.codegen.cpp_template_kernel import CppTemplateKernel
from torch._inductor.utils import parallel_num_threads, sympy_product
from torch._inductor.virtualized import V

import fla_inductor.custom_ops.kda_steps  # noqa: F401  (defines the operators)
from fla_inductor.lowerings.common import static

aten = torch.ops.aten
ops = torch.ops.fla_inductor

Box = ir.TensorBox

# constant of the kernel, and whose size it is
_HEADS = (("H", "q", 2), ("K", "q", 3), ("HV", "v", 2), ("V", "v", 3))


def _source(name: str) -> str:
    return (resources.files("fla_inductor.templates") / f"{name}.cpp.jinja").read_text(encoding="utf-8")


class StepsTemplate(CppTemplate):
    """Renders `templates/<name>.cpp.jinja` for contiguous inputs; B, T and N may be symbolic."""

    def __init__(self, name: str, nodes: dict[str, Any], layout: ir.Layout) -> None:
        super().__init__(name, list(nodes.values()), layout, parallel_num_threads())
        self.names = list(nodes)

    def render(  # type: ignore[override]
        self, kernel: CppTemplateKernel, template_buffer_node: Any = None, epilogue_nodes: Any = None, **kwargs: Any
    ) -> str:
        if epilogue_nodes:
            raise NotImplementedError("_kda_steps: epilogues are not fused")
        nodes = dict(zip(self.names, self.input_nodes, strict=True))
        out = template_buffer_node or self.output_node

        def fields() -> str:
            """Initializer of the struct `Problem`; names exist once `def_kernel` has run.

            One buffer may stand for several arguments: each address is asked for by node, not by name.
            """
            addresses = [f"&{kernel.index(node, [0] * len(node.get_size()))}" for node in nodes.values()]
            sizes = [kernel.size(nodes[name], dim) for name, dim in (("q", 0), ("q", 1), ("init", 0))]
            return ", ".join([*sizes, *addresses, "out_ptr"])

        values = {
            "template": self,
            "kernel": kernel,
            "nodes": nodes,
            "out": out,
            "heads": {n: static(nodes[t].get_size()[dim]) for n, t, dim in _HEADS},
            "headwise": static(nodes["beta"].get_size()[3]) != 1,
        }
        return self._template_from_string(_source(self.name)).render(
            **values,
            problem=self._template_from_string(_source("kda_steps_problem")).render(**values),
            fields=fields,
            inputs={f"{name}_ptr": node for name, node in nodes.items()},
            offsets=[node.get_layout().offset for node in nodes.values()],
            threads=config.cpp.threads if config.cpp.threads >= 1 else "omp_get_max_threads()",
            unroll=kernel.unroll_pragma(8),
        )


def _contiguous(x: Box) -> Any:
    """The buffer, or contiguous view of one, that holds `x`."""
    box = ir.ExternKernel.require_contiguous(x)
    node = ir.InputsKernel.unwrap_storage_for_input(ir.ExternKernel.realize_input(box))
    node.freeze_layout()
    return node


def _emit(name: str, inputs: dict[str, Box | None], shapes: Sequence[Sequence[Any]]) -> list[Box]:
    """One kernel; its results have these shapes."""
    nodes = {key: _contiguous(x) for key, x in inputs.items() if x is not None}
    sizes = [sympy_product(shape) for shape in shapes]
    q = nodes["q"]
    layout = ir.FixedLayout(q.get_device_or_error(), q.get_dtype(), [sum(sizes)], [1])
    out = StepsTemplate(name, nodes, layout).generate().output_node()
    V.graph.no_fuse_buffer_names.add(out.get_name())
    results, start = [], 0
    for shape, size in zip(shapes, sizes, strict=True):
        part = lowering.lowerings[aten.slice](out, 0, start, start + size)
        results.append(lowering.lowerings[aten.view](part, list(shape)))
        start = start + size
    return results


def _lower(*args: Any) -> Any:
    names = ("q", "k", "v", "decay", "beta", "init", "cu_seqlens")
    x = dict(zip(names, args, strict=True))
    if x["q"].get_device_or_error().type != "cpu":
        return lowering.fallback_handler(ops._kda_steps.default, add_to_fallback_set=False)(*args)
    o, final_state = _emit("kda_steps", x, (x["v"].get_size(), x["init"].get_size()))
    # a copy: whoever keeps the state would keep the outputs of all tokens with it
    return o, lowering.lowerings[aten.clone](final_state)


def _lower_backward(*args: Any) -> Any:
    names = ("d_o", "dht", "q", "k", "v", "decay", "beta", "init", "cu_seqlens")
    x = dict(zip(names, args, strict=True))
    if x["q"].get_device_or_error().type != "cpu":
        return lowering.fallback_handler(ops._kda_steps_backward.default, add_to_fallback_set=False)(*args)
    by_channel, by_value, by_beta, state = (x[name].get_size() for name in ("decay", "v", "beta", "init"))
    dq, dk, dg, dv, dbeta, dinit = _emit(
        "kda_steps_backward", x, (by_channel, by_channel, by_channel, by_value, by_beta, state)
    )
    return dq, dk, dv, dg, dbeta, lowering.lowerings[aten.clone](dinit)


def register() -> None:
    """Make Inductor lower the operators; a second call does nothing."""
    for op, rule in ((ops._kda_steps.default, _lower), (ops._kda_steps_backward.default, _lower_backward)):
        if op not in lowering.lowerings:
            lowering.register_lowering(op, type_promotion_kind=None)(rule)
