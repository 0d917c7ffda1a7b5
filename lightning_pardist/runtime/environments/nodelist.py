"""Parsing of SLURM's short forms for lists of hosts and of counts."""

from __future__ import annotations

import itertools
import re

_RANGES = re.compile(r"\[([^\]]*)\]")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_nodes(text: str) -> list[str]:
    """Return the hosts of a SLURM node list, in its order: ``n[1-3,7],gpu01`` gives n1, n2, n3, n7 and gpu01.

    Args:
        text: Names separated by commas or spaces. A name may hold any number of bracketed ranges, whose leading zeros
            are kept, and text after them.

    Raises:
        ValueError: If a bracket is not closed or a range is not numeric.
    """
    return [name for pattern in _split(text) for name in _expand(pattern, text)]


def expand_counts(text: str) -> list[int]:
    """Return the counts of ``SLURM_TASKS_PER_NODE``, one per node: ``3(x2),1`` gives 3, 3, 1.

    Raises:
        ValueError: If ``text`` is not of this form.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a list of counts such as '3(x2),1'.")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts


def _split(text: str) -> list[str]:
    """Split at the commas and spaces outside brackets."""
    names, name, depth = [], "", 0
    for char in text:
        depth += (char == "[") - (char == "]")
        if depth == 0 and char in ", \t\n":
            names.append(name)
            name = ""
        else:
            name += char
    if depth:
        raise ValueError(f"The node list {text!r} has a bracket without its partner.")
    return [name for name in [*names, name] if name]


def _expand(pattern: str, text: str) -> list[str]:
    pieces = _RANGES.split(pattern)
    choices = [[piece] if index % 2 == 0 else _numbers(piece, text) for index, piece in enumerate(pieces)]
    return ["".join(parts) for parts in itertools.product(*choices)]


def _numbers(ranges: str, text: str) -> list[str]:
    found: list[str] = []
    for item in ranges.split(","):
        first, dash, last = (part.strip() for part in item.partition("-"))
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"The node list {text!r} has {item!r} in brackets, which is not a range of numbers.")
        found.extend(str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1))
    return found
