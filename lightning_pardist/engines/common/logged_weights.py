"""Weights of logged values in the mean over ranks or micro-batches.

The weight of a mean is its count, which the autograd graph shows. A sum of means with different counts
(``cross_entropy + 0.1 * mse``) has no single weight: each summand is combined with its own count. The graph does not
contain the summands' values, which are therefore noted as the step computes them
(:mod:`~lightning_pardist.engines.common.mean_counts`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lightning_pardist.compat.autograd_graph import inputs_of, kind_of
from lightning_pardist.engines.common.batch_dim import ADDITIONS
from lightning_pardist.engines.common.loss_term import Term, as_counts, has_several_counts, leading_mean
from lightning_pardist.engines.common.loss_terms import find_terms
from lightning_pardist.engines.common.mean_counts import MeanCounts, MeanPart

#: Linear operations, whose results are combined over ranks like their inputs.
_LINEAR = ADDITIONS | {"Mul", "Div", "Neg", "ToCopy", "Clone", "Alias", "View", "Squeeze", "Unsqueeze", "Sum", "Mean"}


class LoggedWeight(NamedTuple):
    """How a value is combined with those of other ranks or micro-batches.

    Attributes:
        whole: The value as one mean.
        parts: Its summands, which have counts of their own; empty if it has one count, or if they are not known.
    """

    whole: MeanPart
    parts: tuple[MeanPart, ...] = ()

    @property
    def value(self) -> float:
        """The value, on the host."""
        return sum(float(part.value) for part in self.parts or (self.whole,))


#: Number of steps that are noted in any case.
_FIRST = 100


class NotedMeans:
    """Notes the means of which a step's values consist, in the first steps and from then on if a logged value needs it.

    Noting takes up to 0.2 ms per step. Some values are logged in a few steps only.

    Args:
        enabled: Whether means may be noted at all.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._counts = MeanCounts(sums=True) if enabled else None
        #: Whether the next step is noted, whether all are, and how many steps have been.
        self._notes, self._always, self._num_steps = True, False, 0
        #: What the current step has shown: a value with several counts, one whose graph does not show its count, and
        #: one of these whose count was noted.
        self._several = self._unknown = self._counted = False
        #: Results of :meth:`summands_of` with what was noted, by its id: the same tuple if a value is logged twice.
        self._found: dict[int, tuple[tuple[MeanPart, ...], tuple[MeanPart, ...]]] = {}

    def step(self) -> AbstractContextManager[None]:
        """Context of a step, or of its part that sees a micro-batch. Not collective."""
        self._found.clear()
        return nullcontext() if self._counts is None or not self._notes else self._counts.recording()

    def count_of(self, value: Any) -> Tensor | float | None:
        """Return the count of a value whose graph does not show it; None if it is not known."""
        self._unknown = True
        count = self._counts.count_of(value) if self._counts is not None and self._notes else None
        self._counted |= count is not None
        return count

    def summands_of(self, value: Any, terms: Sequence[Term], samples: float) -> tuple[MeanPart, ...]:
        """Return the summands of a value that the step has computed; empty if one weight serves or they are not known.

        Args:
            value: The value, a detached alias, or its Python number.
            terms: Its terms.
            samples: Number of samples in the batch.
        """
        if self._counts is None or not has_several_counts(terms):
            return ()
        self._several = True
        parts = (self._counts.parts_of(value) or ()) if self._notes else ()
        kinds = [term.kind for term in terms if not term.is_zero]
        if sum(part.items is not None for part in parts) < kinds.count("mean"):
            return ()
        has_sums, num_sums = "sum" in kinds, sum(part.is_sum for part in parts)
        if num_sums != kinds.count("sum") if has_sums else num_sums > kinds.count("constant"):
            # A detached sum has no term.
            return ()
        if has_sums and "constant" in kinds:
            # Which of them are sums over items, and which are penalties of parameters, is not known.
            return ()
        if id(parts) not in self._found:
            sizes = {term.count for term in terms if not isinstance(term.count, Tensor)}
            made = tuple(_with_count(part, samples, sizes, has_sums) for part in _merged(parts))
            self._found[id(parts)] = parts, made
        return self._found[id(parts)][1]

    def end(self) -> None:
        """End a step: the next one is noted if that may serve, or has served."""
        self._num_steps += 1
        self._always |= self._counted
        self._notes = self._several or self._always or (self._unknown and not self._notes) or self._num_steps < _FIRST
        if self._counts is not None:
            self._counts.forget()
        self._found.clear()
        self._several = self._unknown = self._counted = False


