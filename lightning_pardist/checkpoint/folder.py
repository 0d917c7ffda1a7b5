"""Sharded checkpoint: a folder that all ranks write in parallel.

torch's distributed checkpoint (DCP) can read the folder. Besides DCP's ``.metadata`` it contains the Trainer's state
(``meta.pt``) and a manifest with checksums, from which this package reads tensors without unpickling. It is written
under a hidden name and renamed after every rank has flushed its file and reported it.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
import socket
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, cast

import torch
from fsspec.core import url_to_fs
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_pardist.checkpoint.atomic import (
    discard,
    local_path,
    remove_abandoned,
    replace_folder,
    sync_folder,
    temporary_name,
)
from lightning_pardist.checkpoint.chunks import Chunk, Shards, overlap, within
from lightning_pardist.checkpoint.coordination import Coordinator, together
from lightning_pardist.checkpoint.full_file import load_file
from lightning_pardist.checkpoint.manifest import (
    MANIFEST,
    TRAINER_STATE,
    Manifest,
    StoredBox,
    StoredTensor,
)
from lightning_pardist.checkpoint.stream import write_archive
from lightning_pardist.compat.serialization import storage_info

_ALIGNMENT = 64


@dataclass(frozen=True)
class Listed:
    """A rank's metadata of a tensor, sent to the first rank: everything but the values.

    Attributes:
        shape: Global shape.
        dtype: Dtype of all parts.
        boxes: Offsets and sizes of the rank's parts.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    @classmethod
    def of(cls, held: Shards) -> Listed:
        """Return the metadata of a rank's shards."""
        return cls(held.shape, held.dtype, tuple((part.offsets, part.sizes) for part in held.parts))


@dataclass(frozen=True)
class _Written:
    """A rank's report to the first rank after its file is on disk."""

    file: str | None
    size: int
    checksum: int
    boxes: list[tuple[str, StoredBox, int, int]]
    host: str


