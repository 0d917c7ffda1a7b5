"""Combination of micro-batches' ``self.print`` calls to those of the batch: the same text with combined numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?!\w)")
#: Takes the index of a number in a text and that number in each micro-batch's text; returns the batch's number.
Combine = Callable[[int, list[float]], Any]


def printed(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Convert a call of ``print`` to its text and options, which can be sent to other ranks.

    Args:
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call, such as ``sep`` and ``end``.
    """
    text = str(kwargs.get("sep", " ")).join(map(str, args))
    return {"text": text, "end": kwargs.get("end"), "flush": bool(kwargs.get("flush", False))}


def merged_texts(calls: Sequence[dict[str, Any]], combine: Combine) -> list[dict[str, Any]]:
    """Combine the calls of all micro-batches to one; keep each different call if texts differ in more than numbers.

    Args:
        calls: The calls of the micro-batches.
        combine: Combines the numbers at one index of the texts.
    """
    texts = [call["text"] for call in calls]
    if len(set(texts)) == 1 and not _NUMBER.search(texts[0]):
        return [calls[-1]]
    if len({_NUMBER.sub("#", text) for text in texts}) > 1:
        return list({call["text"]: call for call in calls}.values())
    columns = list(zip(*(_NUMBER.findall(text) for text in texts), strict=True))
    numbers = iter(
        [_like(column, combine(index, [float(number) for number in column])) for index, column in enumerate(columns)]
    )
    return [{**calls[-1], "text": _NUMBER.sub(lambda _: next(numbers), texts[-1])}]


def _like(column: Sequence[str], number: Any) -> str:
    """Format a number like the last one of a column."""
    if not isinstance(number, (int, float)) or all(float(each) == float(number) for each in column):
        return column[-1]
    last = column[-1]
    if "e" in last.lower():
        return f"{number:.{len(last.lower().split('e')[0].partition('.')[2])}e}"
    return f"{number:.{len(last.partition('.')[2])}f}"
