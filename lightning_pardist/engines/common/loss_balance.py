"""Scale the gradients of loss terms so that the average over ranks equals the gradient of the single-process loss.

A data engine averages gradients over ranks, which is exact if every rank divides its loss by the same count. Rank r of
R divides its mean by n_r, a single process by N = n_1 + ... + n_R, so in backward the gradient of a mean is multiplied
by R n_r / N, and that of a sum by R. If a loss contains several means with different counts, each has its own factor.
The counts are summed over ranks in one small all-reduce, which begins between forward and backward.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from lightning_pardist.engines.common.combined_values import Combined, Value, ValueNames, ValueSlots
from lightning_pardist.engines.common.devices import number_on
from lightning_pardist.engines.common.loss_term import Term
from lightning_pardist.engines.common.numbers import Number, number_of, tensor_of, where

#: Maximum number of means with their own counts in the message; further ones are weighted by samples.
_MEANS = 24
#: Number of slots for their counts, chosen by name, and for a one-hot number of means, which detects missing terms.
_COUNTS, _SIZES = 31, 6
#: Maximum number of terms whose counts are combined over the ranks that share a batch; those of further ones are kept.
_TOGETHER = 128
#: Number of header fields: participating ranks, ranks with a loss and (times _BASE) those whose counts have changed,
#: ranks with terms, signature of the terms and its square, samples, Python numbers that divide sums and their square,
#: signature of the optimizers' settings and its square, ranks with new names of values.
_HEAD = 11
#: Base to encode several numbers of ranks in one, for fewer ranks than this.
_BASE = 2.0**16


@dataclass(frozen=True)
class Balance:
    """Result of one :func:`exchange`.

    Attributes:
        factors: For each term, the factor on its gradient before the average over ranks; shape ``[terms]``.
        values: For each value, that over the samples of all ranks that have it.
        agreed: Whether the losses of all ranks consist of the same terms, or of subsets of one rank's terms; no dims.
            Otherwise means are weighted by samples.
        totals: For each term that is a mean, the total count of all ranks; shape ``[terms]``.
        samples: Number of samples of all ranks; no dims.
        present: Number of ranks whose batches count; no dims.
        same_numbers: Whether all ranks divide their sums by the same Python numbers, which were taken as constants; no
            dims.
        same_settings: Whether all ranks passed the same ``settings``; no dims.
    """

    factors: Tensor
    values: list[Combined]
    agreed: Tensor
    totals: Tensor
    samples: Tensor
    present: Tensor
    same_numbers: Tensor
    same_settings: Tensor


@dataclass(frozen=True)
class Counts:
    """What the factor of a loss that is a single mean depends on.

    Attributes:
        term: The mean, without its graph.
        samples: Number of samples in the batch.
    """

    term: Term
    samples: float


class Exchange:
    """An exchange that has begun: :meth:`result` waits for the other ranks.

    Args:
        terms: Terms of this rank's loss.
        slots: Values to combine.
        own: The numbers that this rank sends.
        group: See :func:`begin_exchange`.
        device: Device of the message.
        overlaps: See :func:`begin_exchange`.
    """

    def __init__(
        self,
        terms: Sequence[Term],
        slots: ValueSlots,
        own: Sequence[Number],
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
        overlaps: bool,
    ) -> None:
        self._terms, self._slots, self._own, self._device = terms, slots, own, device
        self._ranks = 1 if group is None else group.size()
        self._total = _message(own, device)
        self._work = None if group is None else dist.all_reduce(self._total, group=group, async_op=overlaps)
        self._received: Any = None

    def result(self) -> Balance:
        """Return the factors and the combined values."""
        return _balance(self._terms, self._slots, self._own, self._sums(), self._ranks, self._device)

    def num_changed(self) -> Number:
        """Return the number of ranks that have sent that their counts changed."""
        return self._sums()[1] // _BASE

    def has_new_names(self) -> bool:
        """Return whether a rank has names of values that the others may not know."""
        return bool(self._sums()[10] > 0)

    def same_settings(self) -> Any:
        """Return whether all ranks have sent the same ``settings``."""
        return _are_same_settings(self._sums())

    def is_even(self, counts: Counts) -> bool:
        """Return whether the losses of all ranks are the same mean, with these counts."""
        total = self._sums()
        everyone = total[0] == total[1] % _BASE == total[2] == self._ranks
        alike = total[2] * total[4] == total[3] ** 2 and total[5] == counts.samples * self._ranks
        return bool(everyone and alike and self.factor_of(counts) == 1.0)

    def factor_of(self, counts: Counts) -> Number:
        """Return the factor on the gradient of a rank with these counts."""
        own: dict[int, Number] = {0: 1.0, 5: counts.samples}
        own |= {_HEAD + place: counts.term.count for place in _places([counts.term])[0]}
        return _factors([counts.term], own, self._sums(), self._ranks, self._device)[0][0]

    def _sums(self) -> Any:
        if self._received is None:
            if self._work is not None:
                self._work.wait()
            # Arithmetic on a dozen Python numbers takes a fraction of the time of as many operators.
            self._received = self._total.tolist() if self._device.type == "cpu" else self._total
        return self._received


def counts_of(terms: Sequence[Term], samples: float) -> Counts | None:
    """Return the counts of a loss; None if it is not a single mean over some items, whose gradient has one factor."""
    if len(terms) != 1 or (term := terms[0]).kind not in ("mean", "other") or term.element is not None:
        return None
    if isinstance(term.surplus, Tensor) or term.surplus or term.added or term.is_zero or samples <= 0:
        return None
    count = number_of(term.count, torch.device("cpu"))
    if term.kind == "mean" and not count > 0:
        return None
    return Counts(Term(term.kind, None, count, what=term.what), samples)  # type: ignore[arg-type]


def signature(names: Sequence[str]) -> float:
    """Return a 20-bit hash of a list of names; in float64 it stays exact when squared and summed over ranks."""
    return float(zlib.crc32("|".join(names).encode()) & 0xFFFFF)


def agreed_terms(terms: list[Term], agree: Callable[[Tensor], Tensor] | None, device: torch.device) -> list[Term]:
    """Return terms with the counts of the whole batch, of which this rank's part may contain no counted item.

    Args:
        terms: The terms found on this rank.
        agree: Returns the maximum of numbers, shape ``[numbers]``, over the ranks that share a batch. Collective over
            them; None if no ranks share one.
        device: Device of the message.
    """
    if agree is None:
        return terms
    # Ranks may have different numbers of terms: sums over a mask without items are not merged. All send one length.
    shared = terms[:_TOGETHER]
    counts = [number_on(device, term.count, torch.float64) for term in shared]
    size, none = (number_on(device, number, torch.float64) for number in (float(len(terms)), 0.0))
    by_name = [number_on(device, count, torch.float64) for count in _table(terms)]
    padding, table = [none] * (_TOGETHER - len(counts)), _places(terms)[0]
    # Of a slot that no rank or only some use, the largest mark and the largest negative one.
    marks = torch.full((2, _COUNTS), -math.inf, dtype=torch.float64)
    names = [term.what for term in terms if term.kind == "mean"]
    for slot, name in zip(table, names, strict=False):
        marks[0, slot], marks[1, slot] = signature([name]), -signature([name])
    marks = marks.to(device, non_blocking=True)
    message = agree(torch.cat([torch.stack([size, -size, *by_name, *counts, *padding]), marks.flatten()]))
    same_size, (named, largest, most, least) = (
        message[0] == -message[1],
        message[2:].split([_COUNTS, _TOGETHER, _COUNTS, _COUNTS]),
    )
    is_alike = most == -least
    places = iter(table)
    found = []
    for term, own, count in zip(shared, counts, largest.unbind(), strict=False):
        place = next(places, None) if term.kind == "mean" else None
        other = own if place is None else torch.where(is_alike[place], named[place], own)
        found.append(replace(term, count=torch.where(same_size, count, other)))
    return [*found, *terms[_TOGETHER:]]


def exchange(
    terms: Sequence[Term],
    *,
    samples: float,
    present: bool = True,
    values: Sequence[Value] = (),
    settings: float = 0.0,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Balance:
    """Compute the factors for a loss' terms. Collective over ``group``: one all-reduce of about 0.7 KB.

    See :func:`begin_exchange` for the arguments.
    """
    begun = begin_exchange(
        terms, samples=samples, present=present, values=values, settings=settings, group=group, device=device
    )
    return begun.result()


def begin_exchange(
    terms: Sequence[Term],
    *,
    samples: float,
    present: bool = True,
    values: Sequence[Value] = (),
    names: ValueNames | None = None,
    settings: float = 0.0,
    changed: bool = True,
    overlaps: bool = False,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Exchange:
    """Begin to compute the factors for a loss' terms. Collective over ``group``.

    Args:
        terms: Terms of this rank's loss; empty if its step had no loss.
        samples: Number of samples in this rank's batch.
        present: Whether this rank's batch counts at all.
        values: Further numbers to combine across ranks.
        names: Their names that all ranks know; equal on all ranks.
        settings: A :func:`signature` of settings that should be equal on all ranks.
        changed: Whether this rank's counts may differ from those of its previous step.
        overlaps: Whether to return before the other ranks have sent their numbers.
        group: Ranks whose gradients are averaged; None for this rank alone.
        device: Device of the message.
    """
    kinds = [f"{term.kind} {term.what}" for term in terms if term.kind not in ("constant", "sum") and not term.is_zero]
    # Of sums, ranks may have different numbers: one for each sample.
    kinds += dict.fromkeys(f"sum {term.what}" for term in terms if term.kind == "sum")
    mark, votes = signature(kinds), float(present and bool(kinds))
    here, has_loss = float(present), float(present and bool(terms))
    head = [here, has_loss + _BASE * changed, votes, votes * mark, votes * mark**2, has_loss * samples]
    constants = dict.fromkeys(term.number for term in terms if term.kind == "sum")
    numbers = math.fsum(place * number for place, number in enumerate(constants, start=1))
    head += [votes * numbers, votes * numbers**2, here * settings, here * settings**2]
    names = ValueNames() if names is None else names
    slots = ValueSlots(values, names, present=present, device=device)
    head += [float(names.has_new)]
    counts = [number_of(count, device) * here for count in _table(terms)]
    makeup = [number * here for number in _makeup(terms, counts)]
    own = [*head, *counts, *slots.message(), *makeup]
    return Exchange(terms, slots, own, group=group, device=device, overlaps=overlaps)


def _places(terms: Sequence[Term]) -> tuple[list[int], bool]:
    """Return the slots of the means' counts, by name, and whether ranks that lack some of the means use the same slots.

    Ranks with the same terms always use the same slots; ranks with fewer terms only if no two names collide.
    """
    means = [term.what for term in terms if term.kind == "mean"][:_MEANS]
    # The number of equal names is part of the name: fewer of them are other terms, not a subset.
    names = [f"{what} {means[:index].count(what)} of {means.count(what)}" for index, what in enumerate(means)]
    wanted = [zlib.crc32(name.encode()) % _COUNTS for name in names]
    places: list[int] = []
    for place in wanted:
        places.append(next(free for shift in range(_COUNTS) if (free := (place + shift) % _COUNTS) not in places))
    return places, places == wanted and len(means) < _SIZES


def _table(terms: Sequence[Term]) -> list[Number]:
    """Return the counts of the means, each in its slot."""
    found: list[Number] = [0.0] * _COUNTS
    means = [term for term in terms if term.kind == "mean"]
    for place, term in zip(_places(terms)[0], means, strict=False):
        found[place] = term.count
    return found


def _makeup(terms: Sequence[Term], counts: Sequence[Number]) -> list[Number]:
    """Return the number of means with a positive count, one-hot, and flags for collisions, sums and other terms."""
    places, apart = _places(terms)
    sizes: list[Number] = [0.0] * _SIZES
    if apart:
        counted = sum(counts[place] > 0 for place in places)
        if isinstance(counted, Tensor):
            sizes = list((torch.arange(_SIZES, device=counted.device) == counted).to(torch.float64).unbind())
        else:
            sizes[counted] = 1.0
    others = [float(any(term.kind == kind for term in terms)) for kind in ("sum", "other")]
    return [*sizes, float(not apart) + _BASE * others[0] + _BASE**2 * others[1]]


@dataclass(frozen=True)
class Scaling:
    """Handles of the hooks that scale gradients in a backward.

    Attributes:
        coming_in: Prehooks that multiply the gradient arriving at a node, by node. Used for a term that is the whole
            loss; for a summand, the gradient that the addition passes on is multiplied.
        others: Handles of all other hooks.
    """

    coming_in: dict[Node, RemovableHandle] = field(default_factory=dict)
    others: list[RemovableHandle] = field(default_factory=list)

    def remove(self) -> None:
        """Remove all hooks, after the backward that they were registered for."""
        for handle in (*self.coming_in.values(), *self.others):
            handle.remove()
        self.coming_in.clear()
        self.others.clear()


def scale_gradients(terms: Sequence[Term], factors: Tensor) -> Scaling:
    """Register hooks that multiply the gradients of a loss' terms in the next backward. Not collective.

    Args:
        terms: Terms of the loss.
        factors: One factor per term.

    Returns:
        The hooks; they stay until they are removed or the graph is freed.
    """
    found = Scaling()
    on_host = factors.device.type == "cpu"
    scales: list[Number] = factors.tolist() if on_host else list(factors.unbind())
    for first, several, without in _merged_elements(terms, factors):
        found.others.extend(_scale_one_by_one(found, first, several, without))
    for term, factor in zip(terms, scales, strict=True):
        if term.element is not None:
            continue
        if not on_host or factor != 1.0:
            for addition, place in term.edges:
                found.others.append(addition.register_hook(partial(_multiplied_at, place, factor)))
            if not term.edges:
                found.coming_in[term.node] = term.node.register_prehook(partial(_multiplied, factor))
        empty = _is_empty(term, on_host)
        if empty is not False:
            found.others.extend(_stop_at(term, empty))
    for (product, place), members in _by_cofactor(terms).items():
        # The terms' gradients are scaled at their own edges; the factor of their sum uses the scale of the first mean.
        lead = next((index for index in members if terms[index].kind == "mean"), members[0])
        found.others.append(product.register_hook(partial(_multiplied_at, place, scales[lead])))
        for empty in (_is_empty(terms[index], on_host) for index in members):
            if empty is not False:
                found.others.append(product.register_hook(partial(_zeros_at, place, empty)))
    return found


def _merged_elements(terms: Sequence[Term], factors: Tensor) -> Iterator[tuple[Term, Tensor, Tensor]]:
    """Yield, for terms that are elements of one tensor, the first term, all factors, and a mask of zero counts."""
    groups: dict[Node, list[int]] = {}
    for index, term in enumerate(terms):
        if term.element is not None:
            groups.setdefault(term.node, []).append(index)
    for members in groups.values():
        members.sort(key=lambda index: terms[index].element or 0)
        counts = [torch.as_tensor(terms[index].divisor, device=factors.device) for index in members]
        # A term that is weighted by samples may have a zero count too.
        yield terms[members[0]], factors[members], torch.stack(counts) == 0


def _scale_one_by_one(found: Scaling, term: Term, factor: Tensor, empty: Tensor) -> Iterator[RemovableHandle]:
    for addition, place in term.edges:
        yield addition.register_hook(partial(_multiplied_at, place, factor))
    if not term.edges:
        found.coming_in[term.node] = term.node.register_prehook(partial(_multiplied, factor))
    if empty.device.type != "cpu" or empty.any():
        yield from _stop_at(term, empty)


def _by_cofactor(terms: Sequence[Term]) -> dict[tuple[Node, int], list[int]]:
    """Map each edge to a factor of a sum to the indices of the sum's non-constant terms."""
    found: dict[tuple[Node, int], list[int]] = {}
    for index, term in enumerate(terms):
        for edge in term.cofactors if term.kind != "constant" else ():
            found.setdefault(edge, []).append(index)
    return found


