"""What every template lowering needs: template objects, scratch buffers, outputs that take prologues and epilogues."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.lowering import empty_strided, fallback_handler
from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate, realize_inputs
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv

from fla_inductor.templates.render import template_source, tensor_names

log = logging.getLogger(__name__)


def static(size: Any) -> int:
    """A size that must be a number: specialises the graph on it when it is symbolic."""
    if isinstance(size, (int, sympy.Integer)):
        return int(size)
    sizevars = V.graph.sizevars
    guard = "guard_int" if hasattr(sizevars, "guard_int") else "evaluate_static_shape"  # torch 2.13, 2.11
    return int(getattr(sizevars, guard)(size))


def ceil_div(a: Any, b: int) -> Any:
    return FloorDiv(a + b - 1, b)


@SymbolicGridFn
def _grid(programs: Any, meta: Any, *, cdiv: Any) -> tuple[Any, int, int]:
    """Every kernel of this package runs on a one-dimensional grid, whose size the lowering computes."""
    return (programs, 1, 1)


@functools.cache
def template(name: str) -> TritonTemplate:
    """The `TritonTemplate` of `templates/<name>.py.jinja`."""
    return TritonTemplate(name=f"fla_{name}", grid=_grid, source=template_source(name))


class _Output(ir.TritonTemplateBuffer):
    """A template that also writes scratch buffers; those are private to the lowering.

    Torch 2.13 refuses to fuse a producer into a template that mutates any buffer, since the producer might read it. No
    producer can read a buffer that the lowering has just made.
    """

    def has_aliasing_or_mutation_for_prologue_fusion(self, scheduler_node: Any) -> bool:
        return False


def realize(x: ir.TensorBox) -> ir.TensorBox:
    """A buffer for `x` to be read through `load_input`, marked so that its producer is always fused into the load.

    Inductor's own heuristics would refuse producers that compute in float32 for a 16-bit template, among others.
    """
    realized = realize_inputs(x)
    buffer = V.graph.get_buffer(realized.get_name()) if hasattr(realized, "get_name") else None
    if isinstance(buffer, ir.ComputedBuffer):
        V.graph.invoke_quant_ops.add(buffer.get_operation_name())
    return realized


def scratch(shape: Sequence[Any], dtype: torch.dtype, device: torch.device) -> ir.TensorBox:
    """A new buffer that a template writes as a further output."""
    box = empty_strided(list(shape), None, dtype=dtype, device=device)
    box.realize()
    return box


def emit(
    name: str,
    constants: Mapping[str, Any],
    programs: Any,
    tensors: Mapping[str, ir.TensorBox],
    written: Iterable[str],
    shape: Sequence[Any],
    dtype: torch.dtype,
    config: Any,
) -> ir.TensorBox:
    """Adds one kernel to the graph and returns the template's own output, which takes epilogues.

    `tensors` maps names of the template to buffers, and may hold more than this kernel takes; those in `written` are
    further outputs.
    """
    nodes = {key: realize_inputs(tensors[key]) for key in tensor_names(name, constants)}
    layout = ir.FixedLayout(next(iter(nodes.values())).get_device(), dtype, [sympy.sympify(s) for s in shape])
    choices: list[Any] = []
    error = template(name).maybe_append_choice(
        choices,
        input_nodes=tuple(nodes.values()),
        layout=layout,
        call_sizes=[sympy.sympify(programs)],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        mutated_inputs=[nodes[key] for key in written],
        **constants,
    )
    if error is not None:
        raise error
    choice = choices[0]
    return ir.TensorBox.create(
        _Output(
            layout=choice.layout,
            inputs=choice.input_nodes,
            make_kernel_render=choice.make_kernel_render,
            mutated_inputs=choice.mutated_inputs,
            allowed_prologue_inps=choice.allowed_prologue_inps,
        )
    )


def fallback(op: torch._ops.OpOverload, reason: str) -> Callable[..., Any]:
    """Inductor's call of the eager operator, logged; refused in AOTInductor, whose packages have no Python to call."""
    if V.graph.cpp_wrapper and V.graph.aot_mode:
        raise RuntimeError(f"{op} cannot be packaged by AOTInductor: {reason}")
    log.warning("%s is called as an external kernel: %s", op, reason)
    return fallback_handler(op, add_to_fallback_set=False)
