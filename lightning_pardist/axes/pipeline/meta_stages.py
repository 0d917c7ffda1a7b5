"""Modules built on ``meta``: a trial run without values, then values for what this rank holds, unit by unit."""

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
def stand_ins(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, the module runs: tensors on ``meta`` have numbers, of no meaning but of ordinary size. Not collective.

    A parameter is a view that shows the same few numbers again and again, so that the whole module takes next to no
    memory; buffers, which are small, have memory of their own.

    Args:
        module: Its own tensors are put back afterwards.
        device: Where it is to run.
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
                made[tensor] = _stand_in(tensor, device)
            table[name] = made[tensor]
        yield
    finally:
        for table, name, tensor in swapped:
            table[name] = tensor


def _stand_in(tensor: Tensor, device: torch.device) -> Tensor:
    if not isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
        filled = torch.ones if tensor.is_floating_point() else torch.zeros
        plain = filled(tensor.shape, dtype=tensor.dtype, device=device)
        return nn.Parameter(plain, requires_grad=False) if isinstance(tensor, nn.Parameter) else plain
    # Neighbours along any dim are neighbours in memory.
    length = 1 + sum(size - 1 for size in tensor.shape) if tensor.numel() else 0
    numbers = torch.randn(length, generator=torch.Generator().manual_seed(length))
    fan_in = math.prod(tensor.shape[1:])
    numbers = numbers / math.sqrt(fan_in) if tensor.ndim > 1 and fan_in else 1 + numbers / 10
    view = numbers.to(device, tensor.dtype).as_strided(tensor.shape, (1,) * tensor.ndim)
    return nn.Parameter(view, tensor.requires_grad)


def create_local(module: nn.Module, placement: Placement, *, init: InitFunction | None) -> None:
    """Give values to what this rank holds; everything else stays on ``meta``. Not collective.

    Modules are initialized in the order of their construction, and what another rank holds is freed as soon as its unit
    is complete: with the same random state on all ranks, values are those of one process, and no rank holds more than
    its share and a unit.

    Args:
        module: The root.
        placement: Who holds what.
        init: Initializes the own parameters of one module in place of its ``reset_parameters``.

    Raises:
        ValueError: If parameters on ``meta`` belong to a module that says nothing about their values.
    """
    empty = {name: p for name, p in module.named_parameters(remove_duplicate=False) if p.is_meta}
    units = {module.get_submodule(name): f"{name}." for name in placement.plan.trace.unit_names}
    # A tied parameter is initialized once more by each module that it belongs to.
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
