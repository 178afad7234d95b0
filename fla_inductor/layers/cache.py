"""What KDA layers carry from one piece of a sequence to the next."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class KDALayerState(NamedTuple):
    """State of one layer.

    `recurrent` is [N, HV, V, K] in float32; `conv` holds the last W inputs [N, D, W] of the q, k and v convolutions,
    None for a layer without them.
    """

    recurrent: Tensor
    conv: tuple[Tensor, Tensor, Tensor] | None


class KDACache:
    """States of the KDA layers of one model, by `layer_idx`.

    A forward pass with `use_cache=True` replaces a layer's state by a new one, and never writes into the tensors of the
    old one: a `copy()` taken before a step is a snapshot.
    """

    def __init__(self) -> None:
        self.layers: dict[int, KDALayerState] = {}

    def get(self, layer_idx: int) -> KDALayerState | None:
        """State of a layer, None before its first piece."""
        return self.layers.get(layer_idx)

    def update(self, layer_idx: int, state: KDALayerState) -> None:
        """Replace the state of a layer."""
        self.layers[layer_idx] = state

    def copy(self) -> KDACache:
        """A second cache that holds the same tensors."""
        other = KDACache()
        other.layers = dict(self.layers)
        return other
