"""Assignment of tensor updates to owner ranks, and the boxes that are sent to and from the owners."""

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
    """The boxes of one tensor that one rank holds.

    Attributes:
        grads: Boxes of the gradient.
        reads: Boxes of the values before the update.
        writes: Boxes that the new values are written to.
        dtype: Dtype of the tensor.
    """

    grads: tuple[Box, ...]
    reads: tuple[Box, ...]
    writes: tuple[Box, ...]
    dtype: torch.dtype

    def boxes(self, kind: Kind) -> tuple[Box, ...]:
        """Return the boxes of one kind."""
        return {"grads": self.grads, "reads": self.reads, "writes": self.writes}[kind]


@dataclass(frozen=True)
class Move:
    """A box to be sent from one rank to another, or copied within one.

    Attributes:
        number: Index of the tensor.
        kind: Whether the box is part of the gradient, the old values or the new values.
        source: Sending rank in the group.
        target: Receiving rank in the group.
        box: Position in the tensor.
    """

    number: int
    kind: Kind
    source: int
    target: int
    box: Box


def update_cost(shape: Sequence[int]) -> float:
    """Estimate the cost of one tensor's update, in arbitrary units; matrix products for tensors of two or more dims.

    The update of an ``m x n`` matrix, ``m >= n``, by its singular vectors, by roots of its factors or by an iteration
    takes about ``m n^2 + n^3 / 2`` operations (the three products of a Newton-Schulz iteration); elementwise operations
    are a small part of that. Further leading dims count matrices (stacked experts).
    """
    numel = math.prod(shape)
    if len(shape) < 2 or not numel:
        return float(numel)
    small = min(shape[-1], numel // shape[-1])
    return float(numel) * (16 + small + small * small / (2 * numel // small))


class Owners:
    """Greedy assignment of tensors to owner ranks: in order of decreasing cost, each to the least loaded rank.

    Among tensors of equal cost, each goes to the rank that holds most of its gradient, as far as the balance allows,
    which reduces communication. Tensors added later do not change earlier assignments, so that optimizer state does not
    move.

    Args:
        size: Number of ranks.
        cost: Returns the cost of a tensor from its shape, in arbitrary units.
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
        """Assign the tensors that have no owner yet.

        Args:
            shapes: Shapes by tensor number.
            held: By tensor number, the number of gradient elements that each rank holds; equal on all ranks.
            known: By tensor number, the ranks that hold any of it; equal on all ranks. Only these can be owners.
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
        """Change the numbers of tensors; tensors without a new number are dropped.

        Args:
            new: Maps old numbers to new ones.
        """
        self._owner = {new[number]: rank for number, rank in self._owner.items() if number in new}

    def of(self, number: int) -> int | None:
        """Return the owner of a tensor; None if no rank of this group updates it."""
        return self._owner.get(number)


def _nearest(
    numbers: Sequence[int], room: Counter[int], held: Mapping[int, Mapping[int, int]]
) -> Iterator[tuple[int, int]]:
    """Yield tensors with their owners, given the number of tensors per rank; largest held gradient share first."""
    shares = sorted((-elements, number, rank) for number in numbers for rank, elements in held.get(number, {}).items())
    given = set()
    for _, number, rank in shares:
        if room[rank] and number not in given:
            room[rank] -= 1
            given.add(number)
            yield number, rank
    yield from zip((number for number in numbers if number not in given), room.elements(), strict=True)


class OwnerPlan:
    """Plan of the boxes to send, from the layouts of all ranks of a group.

    Args:
        layouts: For each rank, the layouts of the tensors that it holds, by tensor number.
        shapes: Global shapes by tensor number.
    """

    def __init__(self, layouts: Sequence[Mapping[int, TensorLayout]], shapes: Mapping[int, Sequence[int]]) -> None:
        self._layouts = layouts
        self._shapes = shapes
        self._known: dict[tuple[int, Kind, int], list[Move]] = {}

    def dtype(self, number: int) -> torch.dtype:
        """Return the dtype in which a tensor is updated."""
        return next(layout[number].dtype for layout in self._layouts if number in layout)

    def gather(self, number: int, kind: Kind, owner: int) -> list[Move]:
        """Return the moves that assemble a gradient or values on one rank, which uses its own boxes first.

        Raises:
            RuntimeError: If the boxes do not cover the tensor.
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
        """Return the moves that send new values from the owner to all ranks that hold any of them."""
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
    """Split the tensors of a step into rounds that limit the elements each owner assembles at a time.

    Args:
        numbers: Numbers of the tensors to update.
        owner_of: Owner of each tensor.
        shapes: Shape of each tensor.
        round_elements: Maximum number of elements per owner and round; a larger tensor gets a round of its own.

    Yields:
        Tensor numbers of a round, in order of decreasing cost, which balances the ranks' work within a round.
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
