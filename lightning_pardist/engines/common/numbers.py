"""Arithmetic of numbers that are on the host or on a device, without synchronization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: A float on the host, or a tensor of no dims on a device.
Number = Any


def where(condition: Any, yes: Number, no: Number) -> Number:
    """Return ``yes`` if the condition holds, else ``no``, as :func:`torch.where` of numbers on the host as well."""
    if isinstance(condition, Tensor):
        return torch.where(condition, yes, no)
    return yes if condition else no


def number_of(value: Number, device: torch.device) -> Number:
    """Return a number in 64 bits, on the host if the device is the CPU, without synchronization."""
    if not isinstance(value, Tensor):
        return float(value)
    return value.item() if device.type == "cpu" else value.detach().to(device, torch.float64).squeeze()


def tensor_of(value: Number | bool, device: torch.device) -> Tensor:
    """Return a number as a tensor of no dims."""
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=torch.bool if isinstance(value, bool) else torch.float64, device=device)
