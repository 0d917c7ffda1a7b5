"""Checkpoint errors."""

from __future__ import annotations


class DamagedCheckpointError(RuntimeError):
    """A checkpoint is truncated, altered or misses a part; the message names the file. Nothing was loaded from it."""


class NotACheckpointError(DamagedCheckpointError):
    """What was named as a checkpoint is something else, or damaged from its first byte."""
