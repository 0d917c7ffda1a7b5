"""Write the contents of containers back after a trial run of a step."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any


def refill(container: Any, contents: Any) -> None:
    """Give a dict, set, list or deque the contents of another one, unless it holds the same objects.

    A container that refuses changes (a frozen dict) has not been changed and is not written to.
    """
    if isinstance(container, dict):
        if tuple(container) != tuple(contents) or not same_items(list(container.values()), list(contents.values())):
            container.clear()
            container.update(contents)
    elif isinstance(container, set):
        if container != contents:
            container.clear()
            container.update(contents)
    elif not same_items(container, contents):
        container.clear()
        container.extend(contents)


def same_items(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Return whether two sequences hold the same objects in the same order."""
    return len(first) == len(second) and all(map(operator.is_, first, second))
