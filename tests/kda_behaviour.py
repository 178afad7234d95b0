"""What KDA's kernels promise beyond numbers, checked on any device; `test_kernels` and `test_gpu` call these."""

from __future__ import annotations

from typing import Any

import op_checks
import torch
from torch import Tensor

import fla_inductor
from fla_inductor.custom_ops import kda
from fla_inductor.templates import kda as templates


def inputs(
    device: str, T: int = 100, K: int = 16, V: int = 24, HV: int = 2, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    g = torch.Generator().manual_seed(3)

    def rn(*size: int) -> Tensor:
        return torch.randn(*size, generator=g).to(device)

    x = {"q": rn(1, T, 1, K), "k": rn(1, T, 1, K), "v": rn(1, T, HV, V), "g": rn(1, T, HV, K), "beta": rn(1, T, HV)}
    return {name: t.to(dtype) for name, t in x.items()} | {"A_log": rn(HV), "dt_bias": rn(HV * K)}


FLAGS: dict[str, Any] = {
    "use_gate_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


def run(x: dict[str, Any], do: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    x = {name: t.detach().requires_grad_() for name, t in x.items()}
    o, ht = fla_inductor.chunk_kda(**x, **FLAGS, output_final_state=True, **kwargs)
    assert ht is not None
    loss = (o.float() * (o if do is None else do).detach().float()).sum()
    if do is None:
        loss = loss + ht.square().sum()
    loss.backward()
    return o.detach(), {name: t.grad for name, t in x.items() if t.grad is not None}


def no_A_log_is_unit_scale_bit_for_bit(device: str, lower_bound: float | None) -> None:
    x = inputs(device)
    x["A_log"] = torch.zeros_like(x["A_log"])
    o, grads = run(x, lower_bound=lower_bound)
    del x["A_log"]
    o_none, grads_none = run(x, lower_bound=lower_bound)
    assert torch.equal(o, o_none)
    for name, grad in grads_none.items():
        assert torch.equal(grad, grads[name]), name


def future_tokens_change_nothing_before_them(device: str, lower_bound: float | None, strong: bool) -> None:
    """Outputs, and gradients of a loss on them, bit for bit; strong gates make later rows leave the anchored pass."""
    x, cut = inputs(device), 70
    if strong:
        x["g"][:, cut:] = 60.0
    do = torch.zeros_like(x["v"])
    do[:, :cut] = torch.randn(do[:, :cut].shape).to(do)
    o, grads = run(x, do, lower_bound=lower_bound)
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, cut:] = torch.randn(x[name][:, cut:].shape).to(x[name])
    o_other, grads_other = run(x, do, lower_bound=lower_bound)
    assert torch.equal(o[:, :cut], o_other[:, :cut])
    for name in ("q", "k", "v", "g", "beta"):
        assert torch.equal(grads[name][:, :cut], grads_other[name][:, :cut]), name


def minus_infinity_is_a_full_reset(device: str) -> None:
    x = inputs(device, T=70, dtype=torch.float32)
    plain: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    call = {name: x[name].detach().requires_grad_() for name in ("q", "k", "v", "beta")}
    g = (-torch.rand_like(x["g"].float())).to(x["g"].dtype)
    g[:, 40] = -torch.inf
    g.requires_grad_()
    o, ht = fla_inductor.chunk_kda(**call, g=g, output_final_state=True, **plain)
    after, ht_after = fla_inductor.chunk_kda(
        **{name: t[:, 40:] for name, t in call.items()}, g=g[:, 40:], output_final_state=True, **plain
    )
    assert op_checks.error_ratio(after, o[:, 40:]) < 1e-4
    assert ht is not None
    assert ht_after is not None
    assert op_checks.error_ratio(ht_after, ht) < 1e-4
    o.float().sum().backward()
    assert g.grad is not None
    assert torch.isfinite(g.grad).all()
    assert (g.grad[:, 40] == 0).all()


def garbage_after_the_last_sequence_stays_there(device: str, op: str) -> None:
    x = inputs(device, T=90)
    clean = {name: t.clone() for name, t in x.items()}
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, 75:] = torch.nan
    cu = torch.tensor([0, 0, 30, 75, 75], dtype=torch.int32, device=device)
    fn = getattr(fla_inductor, op)
    results = []
    for data in (x, clean):
        data = {name: t.detach().requires_grad_() for name, t in data.items()}
        o, ht = fn(**data, **FLAGS, cu_seqlens=cu, output_final_state=True)
        (o.float()[:, :75].square().sum() + ht.square().sum()).backward()
        results.append((o, ht, {name: t.grad for name, t in data.items()}))
    (o, ht, grads), (o_clean, ht_clean, grads_clean) = results
    assert (o[:, 75:] == 0).all()
    assert torch.equal(o, o_clean)
    assert torch.equal(ht, ht_clean)
    for name, grad in grads.items():
        assert grad is not None
        assert torch.equal(grad, grads_clean[name]), name
        if name not in ("A_log", "dt_bias"):
            assert (grad[:, 75:] == 0).all(), name


def offsets_that_are_wrong_stay_in_bounds(device: str) -> None:
    """A guard page is not to be had here; what is checked is that nothing beyond the given tokens is touched."""
    x = {name: t.detach() for name, t in inputs(device, T=40).items()}
    for cu in ([0, 5000], [0, 30, 10, 4000], [3, -7, 90]):
        call = kda.Forward(
            x["q"],
            x["k"],
            x["v"],
            x["g"],
            x["beta"],
            x["A_log"],
            x["dt_bias"],
            None,
            torch.tensor(cu, dtype=torch.int32, device=device),
            1.0,
            True,
            True,
            True,
            True,
            False,
            False,
            None,
            False,
            64,
            False,
        )
        o, ht, _ = templates.forward(*call)
        assert o.shape == x["v"].shape
        assert ht.shape[0] == len(cu) - 1


def saved_states_give_the_gradients_of_recomputed_ones(device: str) -> None:
    x = inputs(device)
    _, saved = run(x, disable_recompute=True)
    _, recomputed = run(x, disable_recompute=False)
    for name, grad in saved.items():
        # the rows q dq and k dk of the normalisation come from other products there
        bound = 2e-3 if name in ("q", "k") else 0
        assert op_checks.error_ratio(recomputed[name], grad) <= bound, name
