"""Inductor lowering of `fla_inductor::_chunk_scan` for the CPU: one C++ kernel, no call back into Python.

The kernel's text is `templates/chunk_scan.cpp.jinja`. Checked on torch 2.13.0; the names used are the same in 2.14.1.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import torch
from torch._inductor import config, ir, lowering  # `lowering` first: importing cpp_template before it is circular
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.codegen.cpp_template_kernel import CppTemplateKernel
from torch._inductor.utils import parallel_num_threads
from torch._inductor.virtualized import V

import fla_inductor.custom_ops.chunk_scan  # noqa: F401  (defines the operator)
from fla_inductor.lowerings.common import fallback

_NAMES = ("decay", "x", "y", "z", "init", "restart")


class ChunkScanTemplate(CppTemplate):
    """Renders the kernel for given input layouts; sizes and strides that are symbolic become kernel arguments."""

    def __init__(self, input_nodes: list[Any], layout: ir.Layout, reverse: bool) -> None:
        super().__init__("chunk_scan", input_nodes, layout, parallel_num_threads())
        self.reverse = reverse

    def render(  # type: ignore[override]
        self, kernel: CppTemplateKernel, template_buffer_node: Any = None, epilogue_nodes: Any = None, **kwargs: Any
    ) -> str:
        if epilogue_nodes:
            raise NotImplementedError("_chunk_scan: epilogues are not fused")
        nodes = dict(zip(_NAMES, self.input_nodes, strict=True))

        def operand(name: str) -> str:
            node = nodes[name]
            rank = len(node.get_size())
            strides = ", ".join(kernel.stride(node, dim) for dim in range(rank))
            return f"{{&{kernel.index(node, [0] * rank)}, {{{strides}}}}}"

        return self._template_from_string(_source()).render(
            template=self,
            kernel=kernel,
            nodes=nodes,
            inputs={f"{name}_ptr": node for name, node in nodes.items()},
            out=self.output_node if template_buffer_node is None else template_buffer_node,
            offsets=[node.get_layout().offset for node in nodes.values()],
            operand=operand,
            reverse=self.reverse,
            threads=config.cpp.threads if config.cpp.threads >= 1 else "omp_get_max_threads()",
            unroll=kernel.unroll_pragma(8),
        )


def _source() -> str:
    return (resources.files("fla_inductor.templates") / "chunk_scan.cpp.jinja").read_text(encoding="utf-8")


def _realize(x: ir.TensorBox) -> Any:
    """The buffer, or strided view of one, that holds `x`; a layout that is still open becomes the contiguous one."""
    node = ir.InputsKernel.unwrap_storage_for_input(ir.ExternKernel.realize_input(x))
    node.freeze_layout()
    return node


def _lower(
    decay: ir.TensorBox,
    x: ir.TensorBox,
    y: ir.TensorBox,
    z: ir.TensorBox,
    init: ir.TensorBox,
    restart: ir.TensorBox,
    reverse: bool,
) -> Any:
    arguments = (decay, x, y, z, init, restart)
    op = torch.ops.fla_inductor._chunk_scan.default
    if z.get_device_or_error().type != "cpu":
        return fallback(op, "its kernel is for the CPU")(*arguments, reverse)
    size = z.get_size()
    layout = ir.FixedLayout(z.get_device_or_error(), z.get_dtype(), size, ir.FlexibleLayout.contiguous_strides(size))
    template = ChunkScanTemplate([_realize(t) for t in arguments], layout, reverse)
    out = template.generate().output_node()
    V.graph.no_fuse_buffer_names.add(out.get_name())
    return out


def register() -> None:
    """Make Inductor lower the operator; a second call does nothing."""
    op = torch.ops.fla_inductor._chunk_scan.default
    if op not in lowering.lowerings:
        lowering.register_lowering(op, type_promotion_kind=None)(_lower)
