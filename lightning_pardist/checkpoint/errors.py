"""Checkpoint errors."""

from __future__ import annotations


class DamagedCheckpointError(RuntimeError):
    """A checkpoint is truncated, altered or incomplete. The message names the file; nothing was loaded from it."""


class NotACheckpointError(DamagedCheckpointError):
    """A file is not a checkpoint, or is damaged from its first byte."""
