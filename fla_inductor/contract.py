"""One `OpContract` per operator: the data that drives tests, `doctor`, `ops`, `bench` and the support table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Sample:
    """One call of a public function: keyword arguments, and which of them get gradients."""

    id: str
    kwargs: Mapping[str, Any]
    grad: tuple[str, ...] = ()
    dynamic: Mapping[str, int] = field(default_factory=dict)
    """argument name -> dimension to mark dynamic (T) in the dynamic-shape tests"""


@dataclass(frozen=True)
class OpContract:
    """What an operator promises. `reference` takes the public function's arguments and returns the same structure."""

    name: str
    public: Callable[..., Any]
    reference: Callable[..., Any]
    samples: Callable[[torch.device, torch.dtype], Iterator[Sample]]
    tolerances: Mapping[torch.dtype, Mapping[str, float]]
    """dtype -> output or gradient name ("o", "final_state", "q", "A_log", ... or "default") -> bound on the error ratio
    RMS(ref - x) / RMS(ref) against the float64 reference on the same inputs"""
    outputs: tuple[str, ...]
    features: frozenset[str] = frozenset()
    flops: Callable[..., int] | None = None
    fla_name: str = ""
    hf_names: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    lowering: str = ""
    """file that lowers the operator, or "decomposition" when Inductor sees aten operators only"""

    @property
    def op(self) -> torch._ops.OpOverload:
        return getattr(torch.ops.fla_inductor, self.name).default


REGISTRY: dict[str, OpContract] = {}


def register(contract: OpContract) -> OpContract:
    """Add a contract to the table; a name can be taken once."""
    if contract.name in REGISTRY:
        raise ValueError(f"register: argument `contract`: expected a new name, got {contract.name!r} a second time")
    REGISTRY[contract.name] = contract
    return contract
