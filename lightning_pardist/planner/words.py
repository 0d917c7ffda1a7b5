"""Numbers and errors in the words of a plan."""

from __future__ import annotations


def sentence(error: BaseException) -> str:
    """What an error says, in one line, without what follows its first paragraph."""
    return " ".join(str(error).partition("\n\n")[0].split()) or type(error).__name__


def size_text(size: float) -> str:
    """Bytes."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale / 10:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1e3:.1f} KB"


def change_text(size: float) -> str:
    """More or fewer bytes."""
    return f"{'+' if size >= 0 else '-'}{size_text(abs(size))}"


def time_text(seconds: float) -> str:
    """Seconds."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
