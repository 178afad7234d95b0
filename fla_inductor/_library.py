"""The one `torch.library` handle that every operator of this package is defined through."""

from __future__ import annotations

import torch

NAMESPACE = "fla_inductor"
LIB = torch.library.Library(NAMESPACE, "DEF")
TAGS = (torch.Tag.pt2_compliant_tag,)
