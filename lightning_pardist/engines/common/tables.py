"""Text tables for the log, with repeated blocks folded into one row and long cells wrapped."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Item = TypeVar("Item")

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$|\s)")
#: Maximum line length of a cell in a wrapped column.
_WIDTH = 60


def starred(text: str) -> str:
    """Replace block indices in names by a star: ``sum of h.3.mlp`` becomes ``sum of h.*.mlp``."""
    return _INDEX.sub("*", text)


def fold(
    items: Sequence[Item], name_of: Callable[[Item], str], like: Callable[[Item], Hashable]
) -> list[tuple[str, list[Item]]]:
    """Group the items of repeated blocks, such as tensors, under one name.

    Args:
        items: Items in the order of the module.
        name_of: Returns an item's name, such as ``h.3.mlp.weight``.
        like: Returns a key that must be equal within a group, in addition to the name without its indices.

    Returns:
        Names such as ``h.0-23.mlp.weight``, each with its items.
    """
    groups: dict[tuple[tuple[str, ...], Hashable], dict[tuple[int, ...], Item]] = {}
    for item in items:
        parts = name_of(item).split(".")
        indices = tuple(int(part) for part in parts if part.isdecimal())
        pattern = tuple("" if part.isdecimal() else part for part in parts)
        groups.setdefault((pattern, like(item)), {})[indices] = item
    rows = []
    for (pattern, _), group in groups.items():
        for sets in _products(list(group)):
            texts = iter(ranges(numbers) for numbers in sets)
            members = [item for indices, item in group.items() if all(map(_contains, sets, indices))]
            rows.append((".".join(part or next(texts) for part in pattern), members))
    return rows


def _contains(numbers: list[int], number: int) -> bool:
    return number in numbers


def _products(found: list[tuple[int, ...]]) -> list[list[list[int]]]:
    """Split index tuples into few products of sets: one product if possible, otherwise one or more per first index."""
    sets = [sorted(set(column)) for column in zip(*found, strict=True)]
    size = 1
    for each in sets:
        size *= len(each)
    if size == len(found):
        return [sets]
    rows = []
    for first in sets[0]:
        rows += [[[first], *rest] for rest in _products([indices[1:] for indices in found if indices[0] == first])]
    return rows


def ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers as ranges: ``0-3,5``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, wrap: Sequence[str] = ()) -> str:
    """Format a table, indented by two spaces, with a rule under the header.

    Args:
        head: Names of the columns.
        rows: Rows with one cell per column.
        wrap: Names of the columns whose long cells are wrapped between words.
    """
    lines: list[list[str]] = []
    for row in rows:
        cells = [
            textwrap.wrap(cell, _WIDTH, break_long_words=False, break_on_hyphens=False) if name in wrap else [cell]
            for name, cell in zip(head, row, strict=True)
        ]
        height = max(map(len, cells), default=0)
        lines += [[cell[line] if line < len(cell) else "" for cell in cells] for line in range(height)]
    widths = [max(len(row[column]) for row in (head, *lines)) for column in range(len(head))]
    rule = "-" * (sum(widths) + 2 * len(widths) - 2)
    texts = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *lines)
    ]
    return "\n".join(f"  {text}" for text in [texts[0], rule, *texts[1:]])
