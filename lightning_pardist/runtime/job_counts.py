"""Numbers that the ranks of a job count alike, because they run the same program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_counts: Counter[str] = Counter()


def count_up(what: str) -> int:
    """How often this was called for ``what`` before: equal on all ranks."""
    _counts[what] += 1
    return _counts[what] - 1


@contextmanager
def counted_apart() -> Iterator[None]:
    """Inside, one rank alone does what ranks otherwise do together: its counts stand afterwards where they did."""
    before = _counts.copy()
    try:
        yield
    finally:
        _counts.clear()
        _counts.update(before)
