"""Decayed Gram matrices inside one chunk and the triangular inverse, with exponents that never overflow.

R_ij = sum_d x_id y_jd 2^(G_id - G_jd) for j <= i, where G is non-increasing along rows. The exponent is split into a
row factor and a column factor around a reference row, shifted so that both stay below 2^59. A pass takes the pairs of
some rows with some columns, and gives all other rows and columns the factor zero, so that passes simply add up:

- pass 0: reference = first row of the chunk; all rows; the columns that have lost at most ANCHOR_RANGE since then.
- passes of blocks of 16 rows: reference = first row of the block; the rows of the block; the columns that pass 0 left,
  as far as they lie before the block or have lost at most ANCHOR_RANGE since its first row.
- levels h (1, 2, 4, 8) inside blocks of 16, for the columns that are left then: i in the second half, j in the first
  half of a block of 2h rows; reference = first row of the second half; both factors are at most one, whatever the gate.

A row factor may underflow where the decay of the pair is below 2^-67 anyway. Which pass takes a pair depends on no row
after the pair's column, so later tokens change nothing before them. Passes without columns are not run.
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
def sum_rows(x, o_i, PRODUCT: tl.constexpr):
    """Running sum of `x` along its rows.

    As a PRODUCT with a triangle of ones the result lies where products need it; three bfloat16 parts hold all digits.
    """
    if PRODUCT:
        ones = tl.where(o_i[:, None] >= o_i[None, :], 1.0, 0.0).to(tl.bfloat16)
        high = x.to(tl.bfloat16)
        x -= high.to(tl.float32)
        middle = x.to(tl.bfloat16)
        low = (x - middle.to(tl.float32)).to(tl.bfloat16)
        y = tl.dot(ones, low, out_dtype=tl.float32)
        y = tl.dot(ones, middle, y)
        return tl.dot(ones, high, y)
    return tl.cumsum(x, 0)


@triton.jit
def total_rows(x, o_i, PRODUCT: tl.constexpr):
    """Sum over the rows of `x`, a tile made from a product; as the last row of the running sum where not PRODUCT."""
    if PRODUCT:
        return tl.sum(x, 0)
    return tl.sum(tl.where((o_i == x.shape[0] - 1)[:, None], tl.cumsum(x, 0), 0.0), 0)


@triton.jit
def level_mask(o_i, o_j, h):
    """The pairs (i, j) that level `h` covers."""
    x = o_i ^ o_j
    return (o_i > o_j) & (x >= h) & (x < 2 * h)


@triton.jit
def _pick_rows(rows, o_i, b_G):
    """b_G[rows] as a product with a one-hot matrix.

    bfloat16 is enough: a reference need not be exact, since its error enters row and column factors with opposite signs
    and cancels in their product.
    """
    hot = tl.where(rows[:, None] == o_i[None, :], 1.0, 0.0).to(tl.bfloat16)
    return tl.dot(hot, b_G.to(tl.bfloat16), out_dtype=tl.float32)


@triton.jit
def level_factor(b_G, o_i, h):
    """2^-|G - reference| of level `h`: row factor in second halves, column factor in first halves."""
    d = b_G - _pick_rows((o_i // (2 * h)) * (2 * h) + h, o_i, b_G)
    return tl.exp2(tl.where(((o_i // h) % 2 == 1)[:, None], d, -d))


@triton.jit
def _since(b_G, o_i, first):
    """G minus its row `first`."""
    return b_G - tl.sum(tl.where((o_i == first)[:, None], b_G, 0.0), 0)[None, :]


@triton.jit
def first_columns(b_G, o_i):
    """How many columns pass 0 takes: a prefix, since G is non-increasing."""
    ok = tl.max(-_since(b_G, o_i, 0), 1) <= ANCHOR_RANGE
    return tl.sum(ok.to(tl.int32), 0)


@triton.jit
def block_columns(b_G, o_i, BOUNDED: tl.constexpr, PRODUCT: tl.constexpr):
    """Columns that the pass of their own block can take; every one with BOUNDED gates, of at most five nats a step."""
    if BOUNDED:
        return o_i >= 0
    if PRODUCT:
        return tl.max(_pick_rows((o_i >> 4) << 4, o_i, b_G) - b_G, 1) <= ANCHOR_RANGE
    ok = o_i < 0
    for block in range(b_G.shape[0] // 16):
        ok |= ((o_i >> 4) == block) & (tl.max(-_since(b_G, o_i, 16 * block), 1) <= ANCHOR_RANGE)
    return ok


@triton.jit
def pass_factors(i_p, b_G, o_i, n_first, in_block):
    """Row and column factors of a pass; pass i_p > 0 is that of block i_p - 1."""
    block = tl.maximum(i_p - 1, 0)
    d = _since(b_G, o_i, 16 * block)
    inside = (o_i >> 4) == block
    rows = inside | (i_p == 0)
    first = o_i < n_first
    columns = tl.where(i_p == 0, first, (first == 0) & ((o_i < 16 * block) | (inside & in_block)))
    row = tl.where(rows[:, None], tl.exp2(d + 0.5 * ANCHOR_RANGE), 0.0)
    col = tl.where(columns[:, None], tl.exp2(-d - 0.5 * ANCHOR_RANGE), 0.0)
    return row, col


@triton.jit
def merge_inverse(b_D, b_L, INV_DTYPE: tl.constexpr, PREC: tl.constexpr):
    """D - D L D: joins the inverses of two diagonal blocks when L is the block below them."""
    x = matmul(b_L.to(INV_DTYPE), b_D.to(INV_DTYPE), PREC)
    return b_D - matmul(b_D.to(INV_DTYPE), x.to(INV_DTYPE), PREC)


@triton.jit
def unit_lower_inverse(b_L, o_i, NLEVEL: tl.constexpr, INV_DTYPE: tl.constexpr, PREC: tl.constexpr):
    """(I + L)^-1 for strictly lower L, by doubling the inverted diagonal blocks."""
    b_D = tl.where(o_i[:, None] == o_i[None, :], 1.0, 0.0)
    b_D -= tl.where(level_mask(o_i[:, None], o_i[None, :], 1), b_L, 0.0)
    for lv in range(1, NLEVEL):
        b_D = merge_inverse(b_D, tl.where(level_mask(o_i[:, None], o_i[None, :], 1 << lv), b_L, 0.0), INV_DTYPE, PREC)
    return b_D


@triton.jit
def gram_slice(
    b_q,
    b_k,
    b_G,
    b_P,
    b_M,
    o_i,
    NLEVEL: tl.constexpr,
    BOUNDED: tl.constexpr,
    PRODUCT: tl.constexpr,
    DT: tl.constexpr,
    PREC: tl.constexpr,
):
    """Adds one slice of K to P (pairs j <= i of q and k) and to M (pairs j < i of k and k).

    What is above the diagonal of P, and on and above that of M, is undefined. The levels come first: after the loop
    they would keep q, k and G in registers.
    """
    n_first = first_columns(b_G, o_i)
    in_block = block_columns(b_G, o_i, BOUNDED, PRODUCT)
    if not BOUNDED:
        left = (o_i >= n_first) & (in_block == 0)
        if tl.max(left.to(tl.int32), 0) == 1:
            diagonal = (o_i[:, None] == o_i[None, :]) & left[None, :]
            b_P += tl.where(diagonal, tl.sum(b_q * b_k, 1)[:, None], 0.0)
            for lv in range(4):
                b_e = level_factor(b_G, o_i, 1 << lv)
                pairs = level_mask(o_i[:, None], o_i[None, :], 1 << lv) & left[None, :]
                b_c = tl.trans((b_k * b_e).to(DT))
                b_P += tl.where(pairs, matmul((b_q * b_e).to(DT), b_c, PREC), 0.0)
                b_M += tl.where(pairs, matmul((b_k * b_e).to(DT), b_c, PREC), 0.0)
    for i_b in range(n_first >> 4, (1 << NLEVEL) // 16 + 1):
        # the first iteration is pass 0, whatever the number of the first block that needs one
        row, col = pass_factors(tl.where(i_b == n_first >> 4, 0, i_b), b_G, o_i, n_first, in_block)
        b_c = tl.trans((b_k * col).to(DT))
        b_P = tl.dot((b_q * row).to(DT), b_c, b_P, input_precision=PREC)
        b_M = tl.dot((b_k * row).to(DT), b_c, b_M, input_precision=PREC)
    return b_P, b_M
