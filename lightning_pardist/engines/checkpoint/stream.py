"""A single checkpoint file written tensor by tensor: no more than one of them is in memory at a time."""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.serialization import _get_storage_alignment, _open_zipfile_writer_buffer
from torch.storage import TypedStorage, _dtype_to_storage_type_map, _new_dtypes

from lightning_pardist.engines.checkpoint.files import complete_file


class LazyTensor:
    """Stands for a tensor in what :func:`save_streamed` saves; the file holds the tensor.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        read: Gives it, row-major, when its turn comes.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, read: Callable[[], Tensor]) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.read = read

    @property
    def nbytes(self) -> int:
        """Size of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __reduce__(self) -> Any:
        stride = torch.empty(self.shape, device="meta").stride()
        arguments: tuple[Any, ...] = (_LazyStorage(self), 0, torch.Size(self.shape), stride, False, OrderedDict())
        if self.dtype in _new_dtypes():
            return torch._utils._rebuild_tensor_v3, (*arguments, self.dtype)
        return torch._utils._rebuild_tensor_v2, arguments


class _LazyStorage:
    def __init__(self, tensor: LazyTensor) -> None:
        self.tensor = tensor


class _Pickler(pickle.Pickler):
    """Pickles as ``torch.save`` does, and keeps for later what goes into the archive as a record of its own."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=2)
        self.records: dict[str, LazyTensor | torch.UntypedStorage] = {}
        self._keys: dict[int, str] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _LazyStorage):
            tensor = obj.tensor
            if tensor.dtype in _new_dtypes():
                return "storage", torch.UntypedStorage, self._key(id(tensor), tensor), "cpu", tensor.nbytes
            kind = getattr(torch, _dtype_to_storage_type_map()[tensor.dtype])
            return "storage", kind, self._key(id(tensor), tensor), "cpu", torch.Size(tensor.shape).numel()
        if isinstance(obj, TypedStorage):
            storage = obj._untyped_storage
            kind = getattr(torch, obj._pickle_storage_type())
            return "storage", kind, self._key(storage._cdata, storage), "cpu", obj._size()
        if isinstance(obj, torch.UntypedStorage):
            return "storage", torch.UntypedStorage, self._key(obj._cdata, obj), "cpu", obj.nbytes()
        return None

    def _key(self, identity: int, record: LazyTensor | torch.UntypedStorage) -> str:
        key = self._keys.setdefault(identity, str(len(self._keys)))
        self.records[key] = record
        return key


def save_streamed(state: Any, path: str | os.PathLike[str]) -> None:
    """Save what ``torch.load`` reads, :class:`LazyTensor` objects as the tensors that they stand for. Not collective.

    Args:
        state: What ``torch.save`` takes, tensors in host memory.
        path: Local path or URL; the file appears complete or not at all.

    Raises:
        OSError: From the filesystem; what was at ``path`` before is still there then.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(state)
    with complete_file(path) as stream, _open_zipfile_writer_buffer(stream) as archive:
        _put(archive, "data.pkl", buffer.getvalue())
        _put(archive, ".format_version", b"1")
        _put(archive, ".storage_alignment", str(_get_storage_alignment()).encode())
        _put(archive, "byteorder", sys.byteorder.encode())
        for key, record in pickler.records.items():
            storage = _storage_of(record.read()) if isinstance(record, LazyTensor) else record.cpu()
            archive.write_record(f"data/{key}", storage, storage.nbytes())


def _put(archive: Any, name: str, content: bytes) -> None:
    archive.write_record(name, content, len(content))


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.untyped_storage()