class FolderSave:
    """One sharded save: call :meth:`plan`, then for an asynchronous save :meth:`stage`, then :meth:`write`.

    Args:
        tensors: This rank's shards by key. Keys may differ between ranks.
        aliases: Key -> key of the tensor it is tied to, on this rank.
        path: Path of the folder: a local path or URL.
        about: Origin of the checkpoint for the manifest; the first rank's is used.
    """

    def __init__(
        self,
        tensors: Mapping[str, Shards],
        path: str | os.PathLike[str],
        *,
        aliases: Mapping[str, str] | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self.about = dict(about or {})
        self._tensors = dict(tensors)
        self._aliases = dict(aliases or {})
        self._listed: dict[str, Listed] = {}
        self._work: list[tuple[str, Chunk]] = []
        self._folder = ""

    def plan(self, exchange: Coordinator) -> None:
        """Assign boxes to ranks: every box is written once, with bytes balanced over ranks. Collective.

        Raises:
            RuntimeError: If the ranks' shards do not cover a tensor, or the folder cannot be created.
        """
        listing = {key: Listed.of(held) for key, held in self._tensors.items()}
        everything = exchange.gather((listing, self._aliases))

        def decide() -> tuple[str, list[list[tuple[str, int]]]]:
            for _, aliases in everything:
                self._aliases.update(aliases)
            listings = [listed for listed, _ in everything]
            self._listed = {key: entry for listed in reversed(listings) for key, entry in listed.items()}
            self._listed = {key: self._listed[key] for key in sorted(self._listed) if key not in self._aliases}
            shares = divide(listings, self._listed)
            return _make_folder(self.path), shares

        decided = together(exchange, f"Saving {self.path}", lambda: decide() if exchange.rank == 0 else ("", []))
        self._folder, shares = exchange.broadcast(decided)
        self._work = [(key, self._tensors[key].parts[index]) for key, index in shares[exchange.rank]]
        self._tensors = {}

    def stage(self) -> None:
        """Copy this rank's boxes to host memory, after which training may continue. Not collective."""
        self._work = [(key, replace(part, values=_on_host(part.values, copy=True))) for key, part in self._work]

    def write(self, exchange: Coordinator, trainer_state: Any) -> None:
        """Write and flush this rank's file, then rename the folder. Collective over the exchange.

        Args:
            exchange: Coordinator of the participating ranks.
            trainer_state: Object that ``torch.save`` writes next to the tensors; the first rank's is used.

        Raises:
            OSError: On the rank whose filesystem failed; the previous content of the path is unchanged.
            RuntimeError: On the other ranks; and if the first rank does not see the others' files.
        """
        try:
            written = together(exchange, f"Saving {self.path}", lambda: self._write_own(exchange.rank))
            reports = exchange.gather(written)

            def finish() -> None:
                if exchange.rank == 0:
                    self._commit(reports, trainer_state)

            together(exchange, f"Saving {self.path}", finish)
        except BaseException:
            if exchange.rank == 0 and local_path(self.path) is not None:
                discard(self._folder)
            raise
        finally:
            self._work = []

    def _write_own(self, rank: int) -> _Written:
        host = socket.gethostname()
        if not self._work:
            return _Written(None, 0, 0, [], host)
        filesystem, folder = url_to_fs(self._folder)
        name = f"__{rank}_0.distcp"
        items: list[tuple[str, Chunk, int, int]] = []
        # The folder does not exist yet on a filesystem that is not shared with the first rank's node.
        filesystem.makedirs(folder, exist_ok=True)
        with filesystem.open(f"{folder}/{name}", "wb") as stream:
            counted = _Counted(stream)
            for key, part in self._work:
                counted.pad_to(_ALIGNMENT)
                begin = counted.position
                write_archive(_on_host(part.values), cast(IO[bytes], counted))
                items.append((key, part, begin, counted.position - begin))
            stream.flush()
            if local_path(self._folder) is not None:
                os.fsync(stream.fileno())
        with filesystem.open(f"{folder}/{name}", "rb") as stream:
            boxes = [
                (key, StoredBox(name, _values_start(stream, begin, length), part.offsets, part.sizes), begin, length)
                for key, part, begin, length in items
            ]
        return _Written(name, counted.position, counted.checksum, boxes, host)

    def _commit(self, reports: Sequence[_Written], trainer_state: Any) -> None:
        filesystem, folder = url_to_fs(self._folder)
        files: dict[str, tuple[int, int]] = {}
        for rank, report in enumerate(reports):
            if report.file is None:
                continue
            path = f"{folder}/{report.file}"
            if not filesystem.exists(path) or filesystem.size(path) != report.size:
                raise RuntimeError(
                    f"Rank 0 on {reports[0].host} does not find the complete file {report.file} that rank {rank} on"
                    f" {report.host} wrote for {self.path}: a sharded checkpoint needs a filesystem that all nodes"
                    ' share. Set dirpath (default_root_dir) to a shared filesystem, or use checkpoint="full".'
                )
            files[report.file] = (report.size, report.checksum)
        boxes: dict[str, list[StoredBox]] = {key: [] for key in self._listed}
        for report in reports:
            for key, box, _, _ in report.boxes:
                boxes[key].append(box)
        tensors = {
            key: StoredTensor(str(entry.dtype).removeprefix("torch."), entry.shape, tuple(boxes[key]))
            for key, entry in self._listed.items()
        }
        files[".metadata"] = self._put(".metadata", lambda stream: pickle.dump(self._dcp(reports), stream))
        files[TRAINER_STATE] = self._put(TRAINER_STATE, lambda stream: torch.save(trainer_state, stream))
        manifest = Manifest(tensors, files, self._aliases, self.about)
        # Written last: without it the folder is no checkpoint, which matters on filesystems without atomic renames.
        self._put(MANIFEST, lambda stream: stream.write(manifest.to_bytes()))
        if (goal := local_path(self.path)) is not None:
            sync_folder(self._folder)
            replace_folder(self._folder, goal)
            sync_folder(os.path.dirname(goal) or ".")

    def _put(self, name: str, write: Any) -> tuple[int, int]:
        filesystem, folder = url_to_fs(self._folder)
        with filesystem.open(f"{folder}/{name}", "wb") as stream:
            counted = _Counted(stream)
            write(counted)
            stream.flush()
            if local_path(self._folder) is not None:
                os.fsync(stream.fileno())
        return counted.position, counted.checksum

    def _dcp(self, reports: Sequence[_Written]) -> Metadata:
        chunks: dict[str, list[ChunkStorageMetadata]] = {key: [] for key in self._listed}
        storage: dict[MetadataIndex, Any] = {}
        for report in reports:
            for key, box, begin, length in report.boxes:
                index = len(chunks[key])
                chunks[key].append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
                storage[MetadataIndex(key, box.offsets, index)] = storage_info(box.file, begin, length)
        return Metadata(
            state_dict_metadata={
                key: TensorStorageMetadata(TensorProperties(entry.dtype), torch.Size(entry.shape), chunks[key])
                for key, entry in self._listed.items()
            },
            planner_data={key: (key,) for key in self._listed},
            storage_data=storage,
        )


class FolderReader:
    """Reader of a checkpoint folder's tensors; local files are memory-mapped.

    Args:
        folder: Local path or URL.

    Raises:
        FileNotFoundError: If it is not a complete checkpoint folder.
        DamagedCheckpointError: If its manifest is damaged; see :func:`~.manifest.verify_files` for the rest.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = os.fspath(folder)
        self.manifest = Manifest.read(folder)
        self._mapped: dict[str, mmap.mmap] = {}

    def __contains__(self, key: str) -> bool:
        return key in self.manifest.tensors or key in self.manifest.aliases

    def describe(self, key: str) -> StoredTensor:
        """Return shape, dtype and boxes of a tensor.

        Raises:
            KeyError: If the folder has no tensor with this key.
        """
        return self.manifest.tensors[self.manifest.aliases.get(key, key)]

    def read_into(self, key: str, shards: Shards) -> None:
        """Fill local shards of a tensor in place, converting dtypes. Not collective.

        Raises:
            ValueError: If the shapes differ.
        """
        stored = self.describe(key)
        if stored.shape != tuple(shards.shape):
            raise ValueError(
                f"{key} has shape {tuple(shards.shape)} here and {stored.shape} in the checkpoint {self.path}."
            )
        with torch.no_grad():
            for part in shards.parts:
                for box in stored.boxes:
                    common = overlap(part.offsets, part.sizes, box.offsets, box.sizes)
                    if common is not None:
                        source = Chunk(box.offsets, self._values(stored, box))
                        within(part, *common).copy_(within(source, *common))

    def read(self, key: str) -> Tensor:
        """Return a full tensor: mapped if the folder stores it in one box, assembled otherwise."""
        stored = self.describe(key)
        if len(stored.boxes) == 1 and stored.boxes[0].sizes == stored.shape:
            return self._values(stored, stored.boxes[0])
        whole = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        self.read_into(key, Shards(stored.shape, whole.dtype, (Chunk((0,) * whole.dim(), whole),)))
        return whole

    def trainer_state(self, *, weights_only: bool | None = None) -> Any:
        """Load the Trainer's state that was saved next to the tensors.

        Raises:
            pickle.UnpicklingError: If it holds objects that need code to load.
        """
        return load_file(f"{self.path.rstrip('/')}/{TRAINER_STATE}", weights_only=weights_only)

    def _values(self, stored: StoredTensor, box: StoredBox) -> Tensor:
        dtype = getattr(torch, stored.dtype)
        numel = math.prod(box.sizes)
        if numel == 0:
            return torch.empty(box.sizes, dtype=dtype)
        folder = local_path(self.path)
        if folder is None:
            filesystem, plain = url_to_fs(self.path)
            end = box.start + numel * dtype.itemsize
            fetched = bytearray(filesystem.cat_file(f"{plain.rstrip('/')}/{box.file}", box.start, end))
            return torch.frombuffer(fetched, dtype=dtype).view(box.sizes)
        if box.file not in self._mapped:
            with open(os.path.join(folder, box.file), "rb") as stream:
                self._mapped[box.file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        content = self._mapped[box.file]
        return torch.frombuffer(content, dtype=dtype, count=numel, offset=box.start).view(box.sizes)


class _Counted:
    """Writable file wrapper that tracks position and checksum."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.position = 0
        self.checksum = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._stream.write(view)
        self.checksum = zlib.crc32(view, self.checksum)
        self.position += len(view)
        return len(view)

    def flush(self) -> None:
        self._stream.flush()

    def pad_to(self, alignment: int) -> None:
        self.write(bytes(-self.position % alignment))


class _Section(io.RawIOBase):
    """Read-only view of a section of a file."""

    def __init__(self, stream: IO[bytes], begin: int, length: int) -> None:
        self._stream = stream
        self._begin = begin
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("seek before the section's first byte")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._length - self._at))
        self._stream.seek(self._begin + self._at)
        content = self._stream.read(wanted)
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def _make_folder(path: str) -> str:
    goal = local_path(path)
    if goal is None:
        filesystem, plain = url_to_fs(path)
        if filesystem.exists(plain):
            # Not atomic: the old checkpoint is invalid once its first file is removed.
            filesystem.rm(plain, recursive=True)
        filesystem.makedirs(plain, exist_ok=True)
        return path
    folder = os.path.dirname(goal) or "."
    os.makedirs(folder, exist_ok=True)
    remove_abandoned(folder)
    temporary = temporary_name(goal)
    os.mkdir(temporary)
    return temporary


