"""Text of a failure: the message for an error that this package raises, the traceback for any other."""

from __future__ import annotations

import linecache
import platform
import traceback
from importlib import metadata
from pathlib import Path

from lightning_pardist.runtime.environments.launched import wants_full_tracebacks

_PACKAGE = str(Path(__file__).parents[1]) + "/"


def format_failure(exception: BaseException) -> str:
    """Return the text that describes an exception.

    For a ``ValueError`` or ``RuntimeError`` raised by a ``raise`` statement of this package, it is the message and what
    a bug report needs. ``PARDIST_TRACEBACK=full`` shows the traceback with the chain of causes, as for all other
    exceptions.
    """
    place = None if wants_full_tracebacks() else _refused_at(exception)
    if place is None:
        return "".join(traceback.format_exception(exception))
    sentence = "".join(traceback.format_exception_only(exception)).rstrip()
    versions = ", ".join(f"{name} {_version(name)}" for name in ("lightning_pardist", "torch", "lightning"))
    return (
        f"{sentence}\n\nTo report a bug: raised at {place}; {versions}, Python {platform.python_version()}."
        " PARDIST_TRACEBACK=full shows every rank's traceback.\n"
    )


def is_refusal(exception: BaseException) -> bool:
    """Return whether :func:`format_failure` shows only the message of an exception."""
    return not wants_full_tracebacks() and _refused_at(exception) is not None


def _refused_at(exception: BaseException) -> str | None:
    if not isinstance(exception, (ValueError, RuntimeError)):
        return None
    frames = traceback.extract_tb(exception.__traceback__)
    if not frames or not frames[-1].filename.startswith(_PACKAGE):
        return None
    line = linecache.getline(frames[-1].filename, frames[-1].lineno or 0)
    # Any other line has failed itself, rather than raised an error on purpose.
    if not line.lstrip().startswith("raise "):
        return None
    return f"{frames[-1].filename.removeprefix(_PACKAGE)}:{frames[-1].lineno}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"
