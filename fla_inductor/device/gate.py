"""Gate activations of KDA in log2 units, forward and backward, for use inside Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# exp2(-160) is zero in float32: a smaller decay cannot be told from a full reset, and the bound keeps sums finite
MIN_LOG2 = tl.constexpr(-160.0)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-LOG2E * x))


@triton.jit
def log2_1p(u):
    """log2(1 + u) for u in [0, 1] to a relative 3e-7: a minimax polynomial keeps the digits of a small u."""
    p = 0.06360635161399841 - 0.012319033965468407 * u
    p = p * u - 0.1553497463464737
    p = p * u + 0.2560082674026489
    p = p * u - 0.3533943295478821
    p = p * u + 0.48006361722946167
    p = p * u - 0.7213100790977478
    return u * (p * u + 1.4426947832107544)


@triton.jit
def log2_decay(b_g, b_bias, b_a, lower_bound, GATE: tl.constexpr):
    """Decay of one step in log2 units, at least MIN_LOG2; `b_a` is exp(A_log).

    GATE 0: `b_g` is the natural-log decay. 1: -a softplus(g + bias). 2: lower_bound sigmoid(a (g + bias)).
    """
    if GATE == 0:
        y = b_g * LOG2E
    elif GATE == 1:
        x = (b_g + b_bias) * LOG2E
        y = -b_a * (tl.maximum(x, 0.0) + log2_1p(tl.exp2(-tl.abs(x))))
    else:
        y = (lower_bound * LOG2E) * sigmoid(b_a * (b_g + b_bias))
    return tl.maximum(y, MIN_LOG2)


@triton.jit
def gate_backward(b_dg, b_g2, b_g, b_bias, b_a, lower_bound, GATE: tl.constexpr):
    """Gradients of the raw gate and of A_log (per element) from the gradient `b_dg` of the natural-log decay.

    `b_g2` is what `log2_decay` returned. A decay at the floor is a full reset: its gradient is zero.
    """
    b_dg = tl.where(b_g2 > MIN_LOG2, b_dg, 0.0)
    if GATE == 0:
        dx = b_dg
        da = b_dg
    elif GATE == 1:
        dx = -b_a * sigmoid(b_g + b_bias) * b_dg
        da = b_g2 * (1.0 / LOG2E) * b_dg
    else:
        x = b_g + b_bias
        s = sigmoid(b_a * x)
        dx = lower_bound * s * (1.0 - s) * b_a * b_dg
        da = x * dx
    return dx, da
