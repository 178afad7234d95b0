"""Decayed Gram matrices inside one chunk and the triangular inverse, with exponents that never overflow.

R_ij = sum_d x_id y_jd 2^(G_id - G_jd) for j <= i, where G is non-increasing along rows. The exponent is split into a
row factor and a column factor around a reference that lies between them:

- level h (1, 2, 4, ...): i in the second half, j in the first half of a block of 2h rows; reference = first row of the
  second half; both factors are at most one, whatever the gate.
- anchored block of 16 rows: all its pairs at once around its first row, shifted so that both factors stay within
  2^+-59.

A row takes the anchored value only if its own decay since the first row allows that, which rows after it cannot change.
"""

from __future__ import annotations

import triton
import triton.language as tl

# two factors of up to 2^59 keep a product, and the sums over it, inside float32 and bfloat16
ANCHOR_RANGE = tl.constexpr(118.0)


@triton.jit
def matmul(a, b, PREC: tl.constexpr):
    """a @ b with float32 accumulation; PREC is the input precision of float32 operands."""
    return tl.dot(a, b, input_precision=PREC, out_dtype=tl.float32)


@triton.jit
def level_mask(o_i, h):
    """Rows in second halves, and the pairs (i, j) that level `h` covers."""
    second = ((o_i // h) % 2) == 1
    block = o_i // (2 * h)
    return second, second[:, None] & (second[None, :] == 0) & (block[:, None] == block[None, :])


@triton.jit
def pick_rows(rows, o_i, b_G):
    """b_G[rows] as a product with a one-hot matrix.

    bfloat16 is enough: a reference need not be exact, since its error enters row and column factors with opposite signs
    and cancels in their product.
    """
    hot = tl.where(rows[:, None] == o_i[None, :], 1.0, 0.0).to(tl.bfloat16)
    return tl.dot(hot, b_G.to(tl.bfloat16), out_dtype=tl.float32)


@triton.jit
def level_factor(b_G, o_i, h):
    """2^-|G - reference| of level `h`, the pairs it covers."""
    second, pairs = level_mask(o_i, h)
    d = b_G - pick_rows((o_i // (2 * h)) * (2 * h) + h, o_i, b_G)
    return tl.exp2(tl.where(second[:, None], d, -d)), pairs


@triton.jit
def anchor_factors(b_G, b_g, o_i, ADAPTIVE: tl.constexpr, SUM_ANCHOR: tl.constexpr):
    """Row and column factors of the anchored pass over blocks of 16 rows, and the rows it serves; b_g are G's steps."""
    if SUM_ANCHOR:
        n: tl.constexpr = b_G.shape[0] // 16
        # the running sum within a block, without the block's first row: G minus the anchor
        steps = tl.where(((o_i & 15) == 0)[:, None], 0.0, b_g)
        d = tl.reshape(tl.cumsum(tl.reshape(steps, (n, 16, b_G.shape[1])), 1), b_G.shape)
    else:
        d = b_G - pick_rows((o_i >> 4) << 4, o_i, b_G)
    shift = 0.5 * ANCHOR_RANGE
    if ADAPTIVE:
        ok = tl.max(-d, 1) <= ANCHOR_RANGE
        col = tl.where(ok[:, None], tl.exp2(tl.where(ok[:, None], -d, 0.0) - shift), 0.0)
    else:
        ok = o_i >= 0
        col = tl.exp2(-d - shift)
    return tl.exp2(d + shift), col, ok


@triton.jit
def merge_inverse(b_D, b_L, INV_DTYPE: tl.constexpr, PREC: tl.constexpr):
    """D - D L D: joins the inverses of two diagonal blocks when L is the block below them."""
    x = matmul(b_L.to(INV_DTYPE), b_D.to(INV_DTYPE), PREC)
    return b_D - matmul(b_D.to(INV_DTYPE), x.to(INV_DTYPE), PREC)


@triton.jit
def unit_lower_inverse(b_L, o_i, NLEVEL: tl.constexpr, INV_DTYPE: tl.constexpr, PREC: tl.constexpr):
    """(I + L)^-1 for strictly lower L, by doubling the inverted diagonal blocks."""
    b_D = tl.where(o_i[:, None] == o_i[None, :], 1.0, 0.0)
    _, pairs = level_mask(o_i, 1)
    b_D -= tl.where(pairs, b_L, 0.0)
    for lv in range(1, NLEVEL):
        _, pairs = level_mask(o_i, 1 << lv)
        b_D = merge_inverse(b_D, tl.where(pairs, b_L, 0.0), INV_DTYPE, PREC)
    return b_D


@triton.jit
def _gram_pass(b_q, b_k, row, col, pairs, b_P, b_M, DT: tl.constexpr, PREC: tl.constexpr):
    b_c = tl.trans((b_k * col).to(DT))
    b_P += tl.where(pairs, matmul((b_q * row).to(DT), b_c, PREC), 0.0)
    b_M += tl.where(pairs, matmul((b_k * row).to(DT), b_c, PREC), 0.0)
    return b_P, b_M


@triton.jit
def gram_slice(
    b_q,
    b_k,
    b_G,
    b_g,
    b_P,
    b_M,
    o_i,
    NLEVEL: tl.constexpr,
    BOUNDED: tl.constexpr,
    SUM_ANCHOR: tl.constexpr,
    DT: tl.constexpr,
    PREC: tl.constexpr,
):
    """Adds one slice of K to P (pairs j <= i of q and k) and to M (pairs j < i of k and k; its diagonal is undefined).

    Blocks of 16 rows are anchored, in the rows whose decay allows it; levels of 16 rows and more join the blocks. With
    BOUNDED gates, of at most five nats a step, every row allows it. Other rows take the levels below 16, and their
    diagonal, one by one.
    """
    row, col, ok = anchor_factors(b_G, b_g, o_i, BOUNDED == 0, SUM_ANCHOR)
    block = o_i >> 4
    pairs = (o_i[:, None] >= o_i[None, :]) & (block[:, None] == block[None, :]) & ok[:, None]
    b_P, b_M = _gram_pass(b_q, b_k, row, col, pairs, b_P, b_M, DT, PREC)
    for lv in range(4, NLEVEL):
        b_e, pairs = level_factor(b_G, o_i, 1 << lv)
        b_P, b_M = _gram_pass(b_q, b_k, b_e, b_e, pairs, b_P, b_M, DT, PREC)
    if not BOUNDED:  # noqa: SIM102 - a constexpr test must stand alone, or the kernel branches on it
        if tl.min(ok.to(tl.int32), 0) == 0:
            diagonal = (o_i[:, None] == o_i[None, :]) & (ok[:, None] == 0)
            b_P += tl.where(diagonal, tl.sum(b_q * b_k, 1)[:, None], 0.0)
            for lv in range(4):
                b_e, pairs = level_factor(b_G, o_i, 1 << lv)
                b_P, b_M = _gram_pass(b_q, b_k, b_e, b_e, pairs & (ok[:, None] == 0), b_P, b_M, DT, PREC)
    return b_P, b_M
