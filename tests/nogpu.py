"""Inductor's code for a `cuda` graph on a machine without a GPU, and each kernel of it compiled to a cubin.

    capture = nogpu.capture(fn, lambda: (nogpu.cuda(4, 256, 64), nogpu.cuda(64)), mark_dynamic=[(0, 1)])
    assert capture.launches() == ["triton_per_fused_..."]
    nogpu.compile_kernel(capture.kernels[0], sm=90).asm["cubin"]

Nothing runs on a device: fake tensors go through Dynamo, AOTAutograd and Inductor, the wrapper's source is kept and the
kernels are parsed out of it. `torch.cuda` stays patched until the process ends, so conftest.py gives each test file
that imports this module a process of its own. Checked on torch 2.13; a prototype of it ran on 2.11 and 2.14 too.

Not covered: autotuning among several choices (it benchmarks), AOTInductor, CUDA graphs. With `backward=True` the graph
is traced on the CPU and moved to `cuda` before Inductor sees it, because C++ autograd wants a real device: Python code
that asks for a tensor's device sees "cpu" there.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import importlib.util
import os
import re
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

H200 = {
    "name": "NVIDIA H200 (fake)",
    "major": 9,
    "minor": 0,
    "total_memory": 143771 << 20,
    "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448,
    "shared_memory_per_multiprocessor": 233472,
    "L2_cache_size": 60 << 20,
    "gcnArchName": "",
    "is_integrated": 0,
    "is_multi_gpu_board": 0,
    "uuid": "0",
    "pci_bus_id": 0,
    "pci_device_id": 0,
    "pci_domain_id": 0,
    "clock_rate": 1980000,
    "memory_clock_rate": 3201000,
    "memory_bus_width": 6144,
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One Triton kernel of the generated code; `graph` numbers the captured graph that it belongs to."""

    name: str
    source: str
    graph: int


@dataclasses.dataclass
class Capture:
    """What Inductor generated: one wrapper module per graph (forward first, then backward)."""

    codes: list[str] = dataclasses.field(default_factory=list)
    kernels: list[Kernel] = dataclasses.field(default_factory=list)

    def launches(self, graph: int = 0) -> list[str]:
        """Names of what graph `graph` launches, in order: Triton kernels, and calls out of the generated code."""
        pattern = r"^\s+(?:(\w+)\.run\(|(?:\w+ = )?((?:extern_kernels|torch\.ops)\.[\w.]+)\()"
        return [kernel or extern for kernel, extern in re.findall(pattern, self.codes[graph], re.MULTILINE)]


class _CodeIsComplete(Exception):
    """Raised instead of running the generated code."""


def _in_shared_test_process() -> bool:
    return "PYTEST_VERSION" in os.environ and "FLA_INDUCTOR_ISOLATED" not in os.environ


def install() -> None:
    """Make torch.cuda, Triton and Inductor believe in one H200; only its description: an allocation still fails."""
    if _in_shared_test_process() or getattr(torch.cuda, "_nogpu_installed", False):
        return
    torch.cuda._nogpu_installed = True  # type: ignore[attr-defined]
    properties = types.SimpleNamespace(**H200)
    _patch_torch_cuda(properties)
    _patch_compiler(properties)
    _patch_triton()


def _patch_torch_cuda(properties: types.SimpleNamespace) -> None:
    stream = types.SimpleNamespace(
        cuda_stream=0,
        device=torch.device("cuda", 0),
        stream_id=0,
        device_index=0,
        device_type=1,
        synchronize=lambda: None,
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "is_initialized": True,
        "_lazy_init": None,
        "init": None,
        "get_device_properties": properties,
        "get_device_capability": (properties.major, properties.minor),
        "get_device_name": properties.name,
        "is_tf32_supported": True,
        "is_bf16_supported": True,
        "synchronize": None,
        "set_device": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "get_arch_list": ["sm_90"],
        "mem_get_info": (properties.total_memory, properties.total_memory),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "is_current_stream_capturing": False,
        "current_stream": stream,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, _always(answer))
    torch.cuda.graphs.is_current_stream_capturing = _always(False)
    torch.version.cuda = torch.version.cuda or "13.0"
    if not hasattr(torch._C, "_cuda_getCurrentRawStream"):
        torch._C._cuda_getCurrentRawStream = _always(0)

    from torch._dynamo import device_interface

    copied = "current_device set_device device_count current_stream synchronize memory_allocated"
    copied += " get_device_properties is_bf16_supported"
    functions = {name: getattr(torch.cuda, name) for name in copied.split()}
    functions |= dict.fromkeys(("exchange_device", "maybe_exchange_device", "get_raw_stream"), _always(0))
    for name, function in functions.items():
        setattr(device_interface.CudaInterface, name, staticmethod(function))
    device_interface.caching_worker_device_properties["cuda"] = [properties]
    device_interface.caching_worker_current_devices["cuda"] = 0


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


