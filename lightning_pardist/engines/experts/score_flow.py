"""Data flow of scores through a step: whether they weigh the results of expert candidates, or select their inputs.

A score with as many entries as a stack has blocks may belong to something else: classes or positions. A router's score
is recognised by its use. It is not computed from the experts' results, and it meets them in an operator that weighs or
places (a product, an indexed sum), or selects rows for each expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_pardist.compat import pytree

#: Functions by which a score weighs, selects or places something.
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
    """One score computed in a step.

    Attributes:
        place: Name of the module whose forward computes it.
        caller: Name of the module that called that one. When it returns, the score is no longer tracked.
        count: Number of entries.
        after: Names of candidates from whose results it is computed.
        number: Index among all scores.
    """

    place: str
    caller: str | None
    count: int
    after: frozenset[str]
    number: int


@dataclass(frozen=True)
class _Mark:
    """Origin of a tensor: the scores and candidates that it depends on.

    Attributes:
        scores: Scores that it depends on.
        made: Candidates on whose results, or stacked parameters, it depends.
    """

    scores: frozenset[Score] = frozenset()
    made: frozenset[str] = frozenset()

    def __or__(self, other: _Mark) -> _Mark:
        return _Mark(self.scores | other.scores, self.made | other.made)


class ScoreFlow:
    """Tracks the scores of a step and the candidates' results that they are combined with.

    Args:
        counts: Numbers of entries of the scores to track.

    Attributes:
        met: Pairs of a candidate's name and a score that has weighed or selected its results.
    """

    def __init__(self, counts: set[int]) -> None:
        self.counts = counts
        self.met: set[tuple[str, Score]] = set()
        #: For each list, an id of each tensor that its members were called with, and the scores it depends on.
        self._given: dict[str, list[tuple[int, _Mark]]] = {}
        self._marks: Any = WeakIdKeyDictionary()
        self._owners: dict[int, str] = {}
        #: For each candidate, the module whose forward uses its results.
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
        """Register parameters as possibly stacked experts of the module ``name``."""
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
        """Record a function call.

        Args:
            name: Name of the function.
            tensors: Its tensor arguments.
            result: Its result.
            place: Name of the module whose forward calls it, and of that module's caller; None outside of all.
            scores: Whether the function computes scores, along the last dim of its first tensor.

        Returns:
            The result; an iterator over tensors is replaced by another one over the same.
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
        """Record the call of a module that may be a member of a list."""
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
        """Record a module's return. Marks used only inside of it are dropped, or they would grow with depth."""
        made = frozenset(() if list_name is None else [list_name])
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and (made or leaf in self._marks):
                mark = self._mark(leaf)
                scores = frozenset(score for score in mark.scores if score.caller != name)
                others = frozenset(each for each in mark.made if self._homes.get(each) != name)
                self._marks[leaf] = _Mark(scores, others | made)

    def reached(self, name: str) -> set[Score]:
        """Return the scores that weigh or select a candidate's results, and are not computed from them."""
        found = {score for candidate, score in self.met if candidate == name}
        given = self._given.get(name, [])
        several = len({serial for serial, _ in given}) == len(given)
        if several and not any(name in mark.made for _, mark in given):
            # Each member is called with tensors of its own, none of which is another's result.
            found.update(score for _, mark in given for score in mark.scores)
        return {score for score in found if name not in score.after}


_NONE = _Mark()
