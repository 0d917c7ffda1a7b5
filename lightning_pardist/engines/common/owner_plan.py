"""Which rank updates which tensor, and which boxes travel for it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

#: Offsets and sizes of a box in its tensor.
Box = tuple[tuple[int, ...], tuple[int, ...]]
Kind = Literal["grads", "reads", "writes"]


@dataclass(frozen=True)
class TensorLayout:
    """What one rank holds of one tensor.

    Attributes:
        grads: Boxes of its gradient.
        reads: Boxes of its values, as the update begins with them.
        writes: Boxes that the new values are written to.
        dtype: Of all of them.
    """

    grads: tuple[Box, ...]
    reads: tuple[Box, ...]
    writes: tuple[Box, ...]
    dtype: torch.dtype

    def boxes(self, kind: Kind) -> tuple[Box, ...]:
        """The boxes of a kind."""
        return {"grads": self.grads, "reads": self.reads, "writes": self.writes}[kind]


@dataclass(frozen=True)
class Move:
    """A box on its way between two ranks, which may be one.

    Attributes:
        number: Of the tensor.
        kind: Of whose gradient or values it is a part.
        source: Rank in the group.
        target: Rank in the group.
        box: Where in the tensor.
    """

    number: int
    kind: Kind
    source: int
    target: int
    box: Box


def update_cost(shape: Sequence[int]) -> float:
    """Estimated cost of one tensor's update, in arbitrary units: products of matrices, if it has two dims or more.

    The update of an ``m x n`` matrix, ``m >= n``, by its singular vectors, by roots of its factors or by an iteration
    takes about ``m n^2 + n^3 / 2`` operations (a Newton-Schulz iteration's three products); what treats elements alike
    is a small part of that. Further dims in front count matrices (stacked experts).
    """
    numel = math.prod(shape)
    if len(shape) < 2 or not numel:
        return float(numel)
    small = min(shape[-1], numel // shape[-1])
    return float(numel) * (16 + small + small * small / (2 * numel // small))


class Owners:
    """Gives tensors to the ranks that update them: the costliest first, each to the rank with the least to do.

    Among tensors of one cost each goes, as far as that comes out even, to the rank that has most of its gradient
    already, so that little travels. Tensors that come later are given away without a change for those before, so that
    state stays where it is.

    Args:
        size: Number of ranks.
        cost: Of a tensor with a shape, in arbitrary units.
    """

    def __init__(self, size: int, *, cost: Callable[[Sequence[int]], float] = update_cost) -> None:
        self.loads = [0.0] * size
        self._cost = cost
        self._owner: dict[int, int] = {}

    def assign(
        self,
        shapes: Mapping[int, Sequence[int]],
        held: Mapping[int, Mapping[int, int]] | None = None,
        known: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Give the tensors with new numbers away.

        Args:
            shapes: By number.
            held: Elements of a tensor's gradient that each rank has, by number; equal on all ranks.
            known: Ranks that have any of a tensor, by number; equal on all ranks. Others do not get it.
        """
        ranks, known = range(len(self.loads)), known or {}
        costs = {number: max(self._cost(shape), 1.0) for number, shape in shapes.items() if number not in self._owner}
        some = [number for number in costs if len(known.get(number, ranks)) < len(ranks)]
        for number in sorted(some, key=lambda n: (-costs[n], n)):
            rank = min(known[number], key=self.loads.__getitem__)
            self.loads[rank] += costs.pop(number)
            self._owner[number] = rank
        for cost, alike in itertools.groupby(sorted(costs, key=lambda n: (-costs[n], n)), key=costs.__getitem__):
            numbers = list(alike)
            room: Counter[int] = Counter()
            for _ in numbers:
                rank = min(ranks, key=self.loads.__getitem__)
                self.loads[rank] += cost
                room[rank] += 1
            self._owner.update(_nearest(numbers, room, held or {}))

    def renumber(self, new: Mapping[int, int]) -> None:
        """Tensors have other numbers from now on; those without a new one are forgotten.

        Args:
            new: Numbers by those that the tensors had.
        """
        self._owner = {new[number]: rank for number, rank in self._owner.items() if number in new}

    def of(self, number: int) -> int | None:
        """The rank that updates a tensor; None if nobody of this group does."""
        return self._owner.get(number)


def _nearest(
    numbers: Sequence[int], room: Counter[int], held: Mapping[int, Mapping[int, int]]
) -> Iterator[tuple[int, int]]:
    """Tensors with the rank that each goes to, of which every rank takes so many: those it has most of first."""
    shares = sorted((-elements, number, rank) for number in numbers for rank, elements in held.get(number, {}).items())
    given = set()
    for _, number, rank in shares:
        if room[rank] and number not in given:
            room[rank] -= 1
            given.add(number)
            yield number, rank
    yield from zip((number for number in numbers if number not in given), room.elements(), strict=True)


class OwnerPlan:
    """Which boxes travel, from what every rank of a group holds.

    Args:
        layouts: By rank, each tensor's layout there, by number; none of what the rank does not know.
        shapes: Of the tensors, by number.
    """

    def __init__(self, layouts: Sequence[Mapping[int, TensorLayout]], shapes: Mapping[int, Sequence[int]]) -> None:
        self._layouts = layouts
        self._shapes = shapes
        self._known: dict[tuple[int, Kind, int], list[Move]] = {}

    def dtype(self, number: int) -> torch.dtype:
        """Of a tensor as it is updated."""
        return next(layout[number].dtype for layout in self._layouts if number in layout)

    def gather(self, number: int, kind: Kind, owner: int) -> list[Move]:
        """The moves that put a gradient or values together on one rank, which takes what it has from itself.

        Raises:
            RuntimeError: If the parts do not make up the whole.
        """
        if (number, kind, owner) in self._known:
            return self._known[number, kind, owner]
        chosen: list[tuple[int, Box]] = []
        size = len(self._layouts)
        for rank in ((owner + step) % size for step in range(size)):
            layout = self._layouts[rank].get(number)
            for box in layout.boxes(kind) if layout is not None else ():
                if not any(_contains(other, box) for _, other in chosen):
                    chosen.append((rank, box))
        covered = sum(math.prod(sizes) for _, (_, sizes) in chosen)
        if covered < math.prod(self._shapes[number]):
            raise RuntimeError(
                f"Ranks hold {covered} of {math.prod(self._shapes[number])} elements of the {kind} of tensor {number}"
                f" of shape {tuple(self._shapes[number])}: give the optimizer the same parameters on all ranks."
            )
        self._known[number, kind, owner] = [Move(number, kind, rank, owner, box) for rank, box in chosen]
        return self._known[number, kind, owner]

    def scatter(self, number: int, owner: int) -> list[Move]:
        """The moves that bring new values from one rank to all that hold any of them."""
        if (number, "writes", owner) not in self._known:
            self._known[number, "writes", owner] = [
                Move(number, "writes", owner, rank, box)
                for rank, layout in enumerate(self._layouts)
                if number in layout
                for box in layout[number].writes
            ]
        return self._known[number, "writes", owner]


def rounds_of(
    numbers: Sequence[int],
    owner_of: Mapping[int, int],
    shapes: Mapping[int, Sequence[int]],
    *,
    round_elements: float,
) -> Iterator[list[int]]:
    """Cut the tensors of a step into rounds, in each of which no rank has more than so many elements at work.

    Args:
        numbers: Of the tensors that are updated.
        owner_of: Their owners.
        shapes: Theirs.
        round_elements: Elements that a rank puts together at a time; a larger tensor is by itself.

    Yields:
        Numbers of a round, costly ones first: ranks have about as much to do in it.
    """
    queues: dict[int, list[list[int]]] = {}
    room: dict[int, float] = {}
    for number in sorted(numbers, key=lambda n: (-update_cost(shapes[n]), n)):
        owner, size = owner_of[number], math.prod(shapes[number])
        rounds = queues.setdefault(owner, [[]])
        if rounds[-1] and size > room[owner]:
            rounds.append([])
        if not rounds[-1]:
            room[owner] = round_elements
        rounds[-1].append(number)
        room[owner] -= size
    for index in range(max((len(rounds) for rounds in queues.values()), default=0)):
        yield [number for owner in sorted(queues) for number in (queues[owner][index : index + 1] or [[]])[0]]


def _contains(outer: Box, inner: Box) -> bool:
    return all(a <= b and b + m <= a + n for a, n, b, m in zip(outer[0], outer[1], inner[0], inner[1], strict=True))
