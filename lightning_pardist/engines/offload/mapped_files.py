"""Memory-mapped tensors in an unnamed file."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import tempfile
from bisect import bisect_right
from pathlib import Path

import torch
from torch import Tensor

_PAGE = mmap.PAGESIZE
_MADV_WILLNEED, _MADV_DONTNEED = 3, 4
#: Tensors with fewer bytes stay in memory, as a mapping takes whole pages.
SMALLEST_BYTES = 8 * _PAGE


def require_folder(folder: str | os.PathLike[str]) -> Path:
    """Create a folder if necessary, and check that files can be created in it. Not collective.

    Raises:
        ValueError: If it does not exist and cannot be created, or is not writable.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(
            f"offload={str(folder)!r} cannot be written to: {error.strerror}. Name a folder on a local disk that this"
            " user may write to, or use offload='cpu'."
        ) from None
    return path


class StateFile:
    """Disk space for tensors, in one file per rank.

    The file is unnamed from the start, so the system frees it when this object and the last tensor in it are gone, or
    when the process ends in any way. Its blocks are allocated before they are mapped: a full disk raises an error here
    rather than a fault in the middle of a step.

    A tensor in the file is used like any other. Pages that are read or written become resident; :meth:`evict` releases
    them to the system's file cache, which writes them out and drops them when it needs memory.

    Args:
        folder: Folder of the file; see :func:`require_folder`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115
        self._used = 0
        self._reserved = 0
        # Mappings are kept as long as the file, so that a reused address is not taken for one in the file.
        self._mapped: list[mmap.mmap] = []
        self._ranges: dict[int, int] = {}
        self._starts: list[int] = []

    def reserve(self, nbytes: int) -> None:
        """Allocate blocks for tensors of this many bytes in total, beyond what is in use. Not collective.

        Raises:
            RuntimeError: If the disk has no room for them.
        """
        missing = self._used + _pages(nbytes) - self._reserved
        if missing <= 0:
            return
        try:
            _allocate(self._file.fileno(), self._reserved, missing)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            free = shutil.disk_usage(self.folder).free
            raise RuntimeError(
                f"offload={str(self.folder)!r} has no room for this rank's optimizer state: {missing / 1e9:.2f} GB are"
                f" needed and {free / 1e9:.2f} GB are free ({error.strerror}). Free some, or name another folder."
            ) from None
        self._reserved += missing

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor of zeros in the file, or in memory if it is too small for a mapping.

        Raises:
            RuntimeError: If the disk has no room for it.
        """
        nbytes = numel * dtype.itemsize
        if nbytes < SMALLEST_BYTES:
            return torch.zeros(numel, dtype=dtype)
        self.reserve(nbytes)
        mapped = mmap.mmap(self._file.fileno(), nbytes, offset=self._used)
        self._used += _pages(nbytes)
        self._mapped.append(mapped)
        tensor = torch.frombuffer(mapped, dtype=dtype, count=numel)
        self._ranges[tensor.data_ptr()] = nbytes
        self._starts = sorted(self._ranges)
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor's memory is in the file."""
        return self._range_of(tensor) is not None

    def evict(self, tensor: Tensor) -> None:
        """Release a tensor's resident pages, if it is in the file. Its values are kept."""
        self._advise(tensor, _MADV_DONTNEED)

    def prefetch(self, tensor: Tensor) -> None:
        """Start to read a tensor's pages, if it is in the file."""
        self._advise(tensor, _MADV_WILLNEED)

    def _range_of(self, tensor: Tensor) -> tuple[int, int] | None:
        if tensor.device.type != "cpu" or not self._starts:
            return None
        begin = tensor.data_ptr()
        index = bisect_right(self._starts, begin) - 1
        if index < 0:
            return None
        start = self._starts[index]
        end = begin + tensor.numel() * tensor.element_size()
        return (begin, end) if end <= start + self._ranges[start] else None

    def _advise(self, tensor: Tensor, advice: int) -> None:
        found = self._range_of(tensor)
        if found is None:
            return
        # A neighbouring tensor on the first or last page is read again when it is used.
        begin = found[0] // _PAGE * _PAGE
        _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(found[1] - begin), advice)


def _pages(nbytes: int) -> int:
    """Round up to the granularity at which a mapping may start."""
    return -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def _allocate(descriptor: int, start: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, start, nbytes)
        return
    block = bytes(1 << 20)
    for offset in range(start, start + nbytes, len(block)):
        os.pwrite(descriptor, block[: start + nbytes - offset], offset)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
