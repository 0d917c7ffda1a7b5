"""Where optimizer state lives."""

from __future__ import annotations

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
