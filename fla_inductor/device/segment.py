"""Where a program's tokens are: dense rows, or a slot of a packed batch located from `cu_seqlens` alone."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def segment(CU, T, N, i_n):
    """Start and length of sequence `i_n`; `i_n` = N is the tail of tokens that belong to no sequence.

    Offsets are clamped to [0, T]: a wrong `cu_seqlens` gives wrong numbers, never an access out of bounds.
    """
    bos = tl.load(CU + i_n).to(tl.int32)
    bos = tl.minimum(tl.maximum(bos, 0), T)
    eos = tl.load(CU + tl.minimum(i_n + 1, N)).to(tl.int32)
    eos = tl.where(i_n < N, tl.minimum(tl.maximum(eos, bos), T), T)
    return bos, eos - bos


@triton.jit
def sequence_of_slot(CU, N, i_s, BT: tl.constexpr, BN: tl.constexpr):
    """The sequence that owns slot `i_s`.

    Chunk t of sequence n has slot cu[n] // BT + n + t. First slots grow strictly with n, and no two chunks share a
    slot, so counting the first slots up to `i_s` inverts the map: no chunk table, hence nothing to build on the host.
    """
    count = tl.zeros((BN,), tl.int32)
    for i in range(tl.cdiv(N + 1, BN)):
        o_n = i * BN + tl.arange(0, BN)
        first = tl.load(CU + o_n, mask=o_n <= N, other=0).to(tl.int32) // BT + o_n
        count += tl.where((o_n <= N) & (first <= i_s), 1, 0)
    return tl.maximum(tl.sum(count) - 1, 0)
