"""Formatting of numbers and errors in plans."""

from __future__ import annotations


def sentence(error: BaseException) -> str:
    """Return the first paragraph of an error's message as one line."""
    return " ".join(str(error).partition("\n\n")[0].split()) or type(error).__name__


def size_text(size: float) -> str:
    """Format a number of bytes."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale / 10:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1e3:.1f} KB"


def change_text(size: float) -> str:
    """Format a signed change in bytes."""
    return f"{'+' if size >= 0 else '-'}{size_text(abs(size))}"


def time_text(seconds: float) -> str:
    """Format a duration in seconds."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
