"""Counters that are equal on all ranks of a job, because all ranks run the same program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_counts: Counter[str] = Counter()


def next_call_number(what: str) -> int:
    """Return how often this was called for ``what`` before: equal on all ranks."""
    _counts[what] += 1
    return _counts[what] - 1


@contextmanager
def preserve_call_numbers() -> Iterator[None]:
    """Return a context that restores the counters at its end, for work that one rank does alone."""
    before = _counts.copy()
    try:
        yield
    finally:
        _counts.clear()
        _counts.update(before)
