"""Adjoint of `gram_slice`, with channels as rows of every tile: [BK, BT] where the forward has [BT, BK].

With BK = 32 the products then run on the warp-level tensor-core instructions. The warpgroup ones are out of reach here:
Triton 3.4 to 3.7 miscompiles them on Hopper for tiles 32 wide and for operands that are transposed in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla_inductor.device.gram import ANCHOR_RANGE, level_mask, matmul


@triton.jit
def _pick(rows, o_i, b_G):
    """b_G[:, rows], rounded to bfloat16, as a product with a one-hot matrix (see `pick_rows`)."""
    hot = tl.where(o_i[:, None] == rows[None, :], 1.0, 0.0).to(tl.bfloat16)
    return tl.dot(b_G.to(tl.bfloat16), hot, out_dtype=tl.float32)


@triton.jit
def _adjoint(
    b_q, b_k, b_dP, b_dM, b_dPt, b_dMt, row, col, pairs, pairs_t, dq, dk, dG, DT: tl.constexpr, PREC: tl.constexpr
):
    """Adds the adjoint of the pairs of one pass, factored into `row` and `col`.

    A pair adds to the gradient of G at its row what it takes away at its column. Both sides are formed from the same
    rounded factors, so that the sums over later rows, which follow, cancel to float32 accuracy.
    """
    b_qr = (b_q * row).to(DT)
    b_kr = (b_k * row).to(DT)
    b_kc = (b_k * col).to(DT)
    x = matmul(b_kc, tl.where(pairs_t, b_dPt, 0.0).to(DT), PREC)
    dq += row * x
    dG += b_qr.to(tl.float32) * x
    x = matmul(b_kc, tl.where(pairs_t, b_dMt, 0.0).to(DT), PREC)
    dk += row * x
    dG += b_kr.to(tl.float32) * x
    x = matmul(b_qr, tl.where(pairs, b_dP, 0.0).to(DT), PREC)
    x += matmul(b_kr, tl.where(pairs, b_dM, 0.0).to(DT), PREC)
    dk += col * x
    dG -= b_kc.to(tl.float32) * x
    return dq, dk, dG


@triton.jit
def _level(b_q, b_k, b_G, b_dP, b_dM, b_dPt, b_dMt, o_i, h, ok, dq, dk, dG, DT: tl.constexpr, PREC: tl.constexpr):
    """The adjoint of level `h` for the rows that are not `ok`."""
    second, pairs = level_mask(o_i, h)
    d = b_G - _pick((o_i // (2 * h)) * (2 * h) + h, o_i, b_G)
    b_e = tl.exp2(tl.where(second[None, :], d, -d))
    block = o_i // (2 * h)
    pairs_t = (second[:, None] == 0) & second[None, :] & (block[:, None] == block[None, :])
    return _adjoint(
        b_q,
        b_k,
        b_dP,
        b_dM,
        b_dPt,
        b_dMt,
        b_e,
        b_e,
        pairs & (ok[:, None] == 0),
        pairs_t & (ok[None, :] == 0),
        dq,
        dk,
        dG,
        DT,
        PREC,
    )


@triton.jit
def gram_slice_backward(
    b_q,
    b_k,
    b_G,
    b_dP,
    b_dM,
    b_dPt,
    b_dMt,
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

    The diagonal does not depend on G, so the caller adds it exactly. `b_dPt` and `b_dMt` are the transposes of the
    gradients of P and M.
    """
    d = b_G - _pick((o_i >> 4) << 4, o_i, b_G)
    shift = 0.5 * ANCHOR_RANGE
    if BOUNDED:
        ok = o_i >= 0
        col = tl.exp2(-d - shift)
    else:
        ok = tl.max(-d, 0) <= ANCHOR_RANGE
        col = tl.where(ok[None, :], tl.exp2(tl.where(ok[None, :], -d, 0.0) - shift), 0.0)
    block = o_i >> 4
    same = block[:, None] == block[None, :]
    pairs = (o_i[:, None] > o_i[None, :]) & same & ok[:, None]
    pairs_t = (o_i[:, None] < o_i[None, :]) & same & ok[None, :]
    dq, dk, dG = _adjoint(
        b_q, b_k, b_dP, b_dM, b_dPt, b_dMt, tl.exp2(d + shift), col, pairs, pairs_t, dq, dk, dG, DT, PREC
    )
    for lv in range(4, NLEVEL):
        dq, dk, dG = _level(b_q, b_k, b_G, b_dP, b_dM, b_dPt, b_dMt, o_i, 1 << lv, o_i < 0, dq, dk, dG, DT, PREC)
    if not BOUNDED:  # noqa: SIM102 - a constexpr test must stand alone, or the kernel branches on it
        if tl.min(ok.to(tl.int32), 0) == 0:
            for lv in range(4):
                dq, dk, dG = _level(b_q, b_k, b_G, b_dP, b_dM, b_dPt, b_dMt, o_i, 1 << lv, ok, dq, dk, dG, DT, PREC)
    return dq, dk, dG
