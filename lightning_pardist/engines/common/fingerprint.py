"""A few numbers that tell whether ranks hold the same values, without sending these."""

from __future__ import annotations

import torch
from torch import Tensor

FINGERPRINT_SIZE = 3
#: Elements that are fp64 at once.
_PIECE = 1 << 22
#: Prime, so that rows of a matrix that changed places are in other columns.
_COLUMNS = 1021
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(values: Tensor, *, at_most: int | None = None) -> Tensor:
    """Sum, sum of squares and a sum weighed by place: as good as never the same for other values. Not collective.

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
    total = torch.zeros(FINGERPRINT_SIZE, dtype=torch.float64, device=flat.device)
    for begin in range(0, flat.numel(), _PIECE):
        wide = flat[begin : begin + _PIECE].double()
        places = torch.arange(begin, begin + wide.numel(), dtype=torch.float64, device=wide.device)
        total += torch.stack([wide.sum(), wide @ wide, wide @ (1 + places / flat.numel())])
    return total


@torch.no_grad()
def bit_sums(values: Tensor) -> Tensor:
    """Sums of bits that tell whether a rank's own values were changed, at the cost of reading them. Not collective.

    Args:
        values: Of any shape, real.

    Returns:
        Shape ``[1021]``, int64, on the values' device: as good as never the same for other values.
    """
    flat = values.reshape(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    even = bits.numel() // _COLUMNS * _COLUMNS
    sums = bits[:even].view(-1, _COLUMNS).sum(0, dtype=torch.int64)
    rest = bits[even:]
    sums[: rest.numel()] += rest
    return sums
