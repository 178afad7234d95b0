"""What the tests of single operators share: calls with gradients, and comparison with the float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fla_inductor.contract import OpContract, Sample

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BACKENDS = ("eager", "aot_eager", "inductor")


class Result(NamedTuple):
    outputs: dict[str, Tensor]
    grads: dict[str, Tensor]


def error_ratio(expected: Tensor, actual: Tensor) -> float:
    """RMS(expected - actual) / RMS(expected); the absolute error where nothing but zeros is expected."""
    assert expected.shape == actual.shape
    if expected.numel() == 0:
        return 0.0
    expected, actual = expected.detach().double(), actual.detach().double()
    error, size = (expected - actual).square().mean().sqrt(), expected.square().mean().sqrt()
    return float(error / size) if size > 0 else float(error)


def leaf(x: Any, requires_grad: bool = False, dtype: torch.dtype | None = None) -> Any:
    """A tensor of its own, with the strides of `x`; float tensors in `dtype`; anything else as it is."""
    if not isinstance(x, Tensor):
        return x
    x = x.detach()
    if dtype is not None and x.is_floating_point():
        x = x.to(dtype)
    return x.requires_grad_(requires_grad)


def sample_ids(contract: OpContract) -> list[str]:
    return [sample.id for sample in contract.samples(torch.device("cpu"), torch.float32)]


def get_sample(contract: OpContract, device: torch.device, dtype: torch.dtype, name: str) -> Sample:
    return next(sample for sample in contract.samples(device, dtype) if sample.id == name)


def call(
    fn: Callable[..., Any],
    contract: OpContract,
    sample: Sample,
    dtype: torch.dtype | None = None,
    like: Result | None = None,
    varying: int | None = None,
) -> Result:
    """Outputs, and gradients under random upstream gradients rounded to the dtypes of the outputs in `like`.

    Upstream gradients vary along their last `varying` dimensions, and are expanded (stride 0) over the others.
    """
    kwargs = {name: leaf(x, name in sample.grad, dtype) for name, x in sample.kwargs.items()}
    if "mutates" in contract.features:
        kwargs["cache"] = kwargs["cache"].clone(memory_format=torch.preserve_format)
    returned = fn(**kwargs)
    tensors = (returned,) if isinstance(returned, Tensor) else returned
    outputs = {name: x for name, x in zip(contract.outputs, tensors, strict=False) if x is not None}
    if not sample.grad:
        return Result(outputs, {})
    generator = torch.Generator().manual_seed(1)
    upstream = []
    for name, x in outputs.items():
        final = (outputs if like is None else like.outputs)[name].dtype
        shape = x.shape if varying is None else x.shape[x.dim() - min(varying, x.dim()) :]
        noise = torch.randn(shape, generator=generator, dtype=torch.float64).to(x.device, final)
        upstream.append((noise.to(x.dtype).expand(x.shape), x))
    pairs = [(d, x) for d, x in upstream if x.requires_grad]
    grads = torch.autograd.grad([x for _, x in pairs], [kwargs[n] for n in sample.grad], [d for d, _ in pairs])
    return Result(outputs, dict(zip(sample.grad, grads, strict=True)))


def assert_matches_reference(
    contract: OpContract, sample: Sample, dtype: torch.dtype, varying: int | None = None
) -> None:
    """Numbers, shapes, dtypes and contiguity of all outputs, and the gradient of every input that has one."""
    ours = call(contract.public, contract, sample, varying=varying)
    theirs = call(contract.reference, contract, sample, torch.float64, like=ours, varying=varying)
    assert ours.outputs.keys() == theirs.outputs.keys()
    bounds = contract.tolerances[dtype]
    for name, expected in [*theirs.outputs.items(), *theirs.grads.items()]:
        actual = ours.outputs[name] if name in ours.outputs else ours.grads[name]
        assert actual.isfinite().all(), name
        ratio, bound = error_ratio(expected, actual), bounds.get(name, bounds["default"])
        assert ratio <= bound, f"{name}: error ratio {ratio:.1e}, bound {bound:.1e}"
    for name, x in ours.outputs.items():
        assert x.is_contiguous() or name == "cache", name
    for name, x in ours.grads.items():
        assert x.dtype == sample.kwargs[name].dtype, name


def assert_compiles(contract: OpContract, sample: Sample, backend: str, tolerance: float) -> None:
    """The compiled function has no break and returns what the function returns, with the same strides."""
    torch._dynamo.reset()
    compiled = torch.compile(contract.public, fullgraph=True, backend=backend)
    assert_same(call(contract.public, contract, sample), call(compiled, contract, sample), tolerance)


def assert_same(expected: Result, actual: Result, tolerance: float) -> None:
    """The same outputs, laid out in the same way, and the same gradients."""
    assert expected.outputs.keys() == actual.outputs.keys()
    for name, x in expected.outputs.items():
        assert (x.dtype, x.stride()) == (actual.outputs[name].dtype, actual.outputs[name].stride()), name
        ratio = error_ratio(x, actual.outputs[name])
        assert ratio <= tolerance, f"{name}: {ratio:.1e}"
    for name, x in expected.grads.items():
        ratio = error_ratio(x, actual.grads[name])
        assert ratio <= tolerance, f"gradient of {name}: {ratio:.1e}"


def graphs(fn: Callable[..., Any], calls: Sequence[tuple[Any, ...]], **options: Any) -> Iterator[int]:
    """Compile `fn` without Inductor, make the calls, check the results: how many graphs there are after each call."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fn, fullgraph=True, backend=counter, **options)
    for arguments in calls:
        expected, actual = fn(*arguments), compiled(*arguments)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, check_stride=True)
        yield counter.frame_count


def assert_refuses(fn: Callable[..., Any], kind: type[Exception], text: str, *args: Any, **kwargs: Any) -> None:
    """The same exception, with this text in it, from the function and from the compiled function."""
    with pytest.raises(kind, match=text):
        fn(*args, **kwargs)
    torch._dynamo.reset()
    with pytest.raises(kind, match=text):
        torch.compile(fn, fullgraph=True, backend="eager")(*args, **kwargs)