def divide(
    listings: Sequence[Mapping[str, Listed]], wanted: Mapping[str, Listed], *, first_if_it_can: bool = False
) -> list[list[tuple[str, int]]]:
    """Assign each box to one of the ranks that hold it, the least loaded first.

    Args:
        listings: Metadata of each rank's shards, by key.
        wanted: The tensors to assign, in this order.
        first_if_it_can: Whether the first rank is assigned every box that it holds.

    Returns:
        For each rank, keys and indices of parts, keys in the order of ``wanted``.

    Raises:
        ValueError: If the boxes of a tensor do not cover it.
    """
    load: list[float] = [0.0] * len(listings)
    if first_if_it_can:
        load[0] = -math.inf
    shares: list[list[tuple[str, int]]] = [[] for _ in listings]
    for key, entry in wanted.items():
        holders: dict[Any, list[tuple[int, int]]] = {}
        for rank, listed in enumerate(listings):
            for index, box in enumerate(listed[key].boxes if key in listed else ()):
                if math.prod(box[1]):
                    holders.setdefault(box, []).append((rank, index))
        found = sum(math.prod(sizes) for _, sizes in holders)
        if found != math.prod(entry.shape):
            raise ValueError(
                f"The ranks' shards of {key} have {found} elements in total, but the tensor has"
                f" {math.prod(entry.shape)}, so it cannot be saved."
            )
        for (_, sizes), candidates in holders.items():
            rank, index = min(candidates, key=lambda candidate: load[candidate[0]])
            load[rank] += math.prod(sizes) * entry.dtype.itemsize
            shares[rank].append((key, index))
    return shares


def _on_host(values: Tensor, *, copy: bool = False) -> Tensor:
    """Return row-major values in host memory, in a storage of exactly their size."""
    host = values.detach().to("cpu", copy=copy).contiguous()
    if host.untyped_storage().nbytes() != host.numel() * host.element_size():
        host = host.clone(memory_format=torch.contiguous_format)
    return host


def _values_start(stream: IO[bytes], begin: int, length: int) -> int:
    """Return the byte offset in a file of a tensor's values inside its embedded archive."""
    with zipfile.ZipFile(_Section(stream, begin, length)) as archive:
        record = next(info for info in archive.infolist() if info.filename.endswith("/data/0"))
    stream.seek(begin + record.header_offset + 26)
    name_length, extra_length = struct.unpack("<HH", stream.read(4))
    return int(begin + record.header_offset + 30 + name_length + extra_length)
