"""Supported and tested versions of torch and Lightning, and the check of the installed ones."""

from __future__ import annotations

import functools
import importlib.metadata
import re

#: The oldest version that works, and the newest that the tests were run on.
TORCH = ("2.11", "2.15")
LIGHTNING = ("2.6", "2.6")

_Version = tuple[int, ...]


def parse(version: str) -> _Version:
    """Return ``2.15.0+cu132`` as ``(2, 15, 0)``."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in numbers.group().split(".")) if numbers else ()


@functools.cache
def installed(package: str) -> _Version:
    """Return the version of an installed distribution; empty if it is not installed."""
    try:
        return parse(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return ()


def require_supported() -> None:
    """Check that torch and Lightning are not too old, before anything of theirs is used.

    Raises:
        ImportError: If one is, with the installed version and the oldest supported one.
    """
    for package, (oldest, _) in (("torch", TORCH), ("lightning", LIGHTNING)):
        found = installed(package)
        if found and found < parse(oldest):
            raise ImportError(
                f"lightning_pardist needs {package} {oldest} or newer, and {text(found)} is installed:"
                f" pip install --upgrade {package}."
            )


def text(version: _Version) -> str:
    """Return ``(2, 15, 0)`` as ``2.15.0``."""
    return ".".join(map(str, version))
