"""The rendered Triton kernels, run by Triton's interpreter on the CPU against the float64 reference."""

from __future__ import annotations

import interpreter
import kda_behaviour
import op_checks
import pytest
import torch

import fla_inductor
from fla_inductor.contract import REGISTRY
from fla_inductor.custom_ops import kda

interpreter.install()


@pytest.fixture(autouse=True)
def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with CPU tensors take the way that CUDA tensors take."""
    monkeypatch.setattr(kda, "on_gpu", lambda q: q.shape[0] * q.shape[1] > 0)


def _cases(op: str) -> list[tuple[str, torch.dtype]]:
    """Every sample once; dtypes take turns, since the interpreter is slow and each kernel text serves all of them."""
    ids = op_checks.sample_ids(REGISTRY[op])
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return [(name, dtypes[i % 3]) for i, name in enumerate(ids)]


CASES = [(op, name, dtype) for op in ("chunk_kda", "fused_recurrent_kda") for name, dtype in _cases(op)]


@pytest.mark.parametrize(
    ("op", "name", "dtype"), CASES, ids=[f"{op}-{name}-{str(dtype)[6:]}" for op, name, dtype in CASES]
)
def test_matches_reference(op: str, name: str, dtype: torch.dtype) -> None:
    contract = REGISTRY[op]
    op_checks.assert_matches_reference(
        contract, op_checks.get_sample(contract, torch.device("cpu"), dtype, name), dtype
    )


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_no_A_log_is_unit_scale_bit_for_bit(lower_bound: float | None) -> None:
    kda_behaviour.no_A_log_is_unit_scale_bit_for_bit("cpu", lower_bound)


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_future_tokens_change_nothing_before_them(lower_bound: float | None, strong: bool) -> None:
    kda_behaviour.future_tokens_change_nothing_before_them("cpu", lower_bound, strong)


def test_minus_infinity_is_a_full_reset() -> None:
    kda_behaviour.minus_infinity_is_a_full_reset("cpu")


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_garbage_after_the_last_sequence_stays_there(op: str) -> None:
    kda_behaviour.garbage_after_the_last_sequence_stays_there("cpu", op)


def test_offsets_that_are_wrong_stay_in_bounds() -> None:
    kda_behaviour.offsets_that_are_wrong_stay_in_bounds("cpu")


def test_saved_states_give_the_gradients_of_recomputed_ones() -> None:
    kda_behaviour.saved_states_give_the_gradients_of_recomputed_ones("cpu")


@pytest.mark.parametrize(("K", "V"), [(130, 8), (256, 16)])
def test_two_blocks_of_channels(K: int, V: int) -> None:
    x = kda_behaviour.inputs("cpu", T=70, K=K, V=V, HV=1, dtype=torch.float32)
    o, ht = fla_inductor.chunk_kda(**x, **kda_behaviour.FLAGS, output_final_state=True)
    contract = REGISTRY["chunk_kda"]
    expected, ht_expected = contract.reference(
        **{n: t.double() for n, t in x.items()}, **kda_behaviour.FLAGS, output_final_state=True
    )
    assert ht is not None
    assert op_checks.error_ratio(expected, o) < 1e-5
    assert op_checks.error_ratio(ht_expected, ht) < 1e-5


def test_few_channels() -> None:
    """Sums over fewer than 16 channels do not average rounding out, so tiles are float32 there."""
    contract = REGISTRY["chunk_kda"]
    sample = kda.make_sample(torch.device("cpu"), torch.bfloat16, "small", T=70, HV=4, K=8, V=8)
    op_checks.assert_matches_reference(contract, sample, torch.bfloat16)
