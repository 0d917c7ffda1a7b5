"""Weighs the terms of ranks' losses so that their average has the gradient of one process' loss.

A data engine averages gradients over ranks, which is right where every rank divides by the same count. Rank r of R
divides its mean by n_r where one process divides by N = n_1 + ... + n_R, so the gradient of the mean is multiplied by
R n_r / N on its way down, and that of a sum by R. Several means in one loss, each with a count of its own, are
multiplied each by its own factor: their counts go round in one small reduction between forward and backward.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from lightning_pardist.engines.common.devices import number_on
from lightning_pardist.engines.common.loss_terms import Term

#: Means with counts of their own that fit into the message; further ones are weighed by samples.
_MEANS = 24
#: Places for their counts, which go by name; and for how many a loss has, with which some ranks' may lack terms.
_COUNTS, _SIZES = 31, 6
#: Numbers other than losses that fit into it.
_VALUES = 16
#: Numbers in front: ranks that take part, those with a loss, those with terms, their terms' signature and the square of
#: that, samples, signature and square for the values, what numbers divide sums by, and the square of that, and what
#: stands for the settings of optimizers, and its square.
_HEAD = 12


@dataclass(frozen=True)
class Value:
    """A number that each rank has computed as a mean or a sum of its own samples.

    Attributes:
        name: Equal on all ranks.
        value: This rank's, a tensor of no dims.
        weight: What a mean is divided by; None for a sum.
    """

    name: str
    value: Tensor
    weight: Tensor | float | None


@dataclass(frozen=True)
class Balance:
    """What one exchange came to.

    Attributes:
        factors: For each term, what its gradient is to be multiplied with before ranks are averaged; shape ``[terms]``.
        values: For each value, that of all ranks' samples together; this rank's own where ranks' values do not match.
        agreed: Whether the losses of all ranks consist of the same terms, or of some of those that one of them has; no
            dims. Otherwise means go by samples.
        totals: For each term that is a mean, what all ranks have counted; shape ``[terms]``.
        samples: Of all ranks; no dims.
        same_numbers: Whether all ranks' sums are divided by the same numbers, which were taken for constants; no dims.
        same_settings: Whether all ranks gave the same ``settings``; no dims.
    """

    factors: Tensor
    values: Tensor
    agreed: Tensor
    totals: Tensor
    samples: Tensor
    same_numbers: Tensor
    same_settings: Tensor


def signature(names: Sequence[str]) -> float:
    """A small number that stands for some names in their order; exact in float64 also when squared and summed."""
    return float(zlib.crc32("|".join(names).encode()) & 0xFFFFF)


def agreed_terms(terms: list[Term], agree: Callable[[Tensor], Tensor] | None, device: torch.device) -> list[Term]:
    """Terms with the counts of the whole batch, where this rank's part of it may hold nothing that counts.

    Args:
        terms: As this rank finds them.
        agree: Combines counts of ranks that share a batch, shape ``[terms]``. Collective over these; None if none do.
        device: Of its message.
    """
    if agree is None or not terms:
        return terms
    counts = [number_on(device, term.count, torch.float64) for term in terms]
    return [replace(term, count=count) for term, count in zip(terms, agree(torch.stack(counts)).unbind(), strict=True)]


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
    """Find the factors for a loss' terms. Collective over ``group``: one reduction of a few hundred bytes.

    Args:
        terms: Of this rank's loss; none if its step had no loss.
        samples: Samples in this rank's batch.
        present: Whether this rank's batch counts at all.
        values: Further numbers to put together.
        settings: A :func:`signature` of what ranks are to have alike.
        group: Ranks whose gradients are averaged; None if this one is alone.
        device: Of the message.
    """
    values = values[:_VALUES]
    names = [f"{term.kind} {term.what}" for term in terms if term.kind != "constant" and not term.is_nothing]
    mark, votes = signature(names), float(present and bool(names))
    value_mark = signature([value.name for value in values])
    here, has_loss = float(present), float(present and bool(terms))
    head = [here, has_loss, votes, votes * mark, votes * mark**2, has_loss * samples]
    sums = [term for term in terms if term.kind == "sum"]
    numbers = math.fsum(place * term.number for place, term in enumerate(sums, start=1))
    head += [here * value_mark, here * value_mark**2, votes * numbers, votes * numbers**2]
    head += [here * settings, here * settings**2]
    shares = [1.0 if value.weight is None else value.weight for value in values]
    own = _message([*head, *_table(terms), *_padded(shares, _VALUES)], device)
    own[_HEAD:] *= here
    # A mean of nothing is no number, and counts nothing.
    parts = own.new_zeros(_VALUES)
    if values:
        weights = own[-_VALUES:][: len(values)]
        parts[: len(values)] = torch.where(weights == 0, 0.0, weights * _stacked(values, own))
    own = torch.cat([own, parts, _makeup(terms, own) * here])
    total = own.clone()
    if group is not None:
        dist.all_reduce(total, group=group)
    return _balance(terms, values, own, total, 1 if group is None else group.size())


def _places(terms: Sequence[Term]) -> tuple[list[int], bool]:
    """Where the counts of a loss' means go, by their names, and whether that is so on ranks with fewer of them as well.

    On ranks with the same terms it always is; otherwise only where no two share a place.
    """
    means = [term.what for term in terms if term.kind == "mean"][:_MEANS]
    # Fewer of a kind are terms of fewer samples, and not some of these.
    names = [f"{what} {means[:index].count(what)} of {means.count(what)}" for index, what in enumerate(means)]
    wanted = [zlib.crc32(name.encode()) % _COUNTS for name in names]
    places: list[int] = []
    for place in wanted:
        places.append(next(free for shift in range(_COUNTS) if (free := (place + shift) % _COUNTS) not in places))
    return places, places == wanted and len(means) < _SIZES


def _table(terms: Sequence[Term], what: Literal["count", "surplus"] = "count") -> list[Tensor | float]:
    """What means have counted, each at its place, or by how much more they are divided."""
    found: list[Tensor | float] = [0.0] * _COUNTS
    means = [term for term in terms if term.kind == "mean"]
    for place, term in zip(_places(terms)[0], means, strict=False):
        found[place] = getattr(term, what)
    return found


#: A number for each of: names that share a place, sums, others; for fewer ranks than this.
_BASE = 2.0**16


def _makeup(terms: Sequence[Term], like: Tensor) -> Tensor:
    """How many means have counted something, as a one at that place; and what else there is, as one number."""
    places, apart = _places(terms)
    sizes: list[Tensor | float] = [0.0] * _SIZES
    if apart and like.device.type == "cpu":
        counts = like[_HEAD : _HEAD + _COUNTS].tolist()
        sizes[sum(counts[place] > 0 for place in places)] = 1.0
    elif apart:
        counted = (like[_HEAD : _HEAD + _COUNTS] > 0).sum()
        sizes = list((torch.arange(_SIZES, device=like.device) == counted).to(like).unbind())
    others = [float(any(term.kind == kind for term in terms)) for kind in ("sum", "other")]
    return _message([*sizes, float(not apart) + _BASE * others[0] + _BASE**2 * others[1]], like.device)


@dataclass(frozen=True)
class Scaling:
    """Hooks that scale gradients on their way.

    Attributes:
        coming_in: Those that multiply what comes in at a node, by node: a loss of one term has one. Those of several
            terms multiply what additions hand on.
        others: All others.
    """

    coming_in: dict[Node, RemovableHandle] = field(default_factory=dict)
    others: list[RemovableHandle] = field(default_factory=list)

    def remove(self) -> None:
        """The backward that they were meant for is over."""
        for handle in (*self.coming_in.values(), *self.others):
            handle.remove()
        self.coming_in.clear()
        self.others.clear()


def scale_gradients(terms: Sequence[Term], factors: Tensor) -> Scaling:
    """Multiply the gradients of a loss' terms in the backward pass to come. Not collective.

    Args:
        terms: Of the loss.
        factors: As many.

    Returns:
        The hooks; they stay until they are removed, or the graph is gone.
    """
    found = Scaling()
    on_host = factors.device.type == "cpu"
    scales: list[Tensor | float] = factors.tolist() if on_host else list(factors.unbind())
    for first, several, without in _put_together(terms, factors):
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
        # Gradients of the terms were scaled further down; what multiplies their sum follows the first that counts.
        lead = next((index for index in members if terms[index].kind == "mean"), members[0])
        found.others.append(product.register_hook(partial(_multiplied_at, place, scales[lead])))
        for empty in (_is_empty(terms[index], on_host) for index in members):
            if empty is not False:
                found.others.append(product.register_hook(partial(_zeros_at, place, empty)))
    return found


def _put_together(terms: Sequence[Term], factors: Tensor) -> Iterator[tuple[Term, Tensor, Tensor]]:
    """Terms that are elements of one tensor: the first of them, the factors of all, and which have counted nothing."""
    groups: dict[Node, list[int]] = {}
    for index, term in enumerate(terms):
        if term.element is not None:
            groups.setdefault(term.node, []).append(index)
    for members in groups.values():
        members.sort(key=lambda index: terms[index].element or 0)
        counts = [torch.as_tensor(terms[index].divisor, device=factors.device) for index in members]
        # A term that goes by samples may have counted nothing all the same.
        yield terms[members[0]], factors[members], torch.stack(counts) == 0


def _scale_one_by_one(found: Scaling, term: Term, factor: Tensor, empty: Tensor) -> Iterator[RemovableHandle]:
    for addition, place in term.edges:
        yield addition.register_hook(partial(_multiplied_at, place, factor))
    if not term.edges:
        found.coming_in[term.node] = term.node.register_prehook(partial(_multiplied, factor))
    if empty.device.type != "cpu" or empty.any():
        yield from _stop_at(term, empty)


def _by_cofactor(terms: Sequence[Term]) -> dict[tuple[Node, int], list[int]]:
    """Edges to what multiplies sums, and the terms of each sum that depend on the batch, by their index."""
    found: dict[tuple[Node, int], list[int]] = {}
    for index, term in enumerate(terms):
        for edge in term.cofactors if term.kind != "constant" else ():
            found.setdefault(edge, []).append(index)
    return found


def uneven_products(terms: Sequence[Term]) -> list[str]:
    """Why no one factor is right for the gradient of what multiplies a sum of terms, for a message; none if one is.

    It is as large as the sum is, and what each term has to do with that is not known behind the forward. Parts of
    parameters alone do no harm to means: the factors of these add up to 1.
    """
    for edge, members in _by_cofactor(terms).items():
        inside = [terms[index] for index in members]
        kinds = {term.kind for term in inside} | {term.kind for term in terms if edge in term.cofactors}
        counts = [float(term.count) if term.by_data else 0.0 for term in inside]
        if "sum" in kinds and (len(kinds) > 1 or any(term.offset for term in inside)):
            return ["something trained multiplies a sum over samples and what is none, added together"]
        # Sums of the same weights in another order differ by rounding.
        if not all(math.isclose(count, counts[0], rel_tol=1e-5) for count in counts):
            return ["something trained multiplies means with several counts, added together"]
    return []


def _is_empty(term: Term, on_host: bool) -> Tensor | bool:
    """Whether a mean is one of nothing; a tensor where asking would wait for the device."""
    empty = term.divisor == 0 if term.kind == "mean" else False
    return bool(empty) if on_host else empty


def _stop_at(term: Term, empty: Tensor | bool) -> Iterator[RemovableHandle]:
    """Let zeros pass where nothing was counted: a mean of nothing makes numbers that are none out of them."""
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
    """One factor, or as many as there are elements, in their shape."""
    return factor.reshape(grad.shape) if factor.numel() == grad.numel() else factor


def _multiplied_at(
    place: int, factor: Tensor | float, into: Sequence[Tensor | None], out: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    return (*into[:place], *_multiplied(factor, into[place : place + 1]), *into[place + 1 :])


def _zeros_at(
    place: int, empty: Tensor | bool, into: Sequence[Tensor | None], out: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    return (*into[:place], *_zeros_if(empty, into[place : place + 1]), *into[place + 1 :])


def _balance(terms: Sequence[Term], values: Sequence[Value], own: Tensor, total: Tensor, ranks: int) -> Balance:
    alike = total[2] * total[4] == total[3] ** 2
    # What a rank without a loss would have counted is not known: ranks count alike then, it with a loss of zero.
    complete = total[0] == total[1]
    by_samples = own[0] * torch.where(complete, _factor(own[5], total[5], ranks), 1.0)
    agreed = alike
    if alike.device.type != "cpu" or not alike:
        agreed = alike | _is_nested(total)
    counts = slice(_HEAD, _HEAD + _COUNTS)
    surplus = _message(_table(terms, "surplus"), own.device)
    # One process keeps the count of all from being smaller as well.
    divisors = own[counts] + surplus
    wholes = torch.where(surplus > 0, torch.maximum(total[counts], divisors), total[counts])
    by_count = torch.where(agreed & complete, own[0] * _factor(divisors, wholes, ranks), by_samples)
    places = iter(_places(terms)[0])
    factors, totals = [], []
    for term in terms:
        factor, counted = by_samples, total[5]
        place = next(places, None) if term.kind == "mean" else None
        if place is not None:
            factor, counted = by_count[place], wholes[place]
        elif term.kind == "sum":
            factor = own[0] * ranks
        elif term.kind == "constant":
            factor = torch.ones_like(by_samples)
        factors.append(factor)
        totals.append(counted)
    none = total.new_empty(0)
    return Balance(
        torch.stack(factors) if factors else none,
        _combined(values, own, total),
        agreed,
        torch.stack(totals) if totals else none,
        total[5],
        ~alike | ((total[2] * total[9] - total[8] ** 2).abs() <= 1e-9 * total[8] ** 2),
        total[0] * total[11] == total[10] ** 2,
    )


def _is_nested(total: Tensor) -> Tensor:
    """Whether one rank has all the terms, and others lack some: where nothing counted, say."""
    sizes, others = total[-1 - _SIZES : -1], total[-1]
    most = (torch.arange(_SIZES, device=total.device) * (sizes > 0)).max()
    nested = (others % _BASE == 0) & ((total[_HEAD : _HEAD + _COUNTS] > 0).sum() == most)
    for kind in (others // _BASE % _BASE, others // _BASE**2):
        nested &= (kind == 0) | (kind == total[2])
    return nested


def _combined(values: Sequence[Value], own: Tensor, total: Tensor) -> Tensor:
    if not values:
        return total.new_empty(0)
    begin = _HEAD + _COUNTS
    weights, parts = total[begin : begin + len(values)], total[begin + _VALUES :][: len(values)]
    sums = _message([float(value.weight is None) for value in values], total.device)
    # Where no batch counts, each shows its own.
    alike = (total[0] > 0) & (total[0] * total[7] == total[6] ** 2)
    return torch.where(alike, torch.where(sums > 0, parts, parts / weights), _stacked(values, own))


def _factor(own: Tensor, total: Tensor, ranks: int) -> Tensor:
    # Exactly 1 where ranks have equal counts.
    return torch.where(total > 0, own * ranks / total, 1.0)


def _stacked(values: Sequence[Value], like: Tensor) -> Tensor:
    return torch.stack([value.value.detach().to(like).squeeze() for value in values])


def _padded(numbers: Sequence[Tensor | float], length: int) -> list[Tensor | float]:
    return [*numbers, *[0.0] * (length - len(numbers))]


def _message(numbers: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Numbers of the host and of the device as one tensor there, without waiting for the device."""
    message = torch.tensor([0.0 if isinstance(each, Tensor) else each for each in numbers], dtype=torch.float64)
    if device.type == "cpu":
        for index, each in enumerate(numbers):
            if isinstance(each, Tensor):
                message[index] = each.item()
        return message
    message = message.pin_memory().to(device, non_blocking=True)
    for index, each in enumerate(numbers):
        if isinstance(each, Tensor):
            message[index] = each
    return message
