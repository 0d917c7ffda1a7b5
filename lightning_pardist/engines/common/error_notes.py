"""Notes on exceptions of the user's code, which tracebacks show below the message."""

from __future__ import annotations


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception. Python 3.10 has no notes, so nothing is added there."""
    getattr(error, "add_note", str)(note)
