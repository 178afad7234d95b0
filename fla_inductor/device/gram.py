"""Decayed Gram matrices inside one chunk and the triangular inverse, with exponents that never overflow.

R_ij = sum_d x_id y_jd 2^(G_id - G_jd) for j <= i, where G is non-increasing along rows. The exponent is split into a
row factor and a column factor around a reference row. Two kinds of products add up to R:

- passes: a pass starts at a column, takes the columns that have lost at most PASS_RANGE since then, and all rows from
  its start on, around its first row. The next one starts where it ends. There are at most MAX_PASSES.
- levels h (1, 2, 4, ...) for the columns that no pass took: i in the second half, j in the first half of a block of 2h
  rows; reference = first row of the second half; both factors are at most one, whatever the gate.

Row factors of a pass start at 2^ROW_SHIFT, so that they underflow only where a pair has lost 42 bits and more. Which
product takes a pair depends on no row after the pair's column, so later tokens change nothing before them.
"""

from __future__ import annotations

import triton
import triton.language as tl

# row factors from 2^96 down, column factors from 2^-96 up to 2^84: room for inputs of 2^31 and of 2^-30
PASS_RANGE = tl.constexpr(180.0)
ROW_SHIFT = tl.constexpr(96.0)
# three are enough for 64 steps of five nats
MAX_PASSES = tl.constexpr(4)


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
def pass_starts(b_G, o_i):
    """How many passes there are, their starts (a byte each), and the first column that is left to the levels."""
    n = 0
    starts = 0
    end = 0
    while (n < MAX_PASSES) & (end < b_G.shape[0]):
        starts |= end << (8 * n)
        # rows that are in range: a prefix, since G is non-increasing
        end = tl.sum((tl.max(-_since(b_G, o_i, end), 1) <= PASS_RANGE).to(tl.int32), 0)
        n += 1
    return n, starts, end


@triton.jit
def pass_factors(i_p, n, starts, end, b_G, o_i):
    """Row and column factors of pass i_p."""
    start = (starts >> (8 * i_p)) & 255
    stop = tl.where(i_p == n - 1, end, (starts >> (8 * tl.minimum(i_p + 1, 3))) & 255)
    d = _since(b_G, o_i, start)
    rows = o_i >= start
    row = tl.where(rows[:, None], tl.exp2(d + ROW_SHIFT), 0.0)
    col = tl.where((rows & (o_i < stop))[:, None], tl.exp2(-d - ROW_SHIFT), 0.0)
    return row, col


@triton.jit
def inverse_part(b_N, b_b, o_i, NLEVEL: tl.constexpr, INV_DTYPE: tl.constexpr, PREC: tl.constexpr):
    """X in (I + N Diag(b))^-1 = I + X Diag(b) and (I + Diag(b) N)^-1 = I + Diag(b) X, for strictly lower N.

    Without a division by b, which may be zero. The diagonal blocks that are done double at each step, where the block
    of X between two of them is -(I + X Diag(b)) N (I + Diag(b) X) with the block of N between them.
    """
    b_X = -tl.where(level_mask(o_i[:, None], o_i[None, :], 1), b_N, 0.0)
    for lv in range(1, NLEVEL):
        b_n = tl.where(level_mask(o_i[:, None], o_i[None, :], 1 << lv), b_N, 0.0)
        x = b_n + matmul((b_n * b_b[None, :]).to(INV_DTYPE), b_X.to(INV_DTYPE), PREC)
        b_X -= x + matmul((b_X * b_b[None, :]).to(INV_DTYPE), x.to(INV_DTYPE), PREC)
    return b_X


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
    DT: tl.constexpr,
    PREC: tl.constexpr,
):
    """Adds one slice of K to P (pairs j <= i of q and k) and to M (pairs j < i of k and k).

    What is above the diagonal of P, and on and above that of M, is undefined. The levels come first: after the loop
    they would keep q, k and G in registers.
    """
    n, starts, end = pass_starts(b_G, o_i)
    if not BOUNDED:  # noqa: SIM102 - a constexpr test must stand alone, or the kernel branches on it
        if end < (1 << NLEVEL):
            left = o_i >= end
            diagonal = (o_i[:, None] == o_i[None, :]) & left[None, :]
            b_P += tl.where(diagonal, tl.sum(b_q * b_k, 1)[:, None], 0.0)
            for lv in range(NLEVEL):
                b_e = level_factor(b_G, o_i, 1 << lv)
                pairs = level_mask(o_i[:, None], o_i[None, :], 1 << lv) & left[None, :]
                b_c = tl.trans((b_k * b_e).to(DT))
                b_P += tl.where(pairs, matmul((b_q * b_e).to(DT), b_c, PREC), 0.0)
                b_M += tl.where(pairs, matmul((b_k * b_e).to(DT), b_c, PREC), 0.0)
    for i_p in range(n):
        row, col = pass_factors(i_p, n, starts, end, b_G, o_i)
        b_c = tl.trans((b_k * col).to(DT))
        b_P = tl.dot((b_q * row).to(DT), b_c, b_P, input_precision=PREC)
        b_M = tl.dot((b_k * row).to(DT), b_c, b_M, input_precision=PREC)
    return b_P, b_M
