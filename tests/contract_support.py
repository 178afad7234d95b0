"""What the contract tests are made of: cases, samples of other layouts and lengths, recorded calls, batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import op_checks
import pytest
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fla_inductor.contract import REGISTRY, OpContract, Sample

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
LENGTHS = (7, 64, 65, 130, 1000, 1)


# Cases


class Case(NamedTuple):
    """One sample of one operator."""

    op: str
    sample: str
    dtype: torch.dtype
    device: str = "cpu"

    def load(self) -> tuple[OpContract, Sample]:
        """A single token is no dynamic dimension: compilers take 0 and 1 for constants."""
        contract = REGISTRY[self.op]
        sample = op_checks.get_sample(contract, torch.device(self.device), self.dtype, self.sample)
        dynamic = {name: dim for name, dim in sample.dynamic.items() if sample.kwargs[name].shape[dim] > 1}
        return contract, Sample(sample.id, sample.kwargs, sample.grad, dynamic)


def every_sample(*devices: str) -> Iterator[Case]:
    """Every sample of every operator in float32 and bfloat16, and the first of each operator in float16."""
    for device in devices:
        for op, contract in REGISTRY.items():
            for i, name in enumerate(op_checks.sample_ids(contract)):
                yield from (Case(op, name, dtype, device) for dtype in (FP32, BF16, FP16)[: 2 if i else 3])


def parametrize(cases: Iterable[Case]) -> pytest.MarkDecorator:
    """A test for each case; those on CUDA are marked `gpu`."""
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(
                case,
                id=f"{case.op}-{case.sample}-{str(case.dtype)[6:]}-{case.device}",
                marks=pytest.mark.gpu if case.device == "cuda" else (),
            )
            for case in cases
        ],
    )


class Pick(NamedTuple):
    """A sample that stands for others where compiling is what takes the time."""

    op: str
    sample: str
    dtype: torch.dtype
    uses: str
    """inductor: forward and backward compiled on the CPU; any_T: the same, with one graph for every length;
    aoti: packaged on the CPU; gpu: packaged, and captured as CUDA graphs; gpu_any_T: as any_T, on CUDA"""
    reason: str

    def on(self, device: str) -> Case:
        return Case(self.op, self.sample, self.dtype, device)


# Compiling KDA takes 20 s a sample forwards and 50 s with its backward on a CPU, other operators a few seconds.
PICKS = (
    Pick(
        "chunk_kda",
        "gva",
        FP32,
        "any_T gpu gpu_any_T",
        "grouped heads, gate, norm and sigmoid inside, states in and out",
    ),
    Pick("chunk_kda", "packed", BF16, "inductor aoti gpu", "offsets, empty sequences, a tail; 16-bit operands"),
    Pick("chunk_kda", "bounded", FP32, "aoti", "the other gate, states V-first"),
    Pick("chunk_kda", "permuted", FP32, "aoti", "inputs read through their strides; T dynamic"),
    Pick("chunk_kda", "chunk_32", BF16, "gpu", "the other chunk size, states kept for the backward"),
    Pick("fused_recurrent_kda", "step", FP32, "inductor aoti gpu", "decoding: T = 1, states V-first"),
    Pick("fused_recurrent_kda", "packed", BF16, "aoti gpu", "offsets, no bias"),
    Pick("fused_recurrent_kda", "headwise", FP32, "aoti gpu", "beta for each column goes another way"),
    Pick("rms_norm_gated", "swish", FP32, "any_T aoti gpu", "the common call"),
    Pick("rms_norm_gated", "prenorm_residual", BF16, "inductor aoti gpu", "two outputs, mixed dtypes"),
    Pick("rms_norm_gated", "permuted", FP32, "aoti", "inputs read through their strides"),
    Pick("rms_norm_gated", "silu", BF16, "aoti", "bias, three leading dimensions"),
    Pick("rms_norm_gated", "no_tokens", FP32, "inductor aoti", "empty"),
    Pick("causal_conv1d", "silu", BF16, "any_T aoti gpu", "the common call"),
    Pick("causal_conv1d", "varlen_state", FP32, "inductor aoti gpu", "offsets, empty sequences, states, residual"),
    Pick("causal_conv1d", "varlen_tail", FP32, "aoti", "int64 offsets, tokens after the last"),
    Pick("causal_conv1d", "state_T1", FP32, "aoti", "fewer tokens than the filter"),
    Pick("causal_conv1d", "permuted", FP32, "aoti", "inputs read through their strides"),
    Pick("causal_conv1d", "empty_B2_T0", FP32, "inductor aoti", "empty"),
    Pick("causal_conv1d_update", "batch", BF16, "inductor aoti gpu", "the common call"),
    Pick("causal_conv1d_update", "view_of_pool", FP32, "inductor aoti gpu", "a strided cache is written in place"),
    Pick("causal_conv1d_update", "long_cache", FP32, "aoti", "cache longer than the filter"),
    Pick("causal_conv1d_update", "no_sequences", FP32, "aoti", "empty"),
    Pick("fused_kda_gate", "softplus", FP32, "any_T aoti gpu", "the common call"),
    Pick("fused_kda_gate", "bounded_low_precision", BF16, "inductor aoti gpu", "the other gate, all in 16 bit"),
    Pick("fused_kda_gate", "softplus_expanded", FP32, "aoti", "inputs read through their strides"),
    Pick("fused_kda_gate", "bounded_no_tokens", FP32, "inductor aoti", "empty"),
    Pick("l2norm", "heads", BF16, "any_T aoti gpu", "the common call"),
    Pick("l2norm", "padded_rows", FP32, "inductor aoti gpu", "inputs read through their strides"),
    Pick("l2norm", "output_float32", BF16, "aoti", "another output dtype"),
    Pick("l2norm", "no_rows", FP32, "inductor aoti", "empty"),
)


def picked(use: str, device: str = "cpu", op: str | None = None) -> list[Case]:
    return [pick.on(device) for pick in PICKS if use in pick.uses.split() and op in (None, pick.op)]


def bound(case: Case) -> float:
    """Between eager and compiled: on the CPU both round the same float32 numbers, on CUDA products are reordered."""
    if case.device == "cuda":
        return max(REGISTRY[case.op].tolerances[case.dtype].values())
    return 1e-5 if case.dtype == FP32 else 5e-3


def is_composite(contract: OpContract) -> bool:
    """Whether the operator is gone before Inductor sees the graph."""
    return "composite" in contract.features


# Samples


def copies(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The same arguments with memory of their own, laid out in the same way."""

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        storage = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage().clone())
        return storage.as_strided(x.shape, x.stride(), x.storage_offset())

    return {name: copy(x) for name, x in kwargs.items()}


