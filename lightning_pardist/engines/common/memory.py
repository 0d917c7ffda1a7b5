"""Memory of model states on this rank, counted by storage so that views and tied tensors count once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pardist.local_tensors import dense_parts


@dataclass(frozen=True)
class HeldBytes:
    """Sizes of the model states on one rank.

    Attributes:
        num_parameters: Number of elements of the module's parameters, by their global shapes, tied ones once.
        parameters: Bytes of parameters.
        gradients: Bytes of gradients, or of the buckets that store them.
        optimizer: Bytes of optimizer state.
        buffers: Bytes of the module's buffers.
    """

    num_parameters: int
    parameters: int
    gradients: int
    optimizer: int
    buffers: int

    @property
    def total(self) -> int:
        """Bytes of parameters, gradients, optimizer state and buffers together."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


def held_bytes(modules: Iterable[nn.Module], optimizers: Iterable[Optimizer], *, buckets: int = 0) -> HeldBytes:
    """Measure the current memory of modules and optimizers on this rank. Not collective.

    Args:
        modules: Modules whose parameters, gradients and buffers are counted.
        optimizers: Optimizers whose state is counted.
        buckets: Bytes of gradient buckets; gradients that are views into them are not counted again.
    """
    modules = list(modules)
    params = list({id(param): param for module in modules for param in module.parameters()}.values())
    grads = [param.grad for param in params if param.grad is not None]
    state = [
        value
        for optimizer in optimizers
        for values in optimizer.state.values()
        for value in (values.values() if isinstance(values, dict) else ())
        if isinstance(value, Tensor)
    ]
    return HeldBytes(
        num_parameters=sum(param.numel() for param in params),
        parameters=storage_bytes(params),
        gradients=max(buckets, storage_bytes(grads)),
        optimizer=storage_bytes(state),
        buffers=storage_bytes(buffer for module in modules for buffer in module.buffers()),
    )


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages of ``tensors``; for a DTensor, that of its local part."""
    found: dict[tuple[torch.device, int], int] = {}
    for local in itertools.chain.from_iterable(map(dense_parts, tensors)):
        if local.is_meta:
            continue
        storage = local.untyped_storage()
        found[local.device, storage.data_ptr() or id(storage)] = storage.nbytes()
    return sum(found.values())
