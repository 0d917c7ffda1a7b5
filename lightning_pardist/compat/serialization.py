"""torch's file format: pickled descriptions of tensors and storages, written without the tensors themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch.serialization import _get_storage_alignment
from torch.storage import TypedStorage, _dtype_to_storage_type_map, _new_dtypes

from lightning_pardist.compat.contract import Private

_FILES = "checkpoint files that are written without a copy in memory"
_INSTEAD = "torch.save of the whole state"
NAMES = (
    Private("torch.serialization._get_storage_alignment", _FILES, _INSTEAD),
    Private("torch.storage._dtype_to_storage_type_map", _FILES, _INSTEAD),
    Private("torch.storage._new_dtypes", _FILES, _INSTEAD),
    Private("torch._utils._rebuild_tensor_v2", _FILES, _INSTEAD),
    Private("torch._utils._rebuild_tensor_v3", _FILES, _INSTEAD),
    Private("torch.storage.TypedStorage._untyped_storage", _FILES, _INSTEAD),
    Private("torch.storage.TypedStorage._pickle_storage_type", _FILES, _INSTEAD),
    Private("torch.storage.TypedStorage._size", _FILES, _INSTEAD),
    Private("torch.distributed.checkpoint.filesystem._StorageInfo", "checkpoint folders that torch's DCP can read",
            "an index of our own beside DCP's"),
)  # fmt: skip


def alignment() -> int:
    """Return the alignment, in bytes, of tensor contents in a file."""
    return int(_get_storage_alignment())


def rebuild(storage: Any, shape: torch.Size, stride: tuple[int, ...], hooks: Any, dtype: torch.dtype) -> Any:
    """Return the function and the arguments by which pickle rebuilds a tensor.

    Args:
        storage: Object from which the persistent id is made.
        shape: Shape of the tensor.
        stride: Strides of the tensor.
        hooks: An empty ``OrderedDict``.
        dtype: Dtype of the tensor.
    """
    arguments: tuple[Any, ...] = (storage, 0, shape, stride, False, hooks)
    if dtype in _new_dtypes():
        return torch._utils._rebuild_tensor_v3, (*arguments, dtype)
    return torch._utils._rebuild_tensor_v2, arguments


def storage_class(dtype: torch.dtype) -> tuple[Any, bool]:
    """Return the storage class that stands for a dtype in a file, and whether its length counts bytes."""
    if dtype in _new_dtypes():
        return torch.UntypedStorage, True
    return getattr(torch, _dtype_to_storage_type_map()[dtype]), False


def typed_storage(storage: TypedStorage) -> tuple[Any, torch.UntypedStorage, int]:
    """Return the class, bytes and number of elements of a ``TypedStorage``, without its deprecation warnings."""
    return getattr(torch, storage._pickle_storage_type()), storage._untyped_storage, storage._size()


def storage_info(file: str, offset: int, length: int) -> Any:
    """Return DCP's record of where a piece of a tensor is stored."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)
