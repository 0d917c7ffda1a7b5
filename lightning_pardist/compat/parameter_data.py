"""Who asks for ``parameter.data``: what is written to that leaves no other trace, not even in the version counter."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

#: How often ``.data`` was asked for, of the parameters that somebody watches, by their ``id``.
_looks: dict[int, int] = {}


def watch_looks(parameter: Tensor) -> int:
    """Count from here on how often ``.data`` of a parameter is asked for, as long as it lives; returns the count.

    ``nn.Parameter`` has a property of its own for it as long as any is watched, which does what ``torch.Tensor.data``
    does beside.
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


def looks_at(parameter: Tensor) -> int:
    """How often ``.data`` of a watched parameter was asked for."""
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
