"""Where optimizer state lives, as users say it."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Offload:
    """Optimizer state and step on the host.

    Attributes:
        folder: A local folder for files with the state; in host memory if None.
        window_mb: With a folder, state that is resident at a time, in MiB.
    """

    folder: str | None = None
    window_mb: float = 64.0

    @classmethod
    def of(cls, offload: str | os.PathLike[str] | None, window_mb: float) -> Offload | None:
        """From a strategy's arguments.

        Raises:
            ValueError: If the window is not positive, or the folder is no path.
        """
        if window_mb <= 0:
            raise ValueError(f"offload_window_mb={window_mb} is not positive. 64 is a good start.")
        if offload is None:
            return None
        if not isinstance(offload, str | os.PathLike) or not str(offload):
            raise ValueError(f"offload={offload!r} is unknown. Use 'cpu', the path of a folder, or None.")
        return cls(None if offload == "cpu" else os.fspath(offload), window_mb)
