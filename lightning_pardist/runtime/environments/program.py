"""Identifies the running command."""

from __future__ import annotations

import hashlib
import sys


def program_key() -> str:
    """A short name for this script and its arguments, equal when the same command runs again."""
    return hashlib.sha256("\0".join(sys.argv).encode()).hexdigest()[:12]
