"""What ``self.print`` of micro-batches comes to for the batch: the same text, its numbers put together."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?!\w)")
#: Takes the index of a number in a text, and the number of each micro-batch.
Combine = Callable[[int, list[float]], Any]


def printed(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call of ``print`` as text, which can travel to other ranks.

    Args:
        args: Its arguments.
        kwargs: Its ``sep`` and ``end``, and what else it was given.
    """
    text = str(kwargs.get("sep", " ")).join(map(str, args))
    return {"text": text, "end": kwargs.get("end"), "flush": bool(kwargs.get("flush", False))}


def merged_texts(calls: Sequence[dict[str, Any]], combine: Combine) -> list[dict[str, Any]]:
    """One call for those of all micro-batches; all of them where they say different things.

    Args:
        calls: Of the micro-batches.
        combine: Puts the numbers at one place together.
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
    """A number in the form of others."""
    if not isinstance(number, (int, float)) or all(float(each) == float(number) for each in column):
        return column[-1]
    last = column[-1]
    if "e" in last.lower():
        return f"{number:.{len(last.lower().split('e')[0].partition('.')[2])}e}"
    return f"{number:.{len(last.partition('.')[2])}f}"
