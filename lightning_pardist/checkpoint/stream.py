"""Streaming writer of a single checkpoint file, with at most one piece of a tensor in memory at a time."""

from __future__ import annotations

import io
import pickle
import struct
import sys
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.storage import TypedStorage

from lightning_pardist.compat import serialization
from lightning_pardist.compat.tensors import storage_key

#: Maximum size of a piece of a tensor in memory, in bytes.
PIECE_BYTES = 2**22

#: Version of torch's archive format, as written by :func:`torch.save`.
_VERSION = b"3\n"
#: Size of a zip record's fixed header, including the zip64 sizes.
_HEADER_BYTES = 30 + 20
#: Header of torch's padding: an extra field that readers skip.
_PADDING_HEADER = struct.Struct("<2sH")


class LazyTensor:
    """Placeholder for a tensor whose values are read while :func:`write_archive` writes it.

    Args:
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        read: Called as ``read(start, stop, flat)`` when the tensor is written: copies elements ``start`` to ``stop`` of
            the row-major tensor into ``flat``, shape ``[stop - start]``.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, read: Callable[[int, int, Tensor], object]) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.read = read

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __reduce__(self) -> Any:
        stride = torch.empty(self.shape, device="meta").stride()
        return serialization.rebuild(_LazyStorage(self), torch.Size(self.shape), stride, OrderedDict(), self.dtype)


class _LazyStorage:
    def __init__(self, tensor: LazyTensor) -> None:
        self.tensor = tensor


class _Pickler(pickle.Pickler):
    """Pickler that behaves as ``torch.save`` and collects the storages that become separate archive records."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=2)
        self.records: dict[str, LazyTensor | torch.UntypedStorage] = {}
        self._keys: dict[int, str] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _LazyStorage):
            tensor = obj.tensor
            kind, counts_bytes = serialization.storage_class(tensor.dtype)
            length = tensor.nbytes if counts_bytes else torch.Size(tensor.shape).numel()
            return "storage", kind, self._key(id(tensor), tensor), "cpu", length
        if isinstance(obj, TypedStorage):
            kind, storage, length = serialization.typed_storage(obj)
            return "storage", kind, self._key(storage_key(storage), storage), "cpu", length
        if isinstance(obj, torch.UntypedStorage):
            return "storage", torch.UntypedStorage, self._key(storage_key(obj), obj), "cpu", obj.nbytes()
        return None

    def reducer_override(self, obj: Any) -> Any:
        # What a run sets on metrics, which hyperparameters may refer to, is None in the file: groups and methods.
        if isinstance(obj, dist.ProcessGroup) or (isinstance(obj, types.MethodType) and _is_own(obj.__self__)):
            return type(None), ()
        return NotImplemented

    def _key(self, identity: int, record: LazyTensor | torch.UntypedStorage) -> str:
        key = self._keys.setdefault(identity, str(len(self._keys)))
        self.records[key] = record
        return key


def write_archive(state: Any, stream: IO[bytes]) -> None:
    """Write an object as ``torch.save`` does, with :class:`LazyTensor` objects as tensors. Not collective.

    The format is the same; checksums are computed by zlib, several times as fast as in torch's own writer.

    Args:
        state: Object for ``torch.save``; tensors are loaded to host memory.
        stream: A binary file, written from its current position; it need not be seekable.

    Raises:
        TypeError: If a value cannot be pickled; the message gives its key.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(state)
    except Exception as error:
        if (key := _unpicklable(state)) is None:
            raise
        raise TypeError(
            f"The checkpoint's {key} cannot be pickled during a run ({type(error).__name__}: {error}). Leave it out; a"
            " module among the hyperparameters is saved with the others: save_hyperparameters(ignore=[...])."
        ) from error
    lazy = any(isinstance(record, LazyTensor) for record in pickler.records.values())
    # One buffer for all pieces: memory that is freed and allocated again would add up.
    piece = torch.empty(PIECE_BYTES if lazy else 0, dtype=torch.uint8)
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, content in (
            ("data.pkl", buffer.getvalue()),
            (".format_version", b"1"),
            (".storage_alignment", str(serialization.alignment()).encode()),
            ("byteorder", sys.byteorder.encode()),
        ):
            _put(archive, name, [content])
        for key, record in pickler.records.items():
            pieces = _pieces(record, piece) if isinstance(record, LazyTensor) else [_bytes_of(record)]
            _put(archive, f"data/{key}", pieces)
        _put(archive, "version", [_VERSION])


def _is_own(value: Any) -> bool:
    return type(value).__module__.startswith("lightning_pardist.")


def _unpicklable(state: Any, key: str = "") -> str | None:
    """Return the key of a value in nested dicts that cannot be pickled; None if there is none."""
    if not isinstance(state, Mapping):
        return None
    for name, value in state.items():
        try:
            _Pickler(io.BytesIO()).dump(value)
        except Exception:
            below = f"{key}[{name!r}]" if key else str(name)
            return _unpicklable(value, below) or below
    return None


def _pieces(tensor: LazyTensor, buffer: Tensor) -> Iterator[memoryview]:
    numel = torch.Size(tensor.shape).numel()
    step = buffer.numel() // tensor.dtype.itemsize
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        held = buffer[: (stop - start) * tensor.dtype.itemsize]
        tensor.read(start, stop, held.view(tensor.dtype))
        yield held.numpy().data


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    view: memoryview = torch.empty(0, dtype=torch.uint8).set_(storage.cpu()).numpy().data
    return view


def _put(archive: zipfile.ZipFile, name: str, pieces: Iterable[Any]) -> None:
    """Add a record whose content begins at a multiple of torch's alignment, for memory mapping."""
    # torch names the folder inside the archive after the file if it is known, and reads any name.
    record = zipfile.ZipInfo(f"archive/{name}")
    stream: Any = archive.fp
    begin = stream.tell() + _HEADER_BYTES + len(record.filename) + _PADDING_HEADER.size
    record.extra = _padding(-begin % serialization.alignment())
    with archive.open(record, "w", force_zip64=True) as target:
        for piece in pieces:
            target.write(piece)
    record.extra = b""


def _padding(length: int) -> bytes:
    return _PADDING_HEADER.pack(b"FB", length) + b"Z" * length