def permuted(sample: Sample) -> Sample:
    """The same values in memory without gaps, the last dimension outermost."""

    def permute(x: Any) -> Any:
        return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))

    return replaced(sample, {name: permute(x) for name, x in sample.kwargs.items() if isinstance(x, Tensor)})


def replaced(sample: Sample, kwargs: Mapping[str, Any]) -> Sample:
    return Sample(sample.id, {**sample.kwargs, **kwargs}, sample.grad, sample.dynamic)


def with_any_length(device: str) -> Iterator[Case]:
    """The cases in float32 whose samples have dynamic tokens."""
    return (case for case in every_sample(device) if case.dtype == FP32 and case.load()[1].dynamic)


def lengths(sample: Sample) -> list[int]:
    """The lengths that the sample's other arguments allow: offsets of packed sequences stay within T."""
    offsets = sample.kwargs.get("cu_seqlens")
    least = 0 if offsets is None else int(offsets[-1])
    return [T for T in LENGTHS if least <= T]


def at_length(sample: Sample, T: int) -> Sample:
    """The sample with its tokens cut off or repeated."""
    kwargs = {}
    for name, dim in sample.dynamic.items():
        x = sample.kwargs[name]
        kwargs[name] = x.index_select(dim, torch.arange(T, device=x.device) % x.shape[dim])
    return replaced(sample, kwargs)


def with_dynamic_tokens(fn: Callable[..., Any], sample: Sample) -> Callable[..., Any]:
    """`fn` with the token dimension of its arguments marked; a length of 1 may have a graph of its own."""

    def marked(**kwargs: Any) -> Any:
        for name, dim in sample.dynamic.items():
            if kwargs[name].shape[dim] > 1:
                torch._dynamo.mark_dynamic(kwargs[name], dim)
        return fn(**kwargs)

    return marked


# Recorded calls


