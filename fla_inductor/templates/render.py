"""Renders a kernel template without Inductor, to an ordinary `@triton.jit` function.

The templates are written for `torch._inductor`'s `TritonTemplate`. Here the same hooks (`def_kernel`, `size`, `stride`,
`load_input`, `store_output`) expand to plain pointer arithmetic: sizes and strides that the template asks for become
run-time arguments, constants become `tl.constexpr` lines as in Inductor. The result is the eager kernel, the one the
interpreter runs, and the one that tests compile for each architecture.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jinja2
import torch
from torch import Tensor

OUTPUT = "out"
_HEADER = "import triton\nimport triton.language as tl\n\n\n"


@functools.cache
def template_source(name: str) -> str:
    """Text of `templates/<name>.py.jinja`, as packaged."""
    return (resources.files("fla_inductor.templates") / f"{name}.py.jinja").read_text(encoding="utf-8")


class _Hooks:
    """The template-side interface; records tensors and scalars in the order of use."""

    def __init__(self) -> None:
        self.tensors: list[str] = []
        self.scalars: dict[str, tuple[str, bool, int]] = {}

    def def_kernel(self, *names: str) -> str:
        self.tensors = [*names, OUTPUT]
        return "<DEF_KERNEL>"

    def size(self, name: str, dim: int) -> str:
        return self._scalar(name, False, dim)

    def stride(self, name: str, dim: int) -> str:
        return self._scalar(name, True, dim)

    def _scalar(self, name: str, is_stride: bool, dim: int) -> str:
        argument = f"{name}_{'stride' if is_stride else 'size'}{dim}"
        self.scalars[argument] = (name, is_stride, dim)
        return argument

    def _address(self, name: str, indices: tuple[str, ...]) -> str:
        terms = (f"{index} * {self.stride(name, dim)}" for dim, index in enumerate(indices))
        return f"{name} + ({' + '.join(terms)})"

    def load_input(
        self,
        name: str,
        value: str,
        indices: tuple[str, ...],
        mask: str,
        indent_width: int,
        index_shape: tuple[str, ...],
    ) -> str:
        return f"{value} = tl.load({self._address(name, indices)}, mask={mask}, other=0.0)"

    def store_output(
        self, indices: tuple[str, ...], value: str, mask: str, indent_width: int, val_shape: tuple[str, ...]
    ) -> str:
        return f"tl.store({self._address(OUTPUT, indices)}, {value}, mask={mask})"


@dataclass(frozen=True)
class Kernel:
    """A rendered kernel: the jitted function, and which tensors and scalars it takes, in order."""

    name: str
    fn: Any
    source: str
    tensors: tuple[str, ...]
    scalars: tuple[tuple[str, bool, int], ...]

    def arguments(self, tensors: Mapping[str, Tensor]) -> list[Tensor | int]:
        values: list[Tensor | int] = [tensors[name] for name in self.tensors]
        for name, is_stride, dim in self.scalars:
            values.append(tensors[name].stride(dim) if is_stride else tensors[name].shape[dim])
        return values


def _kernel_text(name: str, hooks: _Hooks, body: str, constants: Mapping[str, Any]) -> str:
    lines = [f"    {key}: tl.constexpr = {value}" for key, value in constants.items()]
    signature = ", ".join([*hooks.tensors, *hooks.scalars])
    # a size of one must stay an argument: Triton would make it a Python int, and every new T a new kernel
    sizes = [argument for argument, (_, is_stride, _) in hooks.scalars.items() if not is_stride]
    head = "\n".join([f"@triton.jit(do_not_specialize={sizes!r})", f"def {name}({signature}):", *lines])
    return _HEADER + body.replace("<DEF_KERNEL>", head).strip() + "\n"


def _expand(name: str, constants: Mapping[str, Any]) -> tuple[_Hooks, str]:
    hooks = _Hooks()
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    api = {hook: getattr(hooks, hook) for hook in ("def_kernel", "size", "stride", "load_input", "store_output")}
    return hooks, environment.from_string(template_source(name)).render(**api, **constants)


@functools.cache
def _tensor_names(name: str, constants: tuple[tuple[str, Any], ...]) -> tuple[str, ...]:
    return tuple(_expand(name, dict(constants))[0].tensors[:-1])


def tensor_names(name: str, constants: Mapping[str, Any]) -> tuple[str, ...]:
    """The tensors that template `name` takes for these constants, in the order of its `def_kernel`, without OUTPUT."""
    return _tensor_names(name, tuple(constants.items()))


@functools.cache
def _render(name: str, constants: tuple[tuple[str, Any], ...]) -> Kernel:
    values = dict(constants)
    hooks, body = _expand(name, values)
    source = _kernel_text(name, hooks, body, values)
    # Triton reads a kernel's text through linecache; a virtual file serves it without writing to disk
    filename = f"<fla_inductor {name} {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": f"fla_inductor.templates.{name}", "__file__": filename}
    exec(compile(source, filename, "exec"), namespace)
    return Kernel(name, namespace[name], source, tuple(hooks.tensors), tuple(hooks.scalars.values()))


def render(name: str, constants: Mapping[str, Any]) -> Kernel:
    """The kernel of template `name` for these constants; rendered once for each set of constants."""
    return _render(name, tuple(constants.items()))


def _extent(x: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0


def launch(
    name: str, constants: Mapping[str, Any], grid: int, tensors: Mapping[str, Tensor], num_warps: int, num_stages: int
) -> None:
    """Run template `name` on a one-dimensional grid; `tensors` maps the template's names, and OUTPUT, to tensors."""
    if grid == 0:
        return
    wide = any(_extent(x) >= 2**31 for x in tensors.values())
    kernel = render(name, {**constants, "INDEX_DTYPE": "tl.int64" if wide else "tl.int32"})
    device = tensors[OUTPUT].device
    arguments = kernel.arguments(tensors)
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel.fn[(grid,)](*arguments, num_warps=num_warps, num_stages=num_stages)
    else:
        kernel.fn[(grid,)](*arguments, num_warps=num_warps, num_stages=num_stages)
