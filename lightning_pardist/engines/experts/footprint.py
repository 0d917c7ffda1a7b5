"""Snapshot of a module's non-parameter state, to detect side effects of a forward that runs twice or elsewhere."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

#: Packages whose objects are not inspected: they lead to the Trainer and to the interpreter itself.
_FOREIGN = ("torch.", "lightning.", "pytorch_lightning.", "lightning_pardist.", "builtins.", "typing.", "logging.")
#: Containers longer than this are recorded by their length only.
_LONG = 10_000
#: Tolerance between numbers of two equal runs, relative to the largest.
_CLOSE = 1e-3
#: Attributes of every nn.Module; its tables are inspected separately.
_OF_TORCH = frozenset(vars(nn.Module()))


class Footprint:
    """Values that user code can reach from a module: buffers, attributes and their contents, globals of its files.

    Two are equal if they have the same entries with equal values, numbers up to rounding. Of global containers, only
    the lengths are recorded.

    Args:
        module: Not changed. Its parameters are not included.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, module: nn.Module) -> None:
        self.values: dict[str, Any] = {}
        self._seen: dict[int, Any] = {}
        self._note("", module)
        for name in sorted({type(child).__module__ for child in module.modules()}):
            if not f"{name}.".startswith(_FOREIGN):
                self._note_file(name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Footprint) or self.values.keys() != other.values.keys():
            return False
        return all(_equal(value, other.values[place]) for place, value in self.values.items())

    def _note(self, place: str, value: Any) -> None:
        if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
            self.values[place] = value
        elif id(value) not in self._seen and not isinstance(value, (type, nn.Parameter)):
            self._seen[id(value)] = value
            self._look_into(place, value)

    def _look_into(self, place: str, value: Any) -> None:
        if isinstance(value, Tensor):
            # Sparse tensors and meta tensors are recorded by their shape.
            plain = value.layout == torch.strided and not value.is_meta
            self.values[place] = value.detach().clone() if plain else tuple(value.shape)
        elif isinstance(value, np.ndarray):
            self.values[place] = value.tolist() if value.size <= _LONG else value.shape
        elif isinstance(value, nn.Module):
            self._note_items(place, {key: each for key, each in vars(value).items() if key not in _OF_TORCH})
            self._note_items(place, dict(value.named_buffers(recurse=False)))
            self._note_items(place, dict(value.named_children()))
        elif isinstance(value, (Mapping, Set, list, tuple, deque)):
            self.values[place] = len(value)
            if len(value) <= _LONG and not isinstance(value, Set):
                self._note_items(place, value if isinstance(value, Mapping) else dict(enumerate(value)))
        elif _has(value):
            self._note_items(place, vars(value))

    def _note_items(self, place: str, items: Mapping[Any, Any]) -> None:
        for key, value in [*items.items()]:
            self._note(f"{place}.{key}", value)

    def _note_file(self, name: str) -> None:
        """Record lengths of module-level containers of a file, in which user code often registers losses."""
        for key, value in [*vars(sys.modules[name]).items()] if name in sys.modules else ():
            if isinstance(value, (list, dict, set, deque)) and not key.startswith("__"):
                self.values[f"{name}:{key}"] = len(value)


def _has(value: Any) -> bool:
    """Return whether an object has attributes and its class is the user's."""
    return hasattr(value, "__dict__") and not f"{type(value).__module__}.".startswith(_FOREIGN)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_CLOSE) or (math.isnan(one) and math.isnan(other))
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, other)
    scale = max(float(other.abs().max()), 1e-6)
    return float((one - other).abs().max()) <= _CLOSE * scale
