"""Settings of optimizer offload."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Offload:
    """Settings for optimizer state and steps on the host.

    Attributes:
        folder: Local folder for files with the state; in host memory if None.
        window_mb: With a folder, size of the state that is resident at a time, in MiB.
    """

    folder: str | None = None
    window_mb: float = 64.0
