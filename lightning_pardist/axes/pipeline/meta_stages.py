"""Modules built on ``meta``: placeholders for a trial run, then initialization of this rank's part, unit by unit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_pardist.compat.modules import own_buffers, own_parameters
from lightning_pardist.engines.common.meta_init import InitFunction, materialize
from lightning_pardist.engines.pipeline.placement import Placement


@contextmanager
def meta_placeholders(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Context in which ``meta`` tensors of a module are replaced by placeholders of typical magnitude, so that it runs.

    A floating-point parameter becomes a strided view that repeats a few numbers, so that the module takes almost no
    memory; buffers, which are small, are allocated. Not collective.

    Args:
        module: The module; its own tensors are restored on exit.
        device: Device of the placeholders.
    """
    made: dict[Tensor, Tensor] = {}
    swapped: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    for child in module.modules():
        for table in (own_parameters(child), own_buffers(child)):
            for name, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    swapped.append((table, name, tensor))  # type: ignore[arg-type]
    try:
        for table, name, tensor in swapped:
            if tensor not in made:
                made[tensor] = _placeholder(tensor, device)
            table[name] = made[tensor]
        yield
    finally:
        for table, name, tensor in swapped:
            table[name] = tensor


def _placeholder(tensor: Tensor, device: torch.device) -> Tensor:
    if not isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
        filled = torch.ones if tensor.is_floating_point() else torch.zeros
        plain = filled(tensor.shape, dtype=tensor.dtype, device=device)
        return nn.Parameter(plain, requires_grad=False) if isinstance(tensor, nn.Parameter) else plain
    # Stride 1 along every dim.
    length = 1 + sum(size - 1 for size in tensor.shape) if tensor.numel() else 0
    numbers = torch.randn(length, generator=torch.Generator().manual_seed(length))
    fan_in = math.prod(tensor.shape[1:])
    numbers = numbers / math.sqrt(fan_in) if tensor.ndim > 1 and fan_in else 1 + numbers / 10
    view = numbers.to(device, tensor.dtype).as_strided(tensor.shape, (1,) * tensor.ndim)
    return nn.Parameter(view, tensor.requires_grad)


def create_local(module: nn.Module, placement: Placement, *, init: InitFunction | None) -> None:
    """Initialize the parameters that this rank holds; all others stay on ``meta``. Not collective.

    Modules are initialized in the order of their construction, and other ranks' parameters are freed as soon as their
    unit is complete. With the same random state on all ranks, values are those of one process, and no rank holds more
    than its own part and one unit.

    Args:
        module: The root module.
        placement: Placement of parameters on ranks.
        init: Initializes the own parameters of one module in place of its ``reset_parameters``.

    Raises:
        ValueError: If parameters on ``meta`` belong to a module that does not define their initialization.
    """
    empty = {name: p for name, p in module.named_parameters(remove_duplicate=False) if p.is_meta}
    units = {module.get_submodule(name): f"{name}." for name in placement.plan.trace.unit_names}
    # A tied parameter is initialized again by each module that it belongs to: not freed before the root is complete.
    tied = {name for info in placement.plan.trace.parameters.values() if len(info.names) > 1 for name in info.names}

    def free(unit: nn.Module) -> None:
        prefix = "" if unit is module else units[unit]
        for name, parameter in list(unit.named_parameters(prefix[:-1], remove_duplicate=False)):
            waits = name in tied and unit is not module
            if name in empty and not waits and not placement.is_local(name):
                owner, _, last = name.rpartition(".")
                own_parameters(module.get_submodule(owner))[last] = empty[name]
                if not parameter.is_meta:
                    parameter.data = torch.empty(0, dtype=parameter.dtype)

    materialize(module, free, is_unit=lambda each: each in units or each is module, init=init)
