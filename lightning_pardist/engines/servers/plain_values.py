"""Serialisation of optimizer state, and other values of numbers, strings and tensors, to the bytes of a message.

The format is JSON, with placeholders for tensors, whose data follows. Nothing is pickled.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from lightning_pardist.engines.servers.messages import Unpacked, pack

_SCALARS = (type(None), bool, int, float, str)


def pack_plain(value: Any) -> Tensor:
    """Pack a value of scalars, strings, lists, tuples, dictionaries and tensors into bytes.

    Raises:
        TypeError: If it contains anything else; the message names the class.
    """
    tensors: list[Tensor] = []
    text = json.dumps(_encoded(value, tensors)).encode()
    return pack([torch.tensor([len(text)]), torch.frombuffer(bytearray(text), dtype=torch.uint8), *tensors])


def unpack_plain(packed: Tensor | None) -> Any:
    """Unpack what :func:`pack_plain` packed; tensors are copied to host memory of their own."""
    found = Unpacked(packed)
    length = int(found.take([1], torch.int64))
    text = bytes(found.take([length], torch.uint8).numpy()).decode()
    return _decoded(json.loads(text), found)


def is_plain(value: Any) -> bool:
    """Return whether :func:`pack_plain` accepts a value."""
    try:
        _encoded(value, [])
    except TypeError:
        return False
    return True


def _encoded(value: Any, tensors: list[Tensor]) -> Any:
    if type(value) in _SCALARS:
        return value
    if isinstance(value, Tensor) and not value.is_sparse:
        tensors.append(value.detach().cpu())
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_encoded(item, tensors) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_encoded(key, tensors), _encoded(item, tensors)] for key, item in value.items()]}
    if isinstance(value, (int, float, str)):
        # Such as numpy scalars and string enumerations.
        return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))
    raise TypeError(
        f"a {type(value).__name__} cannot be sent between ranks: messages hold only tensors, numbers, strings, and"
        " lists and dictionaries of them"
    )


def _decoded(form: Any, found: Unpacked) -> Any:
    if not isinstance(form, dict):
        return form
    kind, inner = next(iter(form.items()))
    if kind == "tensor":
        name, shape = inner
        return found.take(shape, getattr(torch, name)).clone()
    if kind == "dict":
        pairs = [(_decoded(key, found), _decoded(item, found)) for key, item in inner]
        return dict(pairs)
    items = [_decoded(item, found) for item in inner]
    return tuple(items) if kind == "tuple" else items
