"""Search for copies of the module that callbacks hold (weight averages, teachers)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn


def copies_of(module: nn.Module, owners: Iterable[Any]) -> list[nn.Module]:
    """Find modules among the attributes of ``owners`` with parameters of the same names and shapes as ``module``.

    ``StochasticWeightAveraging``, ``WeightAveraging`` and user callbacks deep-copy the module during setup, and then
    iterate over the parameters of both in parallel. The copy must therefore be split like the module.

    Args:
        module: The module, split or not: a split parameter has its global shape.
        owners: Callbacks.
    """
    wanted = _shapes(module)
    found: dict[int, nn.Module] = {}
    for owner in owners:
        for value in list(getattr(owner, "__dict__", {}).values()):
            for candidate in _candidates(value):
                if candidate is not module and wanted and _shapes(candidate) == wanted:
                    found[id(candidate)] = candidate
    return list(found.values())


def _candidates(value: Any) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
        # torch's AveragedModel holds its copy under this name.
        if isinstance(inner := getattr(value, "module", None), nn.Module):
            yield inner


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
