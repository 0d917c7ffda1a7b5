"""What may be wrong with a checkpoint."""

from __future__ import annotations


class DamagedCheckpointError(RuntimeError):
    """A checkpoint is truncated, altered or misses a part; the message names the file. Nothing was loaded from it."""