def _patch_compiler(properties: types.SimpleNamespace) -> None:
    from torch._inductor import utils
    from torch._inductor.fx_passes import misc_patterns
    from torch._subclasses import fake_tensor
    from torch.utils import _triton

    patches: list[tuple[Any, str, Any]] = [
        # PyTorch's own way to trace cuda tensors without a device, taken there when torch.cuda is not available
        (fake_tensor.FakeTensorMode, "avoid_device_init", property(_always(True))),
        (fake_tensor, "init_gpu_context", _always(None)),
        # these patterns draw random numbers on the device while they are traced
        (misc_patterns, "_misc_patterns_init", _always(None)),
        (utils, "get_max_num_sms", _always(properties.multi_processor_count)),
    ]
    for owner, name, value in patches:
        setattr(owner, name, value)
    for module in (_triton, utils):
        for function in vars(module).values():
            if callable(getattr(function, "cache_clear", None)):
                function.cache_clear()


def _patch_triton() -> None:
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        launcher_cls = None
        get_current_target = staticmethod(_always(GPUTarget("cuda", 90, 32)))
        get_current_device = get_current_stream = staticmethod(_always(0))
        set_current_device = staticmethod(_always(None))
        get_active_torch_device = staticmethod(_always(torch.device("cuda", 0)))
        get_device_interface = staticmethod(_always(torch.cuda))

    getattr(driver, "driver", driver).set_active(Driver())
    triton_helpers.set_driver_to_gpu = _always(None)


def cuda(*size: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> Tensor:
    """An input for `capture`: call it inside `make_args` only, where tensors are fake."""
    return torch.empty(*size, dtype=dtype, device="cuda", requires_grad=requires_grad)


def capture(
    fn: Callable[..., Any],
    make_args: Callable[[], Sequence[Any]],
    *,
    dynamic: bool | None = None,
    mark_dynamic: Sequence[tuple[int, int]] = (),
    backward: bool = False,
    config: Mapping[str, Any] | None = None,
) -> Capture:
    """Compile `fn(*make_args())` for cuda with fullgraph=True and return the generated code.

    `mark_dynamic` holds (argument, dimension) pairs, `config` patches torch._inductor.config, `backward` also compiles
    the backward graph of the inputs that require gradients.
    """
    if _in_shared_test_process():
        raise RuntimeError("import nogpu at the top of the test file: conftest.py then gives the file its own process")
    install()
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        args = list(make_args())
    if backward:
        args = [_on_cpu(a) if isinstance(a, Tensor) else a for a in args]
    for argument, dim in mark_dynamic:
        torch._dynamo.mark_dynamic(args[argument], dim)
    inductor = {"compile_threads": 1, "force_disable_caches": True, **(config or {})}
    functorch = {"force_non_lazy_backward_lowering": True} if backward else {}
    compiled = torch.compile(fn, backend=_compile_for_cuda if backward else "inductor", dynamic=dynamic, fullgraph=True)
    result = Capture()
    with (
        _keep_source(result),
        inductor_config.patch(inductor),
        functorch_config.patch(functorch),
        torch.set_grad_enabled(backward),
        contextlib.suppress(_CodeIsComplete),
    ):
        compiled(*args)
    return result


@contextlib.contextmanager
def _keep_source(result: Capture) -> Iterator[None]:
    """Generated modules are recorded instead of loaded; calling one stops the run."""
    from torch._inductor.graph import GraphLowering

    def compile_to_module(self: Any) -> Any:
        wrapper, _ = self.codegen_with_cpp_wrapper() if self.cpp_wrapper else self.codegen()
        code = getattr(wrapper, "value", wrapper)
        result.kernels.extend(_kernels(code, len(result.codes)))
        result.codes.append(code)
        with tempfile.NamedTemporaryFile("w", prefix="nogpu_", suffix=".py", delete=False) as file:
            file.write(code)
        self.cache_key, self.cache_path, self.cache_linemap = "nogpu", file.name, []
        return types.SimpleNamespace(
            call=_stop, __file__=file.name, key="nogpu", runner=None, recursively_apply_fns=_always(None)
        )

    original = GraphLowering._compile_to_module
    GraphLowering._compile_to_module = compile_to_module  # type: ignore[method-assign]
    try:
        yield
    finally:
        GraphLowering._compile_to_module = original  # type: ignore[method-assign]


def _stop(args: Any) -> Any:
    raise _CodeIsComplete


def _kernels(code: str, graph: int) -> Iterator[Kernel]:
    for node in ast.parse(code).body:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Attribute(value=ast.Name(id="async_compile"), attr="triton"), args=arguments),
            ):
                yield Kernel(name, ast.literal_eval(arguments[1]), graph)


