"""Layers with FLA's names, arguments and parameters."""

from __future__ import annotations

from fla_inductor.layers.cache import KDACache, KDALayerState
from fla_inductor.layers.kda import KimiDeltaAttention
from fla_inductor.layers.norm_gated import FusedRMSNormGated
from fla_inductor.layers.short_conv import ShortConvolution

__all__ = ["FusedRMSNormGated", "KDACache", "KDALayerState", "KimiDeltaAttention", "ShortConvolution"]