def uneven_products(terms: Sequence[Term]) -> list[str]:
    """Return why no single scale is exact for the gradient of a factor of a sum of terms; empty if one is.

    This gradient is proportional to the sum, and each term's share of it is not known after the forward. Terms of
    parameters alone do not matter next to means, whose factors average to 1 over ranks.
    """
    for edge, members in _by_cofactor(terms).items():
        inside = [terms[index] for index in members]
        kinds = {term.kind for term in inside} | {term.kind for term in terms if edge in term.cofactors}
        counts = [float(term.count) + term.added if term.by_data else 0.0 for term in inside]
        if "sum" in kinds and (len(kinds) > 1 or any(term.offset for term in inside)):
            return ["a trainable factor multiplies a sum over samples plus a term of another kind"]
        # Sums of the same weights in a different order differ by rounding.
        if not all(math.isclose(count, counts[0], rel_tol=1e-5) for count in counts):
            return ["a trainable factor multiplies a sum of means with different counts"]
    return []


def _is_empty(term: Term, on_host: bool) -> Tensor | bool:
    """Return whether a mean is over no items; a tensor if a bool would need a device synchronization."""
    # What is divided by a count less one is not known from a part with one item: its NaN is left to be seen.
    empty = term.divisor == 0 if term.kind == "mean" and not term.added else False
    return bool(empty) if on_host else empty


