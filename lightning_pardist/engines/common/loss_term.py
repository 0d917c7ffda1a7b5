"""The summands of a loss, as its autograd graph shows them, and the weights that follow from them.

[Note: products of sums]
In ``alpha * (a + b)`` the gradients of the terms ``a`` and ``b`` are scaled where the addition passes them on. The
gradient of ``alpha`` does not pass there, although it is proportional to the terms. A term therefore lists the edges by
which operations above the addition pass gradients to its factors. If results of the batch are multiplied with each
other, the whole product is one term.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lightning_pardist.compat.autograd_graph import inputs_of, kind_of, shape_of
from lightning_pardist.engines.common.batch_dim import PICKED
from lightning_pardist.engines.common.divisor_counts import (
    Divisor,
    counts_among,
    divisors_inside,
    is_computed,
    is_count_of,
    is_power_of_ten,
    number_of,
    product_of_numbers,
)
from lightning_pardist.engines.common.floored_counts import added_to, unfloored
from lightning_pardist.engines.common.masked_sums import counts_items_of, elements, is_empty_sum, unclamped

#: A mean is divided by a count, a sum over the batch is not, and a constant does not depend on the batch.
TermKind = Literal["mean", "sum", "constant", "other"]
#: End of the reason for a term that balances loads. On some batches it is additive over samples by chance.
BALANCING = "as in load-balancing losses"
#: Beginning of the reason for a mean that is multiplied back.
BY_SAMPLES = "a mean is multiplied by the number of samples"
#: Marks terms that are zero regardless of the batch.
_NOTHING = "nothing"
#: Operations that may permute elements without a change of shape.
_REARRANGING = {"T", "Transpose", "Permute", "Index", "View", "UnsafeView", "ReshapeAlias"}


@dataclass(frozen=True)
class Term:
    """A summand of a loss.

    Attributes:
        kind: How the term depends on the number of items.
        node: The node whose gradient is that of the term.
        count: The divisor of a mean, a number or a tensor of no dims on the loss' device.
        path: The nodes from ``node`` to the one that reduces the batch.
        what: The operation, for the log.
        by_data: Whether the count depends on values of the batch, not only on its shape.
        nonlinear: Why the term is not additive over parts of the batch, for the log; empty if it is.
        divisors: All divisors from the loss down to the reduction.
        shared: Position of the only divisor that is a count, which other sums may share.
        items: Number of items of the batch that a sum adds up, from its shape.
        number: Product of the Python numbers that divide a sum and were taken as constants; 1 if there are none.
        of_held: Whether a constant was computed from tensors that the module holds, possibly by its layers.
        surplus: Difference between the actual divisor and the count, due to a clamp. See
            :mod:`~lightning_pardist.engines.common.floored_counts`.
        added: Number that the step added to the count in the divisor, as in ``/ (mask.sum() + 1.0)``; a single process
            adds it once to the count of the whole batch.
        element: Flat index of the term in the result of ``node``; None if the term is the whole result.
        edges: Edges by which additions pass their gradient to ``node``, as pairs of addition and index among its
            inputs; empty if the term is the whole loss. The result of ``node`` may also be used in other terms: in
            ``(-scale).exp() * mean + scale`` the second summand has its own edge, which the first does not use.
        cofactors: Edges, of the same form, to what multiplies or divides sums that contain the term.
        offset: Whether a number is added to the term inside a sum that has cofactors.
        of_sample: Whether the term is the loss of one sample, so that its count is not the batch's.
    """

    kind: TermKind
    node: Node
    count: Tensor | float = 0.0
    path: tuple[Node, ...] = ()
    what: str = ""
    by_data: bool = False
    nonlinear: str = ""
    divisors: tuple[Divisor, ...] = ()
    edges: tuple[tuple[Node, int], ...] = ()
    cofactors: tuple[tuple[Node, int], ...] = ()
    offset: bool = False
    shared: Position | None = None
    items: int = 0
    number: float = 1.0
    of_held: bool = False
    surplus: Tensor | float = 0.0
    added: float = 0.0
    element: int | None = None
    of_sample: bool = False

    @property
    def divisor(self) -> Tensor | float:
        """The number that a mean was divided by."""
        return self.count + self.surplus + self.added

    @property
    def is_zero(self) -> bool:
        """Whether the term is zero regardless of the batch, as in ``output.sum() * 0``."""
        return self.what == _NOTHING

    def describe(self) -> str:
        """Return a description of the term and its count."""
        if self.kind == "mean":
            weight = "the count that divides it" if self.by_data else "its number of elements"
            text = f"{self.what}, a mean weighted by {weight}"
        elif self.kind == "sum":
            constant = f" divided by the constant {self.number:g}" if self.number != 1 else ""
            text = f"{self.what}, a sum{constant}, added up without weights"
        elif self.kind == "constant":
            text = f"{self.what}, a function of parameters only"
        else:
            text = f"{self.what}, weighted by samples"
        return f"{text} ({self.nonlinear})" if self.nonlinear else text


@dataclass(frozen=True)
class Position:
    """Position of the traversal from the loss: a node, its path from the top of the current term, and what was passed.

    Factors of the term itself (``beside``) get gradients that are scaled with the term; factors of a sum that contains
    the term (``cofactors``) do not. Below a product of results of the batch (``joined``), sums are not split.
    """

    node: Node
    path: tuple[Node, ...]
    divisors: tuple[Divisor, ...] = ()
    nonlinear: str = ""
    edges: tuple[tuple[Node, int], ...] = ()
    beside: tuple[tuple[Node, int], ...] = ()
    cofactors: tuple[tuple[Node, int], ...] = ()
    offset: bool = False
    joined: bool = False

    def below(
        self,
        node: Node,
        *,
        divisor: Any = None,
        rounded: bool = False,
        table: bool = False,
        nonlinear: str = "",
    ) -> Position:
        """Return the position one node further from the loss, in the same term."""
        divisors = self.divisors if divisor is None else (*self.divisors, Divisor(divisor, self, rounded, table))
        nonlinear = self.nonlinear or nonlinear
        sides = enumerate(inputs_of(self.node))
        others = [(self.node, place) for place, child in sides if child is not None and child is not node]
        beside = (*self.beside, *others)
        path = (*self.path, node)
        return replace(self, node=node, path=path, divisors=divisors, nonlinear=nonlinear, beside=beside)

    def summands(self, *, with_number: bool) -> list[Position]:
        """Return the positions of the summands of an addition."""
        places = [(place, child) for place, child in enumerate(inputs_of(self.node)) if child is not None]
        if self.joined:
            return [replace(self, node=child, path=(*self.path, child)) for _, child in places]
        cofactors = (*self.cofactors, *self.beside)
        above = replace(self, beside=(), cofactors=cofactors, offset=self.offset or (with_number and bool(cofactors)))
        return [replace(above, node=child, path=(child,), edges=((self.node, place),)) for place, child in places]

    def term(self, kind: TermKind, what: str, count: Tensor | float = 0.0, *, by_data: bool = False) -> Term:
        """Return the term that ends at this position."""
        return Term(
            "other" if kind == "sum" and self.joined else kind,
            self.path[0],
            count,
            self.path,
            what,
            by_data,
            self.nonlinear,
            self.divisors,
            self.edges,
            self.cofactors,
            self.offset,
        )

    def elementwise_means(self, what: str, counts: Tensor, sizes: tuple[int, ...]) -> list[Term]:
        """Return means that end at this position: elements of one tensor of this shape, each with its own count."""
        # Their gradients are separate below the point where the elements are combined.
        first = next(place for place, node in enumerate(self.path) if shape_of(node) == sizes)
        tables = [each.at.node for each in self.divisors if each.table and each.at is not None]
        for place, node in enumerate(self.path):
            if node in tables:
                break
            first = max(first, place + 1) if kind_of(node) in _REARRANGING else first
        above = set(self.path[:first])
        cofactors = (*self.cofactors, *(edge for edge in self.beside if edge[0] in above))
        root = replace(self, path=self.path[first:], cofactors=cofactors, edges=() if first else self.edges)
        term = root.term("mean", f"{what} divided by a count", by_data=True)
        return [replace(term, count=count, element=place) for place, count in enumerate(counts.flatten().unbind())]

    def zero_term(self) -> Term:
        """Return a term that is zero regardless of the batch."""
        return replace(self, nonlinear="").term("mean", _NOTHING, 0.0, by_data=True)

    def mean(self, what: str, count: Tensor | float, *, by_data: bool = False) -> Term:
        """Return a mean that ends at this position; computed divisors (a mean of weights, say) multiply its count."""
        for divisor in self.divisors:
            if is_computed(divisor.value):
                count, by_data = divisor.value.detach().reshape(()) * count, True
        return self.term("mean", what, count, by_data=by_data)

    def divided(self, what: str, sizes: tuple[int, ...], dim: int, samples: int | None, ranks: int) -> Term:
        """Return a sum over the batch that ends at this position; a mean if one of its divisors is a count."""
        divisors = (*self.divisors, *(Divisor(each) for each in divisors_inside(self.node)))
        nothing = is_empty_sum(self.node)
        picked = any(kind_of(each) in PICKED for each in elements(self.node))
        counts = counts_among(divisors, sizes, dim, samples, ranks, picked=picked)
        if nothing:
            counts = counts[-1:]
        if not counts:
            counts = [each for each in divisors if is_count_of(self.node, number_of(each.value))]
        if not counts:
            term = replace(
                self.term("sum", what), number=product_of_numbers(divisors), items=sizes[dim] if sizes else 0
            )
            if self.nonlinear.startswith(BY_SAMPLES):
                # A factor of a sum is a constant.
                term = replace(term, nonlinear="")
            return self.zero_term() if nothing else term
        # In a product of counts the number would have to be multiplied by the others, which differ between parts.
        added = added_to(counts[0].value) if len(counts) == 1 else 0.0
        if added:
            left = float(counts[0].value) - added
            # Otherwise the number may be a part of the count.
            is_count = math.isclose(left, 0, abs_tol=1e-6) if nothing else counts_items_of(self.node, left)
            added = added if is_count else 0.0
        total: Any = math.prod((each.value for each in counts[1:]), start=counts[0].value)
        before = [unfloored(each.value) for each in counts]
        is_floored = any(number is not each.value for number, each in zip(before, counts, strict=True))
        total, *before = (each.reshape(()) if isinstance(each, Tensor) else each for each in (total, *before))
        if nothing:
            # A divisor of at most 1 only avoids a division by zero, as in max(number_of_boxes, 1).
            some = total - added > 1
            total = torch.where(some, total.detach(), added) if isinstance(total, Tensor) else total * some
        total = total.detach() if isinstance(total, Tensor) else float(total)
        count = divisor = total if added else unclamped(total, self.node)
        if is_floored and not nothing:
            count = torch.minimum(*map(torch.as_tensor, (math.prod(before[1:], start=before[0]), divisor)))
        surplus = 0.0 if count is divisor else divisor - count
        count = count - added if added else count
        term = self.term("mean", f"{what} divided by a count", count, by_data=True)
        shared = counts[0].at if len(counts) == 1 else None
        return replace(term, shared=shared, surplus=surplus, added=added, items=sizes[dim] if sizes else 0)


def is_multiple_of_batch(term: Term, samples: int | None) -> bool:
    """Return whether a term is a sum divided by a constant that is probably several times the number of samples.

    A multiple by a power of two of fewer than 8 samples is probably a constant.

    Args:
        term: The term.
        samples: Number of samples in the batch.
    """
    if term.kind != "sum" or not samples or samples < 3 or is_power_of_ten(term.number):
        return False
    times = term.number / samples
    return times > 1 and times.is_integer() and (samples >= 8 or not math.log2(times).is_integer())


def opaque_term(terms: Sequence[Term]) -> str:
    """Return the name of code that computes a term and that autograd does not see into; empty if there is none.

    This is a custom autograd function (fused losses), compiled or scripted code.
    """
    for term in terms:
        node = term.path[-1] if term.path else term.node
        if term.kind == "other" and not term.of_sample and not shape_of(node):
            kind = kind_of(node)
            if kind.startswith("Function.") or kind == "DifferentiableGraph":
                return kind.removeprefix("Function.")
    return ""


def leading_mean(terms: Sequence[Term]) -> Term | None:
    """Return the mean whose count is the weight of a value; None if it is weighted by samples.

    Args:
        terms: Terms of the value.

    Raises:
        LookupError: If the terms are not means.
    """
    varying = [term for term in terms if term.kind != "constant"]
    if not varying or any(term.kind == "sum" for term in varying):
        raise LookupError
    means = [term for term in varying if term.kind == "mean"]
    return next((term for term in means if term.by_data), means[0] if means else None)


def weight_of(terms: Sequence[Term], samples: float) -> Tensor | float | None:
    """Return the weight of a value in the average over ranks or micro-batches: a count, or None for a sum.

    Args:
        terms: Terms of the value.
        samples: The weight if the terms contain no count.

    Raises:
        LookupError: If the value consists of means and sums, or of constants only, so that no single weight is exact.
    """
    varying = [term for term in terms if term.kind != "constant"]
    if varying and all(term.kind == "sum" for term in varying):
        return None
    lead = leading_mean(terms)
    return samples if lead is None else lead.divisor


def has_several_counts(terms: Sequence[Term]) -> bool:
    """Return whether no single weight is exact for all terms."""
    varying = [term for term in terms if term.kind != "constant" and not term.is_zero]
    kinds = {term.kind for term in varying}
    if len(varying) < 2 or kinds in ({"sum"}, {"other"}):
        return False
    if "sum" in kinds or any(term.by_data for term in varying):
        return True
    # Sizes such as those of atoms and molecules have no fixed ratio. Whether others have, one rank cannot tell.
    return len({float(term.count) for term in varying if term.kind == "mean"}) > 1


def as_counts(terms: Sequence[Term]) -> list[Term]:
    """Return terms in which numbers that divide sums, taken as constants so far, are counts.

    Summands of one sum (losses of single samples) become one term, since ranks may have different numbers of them.
    """
    found: dict[object, Term] = {}
    for index, term in enumerate(terms):
        if term.kind != "sum" or term.number == 1:
            found[index] = term
            continue
        what = f"{term.what} divided by a number"
        mean = replace(term, kind="mean", count=term.number, by_data=True, what=what, number=1.0)
        key = (what, term.number) if term.edges and term.element is None else index
        found[key] = merged_term(found[key], found[key], mean) if key in found else mean
    return list(found.values())


def merged_term(term: Term, one: Term, other: Term) -> Term:
    """Return a term that was reached on two paths, with the edges of both."""
    edges = tuple(dict.fromkeys((*one.edges, *other.edges)))
    cofactors = tuple(dict.fromkeys((*one.cofactors, *other.cofactors)))
    nonlinear = one.nonlinear or other.nonlinear
    return replace(term, edges=edges, cofactors=cofactors, offset=one.offset or other.offset, nonlinear=nonlinear)


def larger(one: Tensor | float, other: Tensor | float) -> Tensor | float:
    """Return the larger of two numbers, each a Python number or a tensor."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return torch.maximum(*map(torch.as_tensor, (one, other)))
    return max(one, other)
