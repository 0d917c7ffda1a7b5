"""Random numbers of a device and of the host: where they are, and as if nobody had drawn any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

RandomState = tuple[Tensor, Tensor | None, torch.device]


def random_state(device: torch.device) -> RandomState:
    """Of the host, and of the device if it is an accelerator."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None, device


def set_random_state(state: RandomState) -> None:
    """Go on from there."""
    host, accelerator, device = state
    torch.set_rng_state(host)
    if accelerator is not None:
        torch.cuda.set_rng_state(accelerator, device)


@contextmanager
def random_stays(device: torch.device) -> Iterator[None]:
    """What is drawn inside is drawn again afterwards."""
    before = random_state(device)
    try:
        yield
    finally:
        set_random_state(before)