class OpCall(NamedTuple):
    op: OpOverload
    args: tuple[Any, ...]


class _Forward(TorchFunctionMode):
    """Sees an operator before the dispatcher dissolves it."""

    def __init__(self, op: OpOverload) -> None:
        super().__init__()
        self.op = op
        self.calls: list[OpCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (self.op, self.op.overloadpacket):
            assert not kwargs, f"the public function passes by name: {list(kwargs)}"
            self.calls.append(OpCall(self.op, args))
        return func(*args, **(kwargs or {}))


class _Backward(TorchDispatchMode):
    """Sees what autograd calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OpCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fla_inductor":
            detached = (x.detach() if isinstance(x, Tensor) else x for x in args)
            self.calls.append(OpCall(func, tuple(detached)))
        return func(*args, **(kwargs or {}))


def operator_calls(contract: OpContract, sample: Sample) -> list[OpCall]:
    """The call of the operator that a sample is, and the calls of this package's operators in its backward."""
    kwargs = {name: op_checks.leaf(x, name in sample.grad) for name, x in copies(sample.kwargs).items()}
    with _Forward(contract.op) as forward:
        returned = contract.public(**kwargs)
    assert len(forward.calls) == 1
    outputs = [x for x in ((returned,) if isinstance(returned, Tensor) else returned) if x is not None]
    differentiable = [x for x in outputs if x.requires_grad]
    with _Backward() as backward:
        if sample.grad:
            upstream = [torch.randn_like(x) for x in differentiable]
            torch.autograd.grad(differentiable, [kwargs[name] for name in sample.grad], upstream)
    return forward.calls + backward.calls


# Batches: one graph, one C++ compile, for many samples


class Batch(nn.Module):
    """Many samples as one module: takes and returns a dict with one entry for each."""

    def __init__(self, cases: Iterable[Case]) -> None:
        super().__init__()
        self.cases = {f"{case.op}_{case.sample}_{str(case.dtype)[6:]}": case for case in cases}
        self.samples = {key: case.load()[1] for key, case in self.cases.items()}
        self.functions = {key: REGISTRY[case.op].public for key, case in self.cases.items()}
        self.options = {
            key: {name: x for name, x in sample.kwargs.items() if not isinstance(x, Tensor)}
            for key, sample in self.samples.items()
        }

    def forward(self, x: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
        return {key: fn(**x[key], **self.options[key]) for key, fn in self.functions.items()}

    def inputs(self, T: int | None = None) -> dict[str, dict[str, Tensor]]:
        """The tensors of all samples, those with dynamic tokens at length T."""
        samples = {key: sample if T is None else at_length(sample, T) for key, sample in self.samples.items()}
        return {
            key: {name: x for name, x in copies(sample.kwargs).items() if isinstance(x, Tensor)}
            for key, sample in samples.items()
        }

    def export(self, strict: bool) -> torch.export.ExportedProgram:
        """Each sample has a T of its own where its tokens are dynamic."""
        shapes = {}
        for key, tensors in self.inputs().items():
            T, dims = torch.export.Dim(f"T_{key}", min=2, max=1 << 16), self.samples[key].dynamic
            shapes[key] = {name: {dims[name]: T} if name in dims else None for name in tensors}
        with torch.no_grad():
            return torch.export.export(self, (self.inputs(),), dynamic_shapes=(shapes,), strict=strict)

    def assert_equal(self, expected: dict[str, Any], actual: dict[str, Any], bound: Callable[[Case], float]) -> None:
        """Shapes, strides, dtypes, devices, and numbers within an error ratio."""
        assert expected.keys() == actual.keys()
        for key, case in self.cases.items():
            results, others = _as_tuple(expected[key]), _as_tuple(actual[key])
            for name, x, y in zip(REGISTRY[case.op].outputs, results, others, strict=False):
                assert (x is None) == (y is None), (key, name)
                if x is not None and y is not None:
                    assert layout(x) == layout(y), (key, name)
                    assert op_checks.error_ratio(x, y) <= bound(case), (key, name)


def _as_tuple(returned: Any) -> tuple[Tensor | None, ...]:
    return (returned,) if isinstance(returned, Tensor) else tuple(returned)


def layout(x: Tensor) -> tuple[Any, ...]:
    return (tuple(x.shape), x.stride(), x.dtype, x.device.type)