def _on_cpu(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).requires_grad_(x.requires_grad)


def _compile_for_cuda(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(graph: torch.fx.GraphModule, graph_inputs: Sequence[Any], **options: Any) -> Any:
        return compile_fx_inner(graph, _move_to_cuda(graph, graph_inputs), **options)

    return compile_fx(module, inputs, inner_compile=inner)


def _move_to_cuda(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Rewrite the devices named in a CPU graph, and propagate fake cuda inputs through it."""
    from torch._guards import detect_fake_mode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp
    from torch.utils._pytree import tree_map

    mode = detect_fake_mode(inputs)
    assert mode is not None
    device = torch.device("cuda", 0)

    def moved_device(value: Any) -> Any:
        return device if isinstance(value, torch.device) and value.type == "cpu" else value

    def moved_tensor(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            return value
        with mode:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)

    for node in graph.graph.nodes:
        node.args = tree_map(moved_device, node.args)
        node.kwargs = tree_map(moved_device, node.kwargs)
    cuda_inputs = [moved_tensor(x) for x in inputs]
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*cuda_inputs)
    return cuda_inputs


def compile_kernel(kernel: Kernel, sm: int = 90, choice: int = 0) -> Any:
    """Compile with Inductor's own signature and options; see `.asm["cubin"]`, `.asm["ptx"]` and `.metadata.shared`."""
    install()
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    autotuner = _load(kernel)
    meta, options = _compile_arguments(autotuner, autotuner.configs[choice])
    source = ASTSource(autotuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def _load(kernel: Kernel) -> Any:
    """Execute the kernel's module without compiling anything, and return its CachingAutotuner."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    # Triton reads a kernel's source from its file
    path = Path(tempfile.mkdtemp(prefix="nogpu_")) / f"{kernel.name}.py"
    path.write_text(kernel.source)
    spec = importlib.util.spec_from_file_location(f"_nogpu_{kernel.name}_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    (autotuner,) = [value for value in vars(module).values() if isinstance(value, CachingAutotuner)]
    return autotuner


def _compile_arguments(autotuner: Any, config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    if hasattr(autotuner, "_create_compile_meta"):
        meta = autotuner._create_compile_meta(config)
        return meta, autotuner._create_compile_options(config, meta)
    # torch 2.11 has the same steps inside a longer function
    meta = copy.deepcopy(autotuner.triton_meta)
    meta["constants"].update({name: config.kwargs[name] for name in autotuner.fn.arg_names if name in config.kwargs})
    for i in autotuner.fn.constexprs:
        name = autotuner.fn.arg_names[i]
        if name in ("num_warps", "num_stages"):
            meta["constants"].setdefault(name, getattr(config, name))
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return meta, {**options, "debug": False, "sanitize_overflow": False}
