"""Checksums to compare tensor values across ranks or steps without sending the tensors."""

from __future__ import annotations

import torch
from torch import Tensor

FINGERPRINT_SIZE = 3
#: Number of elements that are converted to fp64 at a time.
_PIECE = 1 << 22
#: Prime, so that matrix rows that are swapped fall into other columns.
_COLUMNS = 1021
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(values: Tensor, *, at_most: int | None = None) -> Tensor:
    """Return the sum, the sum of squares and a position-weighted sum of a tensor. Not collective.

    Different values almost never have the same fingerprint. The position weights distinguish permuted values (rows that
    each rank resets in other places).

    Args:
        values: Real tensor of any shape.
        at_most: Maximum number of elements to read, evenly spread; all if None.

    Returns:
        Shape ``[3]``, fp64, on the values' device. Equal values have equal fingerprints on equal devices.
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
    """Return checksums of the bit patterns, to detect changes of a rank's own values in one read. Not collective.

    Args:
        values: Real tensor of any shape.

    Returns:
        Shape ``[1021]``, int64, on the values' device; almost never the same for different values.
    """
    flat = values.reshape(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    even = bits.numel() // _COLUMNS * _COLUMNS
    sums = bits[:even].view(-1, _COLUMNS).sum(0, dtype=torch.int64)
    rest = bits[even:]
    sums[: rest.numel()] += rest
    return sums