def _stop_at(term: Term, empty: Tensor | bool) -> Iterator[RemovableHandle]:
    """Register hooks that zero the gradients of a mean over no items, which would be NaN otherwise."""
    *above, reduction = term.path
    yield reduction.register_prehook(partial(_zeros_if, empty))
    for node in above:
        yield node.register_hook(lambda into, out: _zeros_if(empty, into))


def _zeros_if(empty: Tensor | bool, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    if not isinstance(empty, Tensor):
        return tuple(None if grad is None else torch.zeros_like(grad) for grad in grads)
    return tuple(
        grad if grad is None or empty.numel() not in (1, grad.numel()) else torch.where(_like(empty, grad), 0.0, grad)
        for grad in grads
    )


def _multiplied(factor: Tensor | float, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(
        None if grad is None else grad * (_like(factor, grad).to(grad.dtype) if isinstance(factor, Tensor) else factor)
        for grad in grads
    )


def _like(factor: Tensor, grad: Tensor) -> Tensor:
    """Return a factor per element in the gradient's shape; a single factor unchanged."""
    return factor.reshape(grad.shape) if factor.numel() == grad.numel() else factor


def _multiplied_at(
    place: int, factor: Tensor | float, into: Sequence[Tensor | None], out: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    return (*into[:place], *_multiplied(factor, into[place : place + 1]), *into[place + 1 :])


def _zeros_at(
    place: int, empty: Tensor | bool, into: Sequence[Tensor | None], out: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    return (*into[:place], *_zeros_if(empty, into[place : place + 1]), *into[place + 1 :])


def _balance(
    terms: Sequence[Term],
    slots: ValueSlots,
    own: Sequence[Number],
    total: Sequence[Number] | Tensor,
    ranks: int,
    device: torch.device,
) -> Balance:
    factors, totals, alike, agreed = _factors(terms, own, total, ranks, device)
    same_numbers = abs(total[2] * total[7] - total[6] ** 2) <= 1e-9 * total[6] ** 2
    return Balance(
        _message(factors, device),
        slots.combined(total[_HEAD + _COUNTS : _HEAD + _COUNTS + slots.length]),
        tensor_of(agreed, device),
        _message(totals, device),
        tensor_of(total[5], device),
        tensor_of(total[0], device),
        tensor_of(alike, device).logical_not() | tensor_of(same_numbers, device),
        tensor_of(_are_same_settings(total), device),
    )


def _are_same_settings(total: Sequence[Number] | Tensor) -> Any:
    return total[0] * total[9] == total[8] ** 2


def _factors(
    terms: Sequence[Term], own: Any, total: Sequence[Number] | Tensor, ranks: int, device: torch.device
) -> tuple[list[Number], list[Number], Any, Any]:
    """Return each term's factor and total count, and whether the ranks' terms are equal, or subsets of one rank's."""
    alike = total[2] * total[4] == total[3] ** 2
    # The count of a rank without a loss is unknown: all ranks are weighted equally, that rank with a loss of zero.
    complete = total[0] == total[1] % _BASE
    by_samples = own[0] * where(complete, _factor(own[5], total[5], ranks), 1.0)
    agreed = alike if alike is True else alike | _is_nested(total)
    exact = agreed & complete
    places = iter(_places(terms)[0])
    factors: list[Number] = []
    totals: list[Number] = []
    for term in terms:
        factor, counted = by_samples, total[5]
        place = next(places, None) if term.kind == "mean" else None
        if place is not None:
            divisor, counted = own[_HEAD + place] + term.added, total[_HEAD + place] + term.added
            surplus = number_of(term.surplus, device)
            if isinstance(surplus, Tensor) or surplus > 0:
                # A single process clamps the total count from below as well.
                divisor = divisor + surplus
                counted = where(surplus > 0, where(divisor > counted, divisor, counted), counted)
            factor = where(exact, own[0] * _factor(divisor, counted, ranks), by_samples)
        elif term.kind == "sum":
            factor = own[0] * ranks
        elif term.kind == "constant":
            factor = 1.0
        factors.append(factor)
        totals.append(counted)
    return factors, totals, alike, agreed


def _is_nested(total: Sequence[Number] | Tensor) -> Any:
    """Return whether one rank has all terms and others have subsets of them, such as where no item was counted."""
    most, counted = _last_positive(total[-1 - _SIZES : -1]), _positives(total[_HEAD : _HEAD + _COUNTS])
    others = total[-1]
    nested = (others % _BASE == 0) & (counted == most)
    for kind in (others // _BASE % _BASE, others // _BASE**2):
        nested &= (kind == 0) | (kind == total[2])
    return nested


def _factor(own: Number, total: Number, ranks: int) -> Number:
    # Exactly 1 if the ranks' counts are equal.
    return where(total > 0, own * ranks / where(total > 0, total, 1.0), 1.0)


def _positives(numbers: Any) -> Number:
    return (numbers > 0).sum() if isinstance(numbers, Tensor) else sum(number > 0 for number in numbers)


def _last_positive(numbers: Any) -> Number:
    """Return the index of the last positive number; 0 if there is none."""
    if isinstance(numbers, Tensor):
        return (torch.arange(len(numbers), device=numbers.device) * (numbers > 0)).max()
    return max((index for index, number in enumerate(numbers) if number > 0), default=0)


def _message(numbers: Sequence[Number], device: torch.device) -> Tensor:
    """Pack numbers of host and device into one tensor on the device, without synchronization."""
    if numbers and all(isinstance(each, Tensor) for each in numbers):
        return torch.stack(list(numbers))
    message = torch.tensor([0.0 if isinstance(each, Tensor) else each for each in numbers], dtype=torch.float64)
    if device.type == "cpu":
        return message
    message = message.pin_memory().to(device, non_blocking=True)
    for index, each in enumerate(numbers):
        if isinstance(each, Tensor):
            message[index] = each
    return message
