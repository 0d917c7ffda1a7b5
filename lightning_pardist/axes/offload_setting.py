"""The ``offload`` arguments of strategies that shard optimizer state."""

from __future__ import annotations

import os

import lightning.pytorch as pl

from lightning_pardist.engines.offload import Offload, require_folder
from lightning_pardist.settings import positive


class OffloadSetting:
    """Where optimizer state is kept: device, host memory or files.

    Args:
        offload: ``"cpu"``, ``"disk"`` (files in the Trainer's ``default_root_dir``), the path of a folder, or None.
        offload_window_mb: With files, the size of the state resident in memory at a time, in MiB.

    Raises:
        ValueError: If the window is not positive, or the folder is not a path.
    """

    def __init__(self, offload: str | os.PathLike[str] | None, offload_window_mb: float) -> None:
        if offload is not None and not (isinstance(offload, str | os.PathLike) and os.fspath(offload)):
            raise ValueError(f"offload={offload!r} is unknown. Use 'cpu', 'disk', the path of a folder or None.")
        self.offload = offload
        self.window_mb = positive("offload_window_mb", offload_window_mb, "64 is a good start.")
        self._folder: str | None = None

    @property
    def resident_bytes(self) -> int | None:
        """Bytes resident at a time, see :attr:`~lightning_pardist.axes.base.ParallelAxis.resident_state_bytes`."""
        return None if self.offload in (None, "cpu") else int(self.window_mb * 2**20)

    def check(self, trainer: pl.Trainer, *, is_plan: bool = False) -> None:
        """Resolve the folder and check that files can be created in it. Not collective.

        Args:
            trainer: The Trainer, whose ``default_root_dir`` is the folder for ``"disk"``.
            is_plan: Whether this is a plan, which writes nothing and keeps the state in host memory.

        Raises:
            ValueError: If files cannot be created in the folder.
        """
        if self.offload not in (None, "cpu") and not is_plan:
            folder = trainer.default_root_dir if self.offload == "disk" else self.offload
            self._folder = str(require_folder(folder))

    @property
    def settings(self) -> Offload | None:
        """Settings for the engine; valid after :meth:`check`. None without offloading."""
        return None if self.offload is None else Offload(self._folder, self.window_mb)
