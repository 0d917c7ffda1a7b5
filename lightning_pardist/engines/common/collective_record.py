"""Record of an engine's latest collectives, which shows where ranks have diverged once they wait for each other."""

from __future__ import annotations

import json
import sys
import sysconfig
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from linecache import getline
from pathlib import Path

import torch

from lightning_pardist.compat.autograd import current_backward

#: A line of the user's code: file, number and function; only the last, "backward", in backward; empty if unknown.
Line = tuple[str, int, str]
#: A collective, and the line that needed it.
Entry = tuple[str, str, int, str]

#: Number of collectives that are remembered.
_REMEMBERED = 500
_NAMED_RANKS = 16
_BACKWARD = "backward"
_NONE: Entry = ("has issued no other", "", 0, "")
_TORCH, _PACKAGE = (str(Path(file).parent) for file in (torch.__file__, Path(__file__).parents[1]))
_STDLIB = sysconfig.get_paths()["stdlib"]
_LIGHTNING = ("/lightning/pytorch/", "/pytorch_lightning/")


class CollectiveRecord:
    """The latest collectives over a group, in the order in which this rank has issued them.

    Args:
        ranks: Global ranks of the group, all of which issue the same collectives as long as they do not diverge.
        describe: Returns what a rank does in a collective with this code, such as "gathers net.0".
    """

    def __init__(self, ranks: Sequence[int], describe: Callable[[int], str]) -> None:
        self._describe = describe
        self._entries: deque[tuple[int, int, str, int, str]] = deque(maxlen=_REMEMBERED)
        self._count = 0
        _records[tuple(ranks)] = self

    def add(self, code: int) -> None:
        """Record a collective that is about to be issued."""
        self._entries.append((self._count, code, *_user_line()))
        self._count += 1

    def entries(self) -> list[tuple[int, Entry]]:
        """Return the recorded collectives with their numbers. Another thread may call this."""
        entries = tuple(self._entries)
        return [
            (number, (self._describe(code), file, line, function)) for number, code, file, line, function in entries
        ]


#: The latest record of each group.
_records: weakref.WeakValueDictionary[tuple[int, ...], CollectiveRecord] = weakref.WeakValueDictionary()


def recorded() -> str:
    """Return this process's records by group as JSON, for :func:`first_difference` on another rank."""
    return json.dumps([(ranks, record.entries()) for ranks, record in _records.items()])


def first_difference(found: Mapping[int, str]) -> str:
    """Return a text on the first collective that differs between the ranks of a group; empty if none does.

    Args:
        found: What :func:`recorded` returned, by rank.
    """
    groups: dict[tuple[int, ...], dict[int, dict[int, Entry]]] = {}
    for rank, text in found.items():
        for ranks, entries in json.loads(text):
            groups.setdefault(tuple(ranks), {})[rank] = {number: tuple(entry) for number, entry in entries}
    return next((text for by_rank in groups.values() if (text := _difference_in(by_rank))), "")


def _difference_in(by_rank: Mapping[int, Mapping[int, Entry]]) -> str:
    # A rank remembers the latest; one without any has issued none.
    first = max(min(entries, default=0) for entries in by_rank.values())
    end = max(max(entries, default=-1) for entries in by_rank.values()) + 1
    for number in range(first, end):
        at: dict[tuple[str, bool], list[int]] = {}
        for rank, entries in sorted(by_rank.items()):
            what, *_, function = entries.get(number, _NONE)
            # Ranks may need the same parameters at different lines.
            at.setdefault((what, function == _BACKWARD), []).append(rank)
        if len(at) > 1:
            lines = (f"{named(ranks)} {_sentence(*by_rank[ranks[0]].get(number, _NONE))}" for ranks in at.values())
            return "\n".join(("Their collectives first differ here:", *lines))
    return ""


def named(ranks: Sequence[int]) -> str:
    """Return ranks as reports name them."""
    return f"Rank {', '.join(map(str, ranks[:_NAMED_RANKS]))}{', ...' if len(ranks) > _NAMED_RANKS else ''}"


def _sentence(what: str, file: str, line: int, function: str) -> str:
    if not file:
        return f"{what}, in {function}." if function else f"{what}."
    return f'{what}, for\n  File "{file}", line {line}, in {function}\n    {getline(file, line).strip()}'


def _user_line() -> Line:
    """Return the innermost line that is neither torch's nor this package's, if a step of the user's runs."""
    if current_backward() is not None:
        return "", 0, _BACKWARD
    frame = sys._getframe(2)
    while frame.f_back is not None and _is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    file = frame.f_code.co_filename
    if _is_internal(file) or any(part in file for part in _LIGHTNING):
        return "", 0, ""
    return file, frame.f_lineno, frame.f_code.co_name


@cache
def _is_internal(file: str) -> bool:
    standard = file.startswith((_STDLIB, "<frozen ")) and "site-packages" not in file
    return standard or file.startswith((_TORCH, _PACKAGE))
