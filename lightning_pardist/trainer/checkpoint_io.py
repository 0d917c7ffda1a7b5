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
    """The strategies' default, usable under any other; the files are Lightning's plain ones.

    A file appears under its name when it is on disk and whole: a process killed at any moment, or a full disk, leaves
    the one that was there. Before anything is loaded from a file, every record is compared with its checksum.
    ``AsyncCheckpointIO`` may wrap it.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: PATH, storage_options: Any | None = None) -> None:
        """Write a file. Called on the first rank.

        Args:
            checkpoint: As Lightning makes it.
            path: Local path, or URL that fsspec knows.
            storage_options: Not taken.

        Raises:
            TypeError: If ``storage_options`` are given.
            OSError: From the filesystem; what was there before is intact.
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
        """Check and read a file.

        Args:
            path: Local path or URL.
            map_location: As ``torch.load`` takes it; host memory if None.
            weights_only: As ``torch.load`` takes it. By default no code from the file is run.

        Raises:
            FileNotFoundError: If there is none.
            DamagedCheckpointError: If it is truncated or altered.
            pickle.UnpicklingError: If it holds objects that take code to build, with the classes and two ways out.
        """
        self.verify(path)
        return self.read(path, map_location=map_location, weights_only=weights_only)

    def verify(self, path: PATH) -> None:
        """Compare a file with its checksums; a download is checked when it is read.

        Raises:
            FileNotFoundError: If there is none.
            DamagedCheckpointError: If it is truncated or altered.
        """
        if _is_download(path):
            return
        filesystem, plain = url_to_fs(os.fspath(path))
        if not filesystem.exists(plain):
            raise FileNotFoundError(f"Checkpoint file not found: {os.fspath(path)}")
        verify_file(path)

    def read(self, path: PATH, *, map_location: Any | None = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file that :meth:`verify` has passed."""
        content: dict[str, Any]
        if _is_download(path):
            content = load_from_url(path, map_location=map_location or "cpu", weights_only=weights_only)
        else:
            content = load_file(path, map_location=map_location or "cpu", weights_only=weights_only)
        return content

    @override
    def remove_checkpoint(self, path: PATH) -> None:
        """Remove a file or a folder, if it is there. Called on the first rank."""
        plain = local_path(path)
        if plain is not None:
            discard(plain)
            return
        filesystem, remote = url_to_fs(os.fspath(path))
        if filesystem.exists(remote):
            filesystem.rm(remote, recursive=True)


def _is_download(path: PATH) -> bool:
    return os.fspath(path).startswith(("http://", "https://"))
