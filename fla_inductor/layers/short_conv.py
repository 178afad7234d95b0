"""Depthwise causal convolution over time, with the parameters of FLA's ShortConvolution."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fla_inductor._checks import fail
from fla_inductor.custom_ops.causal_conv1d import causal_conv1d


class ShortConvolution(nn.Conv1d):
    """y_t = activation(sum_i weight_i x_{t-W+1+i} + bias), each channel on its own.

    Args:
        hidden_size: number of channels D.
        kernel_size: width W.
        bias: whether there is a bias [D].
        activation: "silu", "swish" or None.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Parameters: `weight` [D, 1, W] and, if asked for, `bias` [D], as in an `nn.Conv1d` with D groups.

    Source: fla.modules.ShortConvolution.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if activation not in ("silu", "swish", None):
            fail("ShortConvolution", "activation", '"silu", "swish" or None', repr(activation))
        super().__init__(
            hidden_size,
            hidden_size,
            kernel_size,
            padding=kernel_size - 1,
            groups=hidden_size,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        self.hidden_size = hidden_size
        self.activation = activation

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        residual: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Convolve `x` [B, T, D], continuing from `cache` [N, D, W], the last W inputs before it.

        Args:
            x: input [B, T, D]; B is 1 with `cu_seqlens`.
            residual: added after the activation, [B, T, D].
            cache: state returned by the previous piece; it is not written into.
            output_final_state: whether to return the state after `x`.
            cu_seqlens: offsets of the sequences in `x`, [N + 1].

        Returns:
            y [B, T, D] in the dtype of `x`, and the state [N, D, W] or None.
        """
        return causal_conv1d(
            x=x,
            weight=self.weight.squeeze(1),
            bias=self.bias,
            residual=residual,
            initial_state=cache,
            output_final_state=output_final_state,
            activation=self.activation,
            cu_seqlens=cu_seqlens,
        )
