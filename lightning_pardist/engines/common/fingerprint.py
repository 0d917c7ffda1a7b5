"""A few numbers that tell whether ranks hold the same values, without sending these."""

from __future__ import annotations

import torch
from torch import Tensor

FINGERPRINT_SIZE = 3


@torch.no_grad()
def fingerprint(values: Tensor, *, at_most: int | None = None) -> Tensor:
    """Sum, norm and a sum weighed by place: as good as never the same for other values. Not collective.

    The weights tell values from the same ones in other places (rows that each rank chose to set anew).

    Args:
        values: Of any shape, real.
        at_most: Read so many elements at most, evenly spread.

    Returns:
        Shape ``[3]``, fp64, on the values' device. Equal values have equal ones on equal devices.
    """
    flat = values.reshape(-1)
    if at_most is not None and flat.numel() > at_most:
        flat = flat[:: -(-flat.numel() // at_most)]
    wide = flat.double()
    weights = torch.linspace(1.0, 2.0, wide.numel(), dtype=torch.float64, device=wide.device)
    return torch.stack([wide.sum(), torch.linalg.vector_norm(wide), wide @ weights])
