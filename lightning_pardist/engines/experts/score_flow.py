"""Follows scores through a step: whether they weigh what candidates for experts compute, or pick what they are given.

A score of as many as there are blocks in a stack may be of something else: of classes, or of positions. A router's is
known by where it goes. It is not computed from what the experts return, and it meets that in an operator that weighs or
places (a product, an indexed sum), or picks rows for each expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_pardist.compat import pytree

#: Functions by which a score weighs, picks or places something.
_WEIGHS = frozenset(
    ["mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__", "div", "__truediv__", "addcmul", "where", "lerp"]
    + ["matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "baddbmm", "addmm", "mv", "dot", "einsum", "tensordot"]
    + ["linear", "grouped_mm", "_grouped_mm", "grouped_mm_fallback", "__getitem__", "__setitem__", "gather"]
    + ["index_select", "index_add", "index_add_", "index_copy", "index_copy_", "index_put", "index_put_", "take"]
    + ["scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "masked_fill"]
    + ["masked_scatter", "masked_select", "take_along_dim", "embedding_bag"]
)


@dataclass(frozen=True)
class Score:
    """One score that was taken in a step.

    Attributes:
        place: Name of the module in whose forward.
        caller: Name of the module that called that one. When it returns, the score is of no interest any more.
        count: Of how many.
        after: Names of candidates from whose results it is computed.
        number: Of the score among all.
    """

    place: str
    caller: str | None
    count: int
    after: frozenset[str]
    number: int


@dataclass(frozen=True)
class _Mark:
    """What a tensor is computed from.

    Attributes:
        scores: These scores.
        made: Results, or stacked parameters, of these candidates.
    """

    scores: frozenset[Score] = frozenset()
    made: frozenset[str] = frozenset()

    def __or__(self, other: _Mark) -> _Mark:
        return _Mark(self.scores | other.scores, self.made | other.made)


class ScoreFlow:
    """What scores of a step have met.

    Args:
        counts: Of how many scores are of interest.

    Attributes:
        met: Names of candidates, each with a score that has weighed or picked what they compute.
    """

    def __init__(self, counts: set[int]) -> None:
        self.counts = counts
        self.met: set[tuple[str, Score]] = set()
        #: Of each list, the scores behind the inputs of its members' calls, and which tensors these were.
        self._given: dict[str, list[tuple[int, _Mark]]] = {}
        self._marks: Any = WeakIdKeyDictionary()
        self._owners: dict[int, str] = {}
        #: Of each candidate, the module in whose forward its results matter.
        self._homes: dict[str, str | None] = {}
        self._serials: Any = WeakIdKeyDictionary()
        self._next = self._numbers()

    @staticmethod
    def _numbers() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    def own(self, parameters: Sequence[nn.Parameter], name: str) -> None:
        """Parameters may be stacked experts of the module of this name."""
        self._owners.update((id(parameter), name) for parameter in parameters)
        self._homes[name] = None

    def _mark(self, tensor: Tensor) -> _Mark:
        owner = self._owners.get(id(tensor))
        mark: _Mark = self._marks.get(tensor, _NONE)
        return mark if owner is None else mark | _Mark(made=frozenset([owner]))

    def _put(self, tensor: Tensor, mark: _Mark) -> None:
        if mark != _NONE and not isinstance(tensor, nn.Parameter):
            self._marks[tensor] = mark

    def called(
        self, name: str, tensors: Sequence[Tensor], result: Any, *, place: tuple[str, str | None] | None, scores: bool
    ) -> Any:
        """A function was called.

        Args:
            name: Of the function.
            tensors: That it was given.
            result: What it returned.
            place: Name of the module in whose forward, and of its caller; None outside of all.
            scores: Whether the function takes scores, along the last dim of its first tensor.

        Returns:
            The result; an iterator over tensors as another one over the same.
        """
        marks = [mark for mark in map(self._mark, tensors) if mark != _NONE]
        if name in _WEIGHS:
            self._meet(marks)
        found = _NONE
        for mark in marks:
            found |= mark
        if scores and place is not None and tensors[0].dim() and tensors[0].shape[-1] in self.counts:
            found |= _Mark(frozenset([Score(*place, tensors[0].shape[-1], found.made, next(self._next))]))
        if found == _NONE:
            return result
        if isinstance(result, Iterator):
            result = [*result]
            self._put_all(result, found)
            return iter(result)
        self._put_all(result, found)
        if tensors and (name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name[:3] == "__i"):
            self._put(tensors[0], self._mark(tensors[0]) | found)
        return result

    def _put_all(self, result: Any, mark: _Mark) -> None:
        for leaf in result if isinstance(result, (tuple, list)) else pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._put(leaf, mark)

    def _meet(self, marks: Sequence[_Mark]) -> None:
        for mark in marks:
            for name in mark.made:
                self.met.update((name, score) for other in marks for score in other.scores if name not in other.made)

    def enter(self, name: str, list_name: str | None, given: Any, *, caller: str | None) -> None:
        """A module is called, which may be a member of a list."""
        if name in self._homes:
            self._homes[name] = caller
        if list_name is None:
            return
        self._homes[list_name] = caller
        for leaf in pytree.tree_leaves(given):
            if isinstance(leaf, Tensor):
                if leaf not in self._serials:
                    self._serials[leaf] = next(self._next)
                self._given.setdefault(list_name, []).append((self._serials[leaf], self._mark(leaf)))

    def leave(self, name: str, list_name: str | None, result: Any) -> None:
        """A module has returned. What matters inside of it only is forgotten, or marks would grow with the depth."""
        made = frozenset(() if list_name is None else [list_name])
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and (made or leaf in self._marks):
                mark = self._mark(leaf)
                scores = frozenset(score for score in mark.scores if score.caller != name)
                others = frozenset(each for each in mark.made if self._homes.get(each) != name)
                self._marks[leaf] = _Mark(scores, others | made)

    def reached(self, name: str) -> set[Score]:
        """The scores that weigh or pick what a candidate computes, and are not computed from it."""
        found = {score for candidate, score in self.met if candidate == name}
        given = self._given.get(name, [])
        several = len({serial for serial, _ in given}) == len(given)
        if several and not any(name in mark.made for _, mark in given):
            # Each member has rows of its own, none of another's result.
            found.update(score for _, mark in given for score in mark.scores)
        return {score for score in found if name not in score.after}


_NONE = _Mark()
