"""Launch configurations of the KDA kernels: the default first, then what was measured for an architecture."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class KdaPrepareConfig:
    """BK channels of K are held in registers at a time."""

    BK: int = 32
    num_warps: int = 4
    num_stages: int = 1


@dataclass(frozen=True)
class KdaScanConfig:
    """BV columns of V in one program; SPLIT keeps the digits of v - k S (see the template)."""

    BV: int = 32
    SPLIT: bool = False
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class KdaGradIntraConfig:
    """BV columns of V at a time."""

    BV: int = 32
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class KdaGradInputConfig:
    """BK channels of K in one program, BV columns of V at a time."""

    BK: int = 32
    BV: int = 64
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class KdaRecurrentConfig:
    """BV rows of the transposed state in one program."""

    BV: int = 32
    num_warps: int = 4
    num_stages: int = 1


@dataclass(frozen=True)
class KdaConfig:
    """One configuration for each kernel; PRODUCT: sums and picks of rows of 16-bit tiles as products."""

    prepare: KdaPrepareConfig = KdaPrepareConfig()
    scan: KdaScanConfig = KdaScanConfig()
    scan_backward: KdaScanConfig = KdaScanConfig(num_stages=3)
    grad_intra: KdaGradIntraConfig = KdaGradIntraConfig()
    grad_input: KdaGradInputConfig = KdaGradInputConfig()
    recurrent: KdaRecurrentConfig = KdaRecurrentConfig()
    PRODUCT: bool = True


DEFAULT = KdaConfig()

# float32 tiles take twice the shared memory and three products each: smaller tiles, no pipelining
FLOAT32 = KdaConfig(
    prepare=KdaPrepareConfig(BK=32),
    scan=KdaScanConfig(BV=16, num_stages=1),
    scan_backward=KdaScanConfig(BV=16, num_stages=1),
    grad_intra=KdaGradIntraConfig(BV=16, num_stages=1),
    grad_input=KdaGradInputConfig(BV=32, num_stages=1),
)


# two blocks of channels in flight: three stages of them are more than the shared memory of any architecture
WIDE = replace(DEFAULT, scan_backward=KdaScanConfig(num_stages=1))


def kda_config(work_dtype: str, K: int, capability: tuple[int, int] | None) -> KdaConfig:
    """The configuration for a work dtype ("float32" or "bfloat16") on a device of this compute capability."""
    config = FLOAT32 if work_dtype == "float32" else WIDE if K > 128 else DEFAULT
    # unmeasured: Triton 3.6 cannot compile reductions of a product's result for Blackwell's tensor memory
    return replace(config, PRODUCT=False) if capability is not None and capability[0] >= 10 else config
