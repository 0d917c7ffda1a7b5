"""Manifest of a checkpoint folder: tensors, files, checksums and origin."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from lightning_pardist.checkpoint.errors import DamagedCheckpointError

MANIFEST = "manifest.json"
TRAINER_STATE = "meta.pt"
_FORMAT = "lightning_pardist.sharded"
_VERSION = 1


@dataclass(frozen=True)
class StoredBox:
    """One box of a tensor in a file.

    Attributes:
        file: Name of the file in the folder.
        start: Byte offset of its values, which are row-major and contiguous.
        offsets: Start of the box in the global tensor.
        sizes: Shape of the box.
    """

    file: str
    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """One global tensor in a checkpoint folder.

    Attributes:
        dtype: Name of the dtype, such as ``"float32"``.
        shape: Global shape.
        boxes: Disjoint boxes that cover the tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True)
class Manifest:
    """Manifest of a checkpoint folder.

    Attributes:
        tensors: Tensors by key: ``model.NAME`` for the module's state, ``optimizer_I.state.NAME.KEY`` for optimizers'.
            In ``KEY`` dots and percent signs are escaped as in URLs, and ``%=`` precedes what is not a string.
        files: Name -> (bytes, CRC-32) of every other file.
        aliases: Key -> key of the tensor it is tied to.
        about: Strategy, degrees, world size, step, epoch and versions.
    """

    tensors: dict[str, StoredTensor]
    files: dict[str, tuple[int, int]]
    aliases: dict[str, str] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the manifest as stored in the folder, including its own checksum."""
        content = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        body = json.dumps(content, separators=(",", ":"))
        return json.dumps({"crc32": zlib.crc32(body.encode()), "content": content}, separators=(",", ":")).encode()

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Manifest:
        """Read and check a folder's manifest. Not collective.

        Args:
            folder: Local path or URL.

        Raises:
            FileNotFoundError: If the folder has no manifest: it is no checkpoint of this package, or an incomplete one.
            DamagedCheckpointError: If the manifest does not match its checksum.
            ValueError: If a later version of this package wrote it.
        """
        filesystem, plain = url_to_fs(os.fspath(folder))
        path = f"{plain.rstrip('/')}/{MANIFEST}"
        if not filesystem.exists(path):
            raise FileNotFoundError(
                f"{os.fspath(folder)} is not a complete checkpoint folder: it has no {MANIFEST}."
                ' Use a folder that checkpoint="sharded" saved, or a .ckpt file.'
            )
        try:
            with filesystem.open(path, "rb") as stream:
                outer = json.loads(stream.read())
            content = outer["content"]
            body = json.dumps(content, separators=(",", ":"))
            intact = zlib.crc32(body.encode()) == outer["crc32"]
        except (ValueError, KeyError, TypeError):
            intact = False
        if not intact:
            raise DamagedCheckpointError(
                f"The checkpoint {os.fspath(folder)} is damaged: {MANIFEST} does not match its checksum."
                " Resume from another one, or copy it again."
            )
        if content["format"] != _FORMAT or content["version"] > _VERSION:
            raise ValueError(
                f"{path} has format {content['format']} version {content['version']}, but this version of"
                f" lightning_pardist reads {_FORMAT} up to version {_VERSION}. Install the version of"
                " lightning_pardist that wrote it."
            )
        return cls(
            tensors={key: _tensor(value) for key, value in content["tensors"].items()},
            files={name: (size, checksum) for name, (size, checksum) in content["files"].items()},
            aliases=content["aliases"],
            about=content["about"],
        )


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a local path or URL is a folder, complete or not."""
    filesystem, plain = url_to_fs(os.fspath(path))
    return bool(filesystem.isdir(plain))


def verify_files(folder: str | os.PathLike[str], manifest: Manifest, *, share: int = 0, shares: int = 1) -> None:
    """Compare files with their checksums. Not collective; ranks may verify one share each.

    Args:
        folder: Local path or URL.
        manifest: Manifest of the folder.
        share: Index of the share of files to verify.
        shares: Number of shares.

    Raises:
        DamagedCheckpointError: Naming the first file that is missing, truncated or altered.
    """
    filesystem, plain = url_to_fs(os.fspath(folder))
    for name in sorted(manifest.files)[share::shares]:
        size, expected = manifest.files[name]
        path = f"{plain.rstrip('/')}/{name}"
        if not filesystem.exists(path):
            raise _damaged(folder, name, "is missing")
        if (found := filesystem.size(path)) != size:
            raise _damaged(folder, name, f"has {found} of {size} bytes")
        checksum = 0
        with filesystem.open(path, "rb") as stream:
            while block := stream.read(2**22):
                checksum = zlib.crc32(block, checksum)
        if checksum != expected:
            raise _damaged(folder, name, "does not match its checksum")


def _damaged(folder: str | os.PathLike[str], name: str, reason: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"The checkpoint {os.fspath(folder)} is damaged: {Path(name).name} {reason}."
        " Resume from another one, or copy it again."
    )


def _tensor(value: dict[str, Any]) -> StoredTensor:
    boxes = (StoredBox(box["file"], box["start"], tuple(box["offsets"]), tuple(box["sizes"])) for box in value["boxes"])
    return StoredTensor(value["dtype"], tuple(value["shape"]), tuple(boxes))