def weight_of_logged(
    value: Any,
    others: Sequence[Any],
    loss: Tensor | None,
    terms: Sequence[Term],
    samples: int | None,
    noted: NotedMeans,
    *,
    gathers: bool = False,
    ranks: int = 1,
    with_counts: bool = False,
    known: Mapping[Node, Sequence[Term]] | None = None,
    by_sample: bool = True,
) -> LoggedWeight:
    """Return the weight of a logged value in the mean over ranks or micro-batches.

    Args:
        value: Logged value with its graph, or equal to the loss or to another logged value that has one.
        others: All values that the step has logged.
        loss: Loss of the step.
        terms: Terms of the loss.
        samples: Number of samples in the batch.
        noted: Means noted in the step.
        gathers: Whether a part of the batch that gathers samples gathers those of all parts.
        ranks: Number of ranks that the batch is divided among.
        with_counts: Whether Python numbers that divide sums are counts.
        known: Terms by graph node of losses whose backward has run, which has freed their graphs.
        by_sample: Whether a value may be the mean or sum of one value per sample, each with its own count.

    Raises:
        LookupError: If the weight cannot be determined.
    """
    graphs = [each for each in others if isinstance(each, Tensor) and each.grad_fn is not None]
    if not _is_same(value, loss):
        same = next((each for each in graphs if _is_same(value, each)), None)
        terms = [] if same is None else _known_terms(same.grad_fn, known or {})
        if same is not None and not terms:
            terms = find_terms(same, samples=samples, gathers=gathers, ranks=ranks, by_sample=by_sample)
            terms = as_counts(terms) if with_counts else terms
    size = float(samples or 1)
    parts = noted.summands_of(value, terms, size)
    kinds = {term.kind for term in terms if term.kind != "constant"}
    if kinds == {"sum"}:
        return LoggedWeight(MeanPart.of_sum(value), parts)
    if parts and "sum" in kinds:
        return LoggedWeight(MeanPart(value, size), parts)
    lead = leading_mean(terms)
    if lead is None:
        return LoggedWeight(MeanPart(value, size), parts)
    return LoggedWeight(MeanPart(value, lead.count, added=lead.added, divisor=lead.divisor), parts)


def _with_count(part: MeanPart, samples: float, sizes: Collection[float], has_sums: bool) -> MeanPart:
    """Return a noted summand with its count; the samples if it has none.

    Args:
        part: The summand.
        samples: Number of samples in the batch.
        sizes: Sizes of tensors that means of the value are taken over.
        has_sums: Whether sums are over items of the batch.
    """
    if part.is_sum and has_sums:
        return MeanPart.of_sum(part.value)
    # A size that is no multiple of the samples may be that of something else, such as classes.
    other = part.is_size and part.items not in sizes and (not samples or float(part.items or 0) % samples)
    return MeanPart(part.value, samples) if other or part.items is None else part


def _merged(parts: Sequence[MeanPart]) -> Iterable[MeanPart]:
    """Return summands of which those with the same computed count, such as several multiples of one mean, are one."""
    found: dict[object, MeanPart] = {}
    for index, part in enumerate(parts):
        computed = (part.items is None and not part.is_sum) or isinstance(part.items, Tensor)
        key = (id(part.items), id(part.divisor), part.added) if computed else index
        found[key] = part._replace(value=found[key].value + part.value) if key in found else part
    return found.values()


class _Numbers(NamedTuple):
    """A :class:`MeanPart` on the host."""

    value: float
    items: float
    divisor: float
    added: float


def combined_weight(weights: Sequence[LoggedWeight]) -> LoggedWeight:
    """Return the weight of a batch's value, with the value, given those of its micro-batches."""
    columns = [[each.whole for each in weights]]
    if all(each.parts for each in weights) and len({len(each.parts) for each in weights}) == 1:
        columns += map(list, zip(*(each.parts for each in weights), strict=True))
    known, size = _on_host([part for column in columns for part in column]), len(weights)
    whole, *parts = (_combined_part(known[begin : begin + size]) for begin in range(0, len(known), size))
    return LoggedWeight(whole, tuple(parts))


def _on_host(parts: Sequence[MeanPart]) -> list[_Numbers]:
    """Return summands in numbers, with one synchronization."""
    fields: list[Tensor | float] = []
    for part in parts:
        items = 0.0 if part.items is None else part.items
        fields += [part.value, items, items if part.divisor is None else part.divisor]
    tensors = [field.detach().reshape(()) for field in fields if isinstance(field, Tensor)]
    device = tensors[0].device if tensors else None
    read = iter(torch.stack([each.to(device, torch.float64) for each in tensors]).tolist() if tensors else [])
    numbers = [next(read) if isinstance(field, Tensor) else float(field) for field in fields]
    rows = zip(numbers[::3], numbers[1::3], numbers[2::3], parts, strict=True)
    return [_Numbers(value, items, divisor, part.added) for value, items, divisor, part in rows]


def _combined_part(parts: Sequence[_Numbers]) -> MeanPart:
    """Return the summand of a batch, given those of its micro-batches."""
    items = math.fsum(part.items for part in parts)
    added = max((part.added for part in parts), key=abs)
    divisor = items + added
    for part in parts:
        # What clamps the divisor of a part clamps that of the batch; a difference by rounding is none by a clamp.
        if part.divisor - part.items - part.added > 1e-6 * abs(part.divisor):
            divisor = max(divisor, part.divisor)
    # A mean over no items is NaN.
    total = math.fsum(part.divisor * part.value for part in parts if part.divisor)
    return MeanPart(total / divisor if divisor else parts[0].value, items, added=added, divisor=divisor)


def _known_terms(root: Node | None, known: Mapping[Node, Sequence[Term]]) -> Sequence[Term]:
    """Return the terms of a linear combination of recorded losses and their parts; empty if anything else is in it."""
    found: list[Term] = []
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node is None or (node not in known and kind_of(node) not in _LINEAR):
            return []
        found += known.get(node, ())
        waiting += [] if node in known else [child for child in inputs_of(node) if child is not None]
    return found


def _is_same(value: Any, loss: Tensor | None) -> bool:
    """Return whether a logged value is the tensor ``loss`` itself, a detached alias, or its Python number."""
    if loss is None:
        return False
    if isinstance(value, Tensor):
        return value is loss or (value.numel() == 1 and value.data_ptr() == loss.data_ptr())
    return isinstance(value, float) and value == float(loss.detach())
