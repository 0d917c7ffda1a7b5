"""Checkpoint plugin for single files: atomic writes, verified and memory-mapped reads."""

from __future__ import annotations

import os
from typing import Any

from fsspec.core import url_to_fs
from lightning.fabric.plugins import CheckpointIO
from typing_extensions import override

from lightning_pardist.checkpoint.atomic import discard, local_path
from lightning_pardist.checkpoint.full_file import load_file, save_file, verify_file
from lightning_pardist.compat.lightning_functions import PATH, load_from_url


class PardistCheckpointIO(CheckpointIO):
    """Default checkpoint plugin of the strategies, also usable with others; it writes Lightning's plain files.

    A file appears under its name only once it is completely on disk: if the process is killed at any time, or the disk
    is full, the previous file stays. Before anything is loaded from a file, every record is compared with its checksum.
    ``AsyncCheckpointIO`` may wrap it.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: PATH, storage_options: Any | None = None) -> None:
        """Write a checkpoint file. Called on the first rank.

        Args:
            checkpoint: Lightning's checkpoint dict.
            path: Local path, or URL with a protocol of fsspec.
            storage_options: Not supported.

        Raises:
            TypeError: If ``storage_options`` are given.
            OSError: From the filesystem; a previous file is left intact.
        """
        if storage_options is not None:
            raise TypeError(
                f"storage_options={storage_options!r} is not supported by {type(self).__name__}. Configure fsspec, or"
                " pass a CheckpointIO of your own that knows what to do with them."
            )
        save_file(checkpoint, path)

    @override
    def load_checkpoint(
        self, path: PATH, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Verify and read a checkpoint file.

        Args:
            path: Local path or URL.
            map_location: As in ``torch.load``; host memory if None.
            weights_only: As in ``torch.load``. By default no code from the file is run.

        Raises:
            FileNotFoundError: If the file does not exist.
            DamagedCheckpointError: If it is truncated or altered.
            pickle.UnpicklingError: If it holds objects that need code to be built; the message names the classes and
                two ways out.
        """
        self.verify(path)
        return self.read(path, map_location=map_location, weights_only=weights_only)

    def verify(self, path: PATH) -> None:
        """Compare a file with its checksums; a download is not checked here but when it is read.

        Raises:
            FileNotFoundError: If the file does not exist.
            DamagedCheckpointError: If it is truncated or altered.
        """
        if _is_download(path):
            return
        filesystem, plain = url_to_fs(os.fspath(path))
        if not filesystem.exists(plain):
            raise FileNotFoundError(f"Checkpoint file not found: {os.fspath(path)}")
        verify_file(path)

    def read(self, path: PATH, *, map_location: Any | None = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file that has passed :meth:`verify`."""
        content: dict[str, Any]
        if _is_download(path):
            content = load_from_url(path, map_location=map_location or "cpu", weights_only=weights_only)
        else:
            content = load_file(path, map_location=map_location or "cpu", weights_only=weights_only)
        return content

    @override
    def remove_checkpoint(self, path: PATH) -> None:
        """Remove a checkpoint file or folder, if it exists. Called on the first rank."""
        plain = local_path(path)
        if plain is not None:
            discard(plain)
            return
        filesystem, remote = url_to_fs(os.fspath(path))
        if filesystem.exists(remote):
            filesystem.rm(remote, recursive=True)


def _is_download(path: PATH) -> bool:
    return os.fspath(path).startswith(("http://", "https://"))
