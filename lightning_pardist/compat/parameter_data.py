"""Counters of accesses to ``parameter.data``: writes through it leave no other trace, nor a new version counter."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

#: Number of accesses to ``.data`` of each watched parameter, by ``id``.
_looks: dict[int, int] = {}


def count_data_accesses(parameter: Tensor) -> int:
    """Count the accesses to a parameter's ``.data`` from now on, for the parameter's lifetime, and return the count.

    While any parameter is watched, ``nn.Parameter`` has a ``data`` property of its own, which otherwise behaves like
    ``torch.Tensor.data``.
    """
    if "data" not in nn.Parameter.__dict__:
        nn.Parameter.data = property(_get, _set)  # type: ignore[assignment]
    if id(parameter) not in _looks:
        _looks[id(parameter)] = 0
        weakref.finalize(parameter, _forget, id(parameter)).atexit = False
    return _looks[id(parameter)]


def _forget(key: int) -> None:
    _looks.pop(key, None)
    if not _looks and "data" in nn.Parameter.__dict__:
        del nn.Parameter.data


def data_accesses_of(parameter: Tensor) -> int:
    """Return how often ``.data`` of a watched parameter was accessed."""
    return _looks[id(parameter)]


def _get(parameter: Tensor) -> Tensor:
    if id(parameter) in _looks:
        _looks[id(parameter)] += 1
    data: Tensor = torch.Tensor.data.__get__(parameter)  # type: ignore[attr-defined]
    return data


def _set(parameter: Tensor, value: Tensor) -> None:
    if id(parameter) in _looks:
        _looks[id(parameter)] += 1
    torch.Tensor.data.__set__(parameter, value)  # type: ignore[attr-defined]
