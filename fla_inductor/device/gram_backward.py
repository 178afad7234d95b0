"""Adjoint of `gram_slice`: the gradients of q, k and G of one slice of K from those of P and M.

The left operand of every product is a loaded square, or its transpose, and the right one a tile in registers: nothing
is transposed in registers, which Triton 3.4 to 3.7 miscompiles on Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla_inductor.device.gram import level_factor, level_mask, matmul, pass_factors, pass_starts


@triton.jit
def _adjoint(b_q, b_k, b_dP, b_dM, b_dPt, b_dMt, row, col, dq, dk, dG, DT: tl.constexpr, PREC: tl.constexpr):
    """Adds the adjoint of one pass with factors `row` and `col`.

    A pair adds to the gradient of G at its row what it takes away at its column. Both sides are formed from the same
    rounded factors, so that the sums over later rows, which follow, cancel to float32 accuracy.
    """
    b_qr = (b_q * row).to(DT)
    b_kr = (b_k * row).to(DT)
    b_kc = (b_k * col).to(DT)
    x = matmul(b_dP, b_kc, PREC)
    dq += row * x
    dG += b_qr.to(tl.float32) * x
    x = matmul(b_dM, b_kc, PREC)
    dk += row * x
    dG += b_kr.to(tl.float32) * x
    x = matmul(b_dPt, b_qr, PREC)
    x = tl.dot(b_dMt, b_kr, x, input_precision=PREC)
    dk += col * x
    dG -= b_kc.to(tl.float32) * x
    return dq, dk, dG


@triton.jit
def gram_slice_backward(
    b_q,
    b_k,
    b_G,
    p_dP,
    p_dM,
    o_i,
    dq,
    dk,
    dG,
    NLEVEL: tl.constexpr,
    BOUNDED: tl.constexpr,
    DT: tl.constexpr,
    PREC: tl.constexpr,
):
    """Adds to the gradients of q, k and G of one slice what comes through `gram_slice`, without its diagonal.

    `p_dP` and `p_dM` point to the gradients of P and M, which are zero on and above the diagonal. The diagonal of P
    does not depend on G, so the caller adds it exactly.
    """
    n, starts, end = pass_starts(b_G, o_i)
    o_square = o_i[:, None] * (1 << NLEVEL) + o_i[None, :]
    if not BOUNDED:  # noqa: SIM102 - a constexpr test must stand alone, or the kernel branches on it
        if end < (1 << NLEVEL):
            left = o_i >= end
            o_transposed = o_i[None, :] * (1 << NLEVEL) + o_i[:, None]
            for lv in range(NLEVEL):
                b_e = level_factor(b_G, o_i, 1 << lv)
                pairs = level_mask(o_i[:, None], o_i[None, :], 1 << lv) & left[None, :]
                pairs_t = level_mask(o_i[None, :], o_i[:, None], 1 << lv) & left[:, None]
                b_dP = tl.load(p_dP + o_square, mask=pairs, other=0.0)
                b_dM = tl.load(p_dM + o_square, mask=pairs, other=0.0)
                b_dPt = tl.load(p_dP + o_transposed, mask=pairs_t, other=0.0)
                b_dMt = tl.load(p_dM + o_transposed, mask=pairs_t, other=0.0)
                dq, dk, dG = _adjoint(b_q, b_k, b_dP, b_dM, b_dPt, b_dMt, b_e, b_e, dq, dk, dG, DT, PREC)
    b_dP = tl.load(p_dP + o_square)
    b_dM = tl.load(p_dM + o_square)
    for i_p in range(n):
        row, col = pass_factors(i_p, n, starts, end, b_G, o_i)
        dq, dk, dG = _adjoint(b_q, b_k, b_dP, b_dM, tl.trans(b_dP), tl.trans(b_dM), row, col, dq, dk, dG, DT, PREC)
    return dq, dk, dG
