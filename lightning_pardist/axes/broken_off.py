"""What is done with a module in parts when a run is broken off."""

from __future__ import annotations

from functools import partial

from torch import nn

from lightning_pardist.compat.modules import own_buffers, own_parameters


def hold_to_host(module: nn.Module) -> None:
    """Let ``module.cpu()``, which Lightning calls next, leave out what other ranks hold: it has no values to move."""
    module.__dict__["cpu"] = partial(_held_to_host, module)


def _held_to_host(module: nn.Module) -> nn.Module:
    module.__dict__.pop("cpu", None)
    for each in module.modules():
        for tensor in (*own_parameters(each).values(), *own_buffers(each).values()):
            if tensor is not None and not tensor.is_meta:
                tensor.data = tensor.data.cpu()
    return module
