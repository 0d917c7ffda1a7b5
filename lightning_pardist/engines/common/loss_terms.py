"""Decompose a loss into means and sums over the batch, with their divisors, from its autograd graph.

A single process divides a loss by a count over the whole batch: non-padding tokens, class weights. If the batch is
spread over ranks or split into micro-batches, each part divides by its own count, and parts are weighted equally
although their counts differ. The autograd graph of a part's loss contains what is needed to correct this: it ends in a
few additions and multiplications by numbers, below these are the reductions over the batch, and each saves its divisor.

[Note: products of sums]
In ``alpha * (a + b)`` the gradients of the terms ``a`` and ``b`` are scaled where the addition passes them on. The
gradient of ``alpha`` does not pass there, although it is proportional to the terms. A term therefore lists the edges by
which operations above the addition pass gradients to its factors. If results of the batch are multiplied with each
other, the whole product is one term.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lightning_pardist.compat.autograd_graph import (
    copies_or_adds,
    inputs_of,
    kept,
    kind_of,
    saved,
    scalar,
    shape_of,
)
from lightning_pardist.engines.common.batch_dim import (
    ADDITIONS,
    CONSTANT,
    CONTRACTIONS,
    CURVES,
    ELEMENTWISE,
    LOSSES,
    PICKED,
    PICKS,
    REACH,
    REDUCED,
    REDUCTIONS,
    SAME,
    STATISTICS,
    WRITE,
    BatchDims,
    GatheredResults,
    reduced_dims,
)
from lightning_pardist.engines.common.divisor_counts import (
    Divisor,
    counts_among,
    divisors_inside,
    is_computed,
    is_count_of,
    is_rounded,
    number_of,
    product_of_numbers,
    reciprocal,
)
from lightning_pardist.engines.common.floored_counts import added_to, unfloored
from lightning_pardist.engines.common.masked_sums import (
    SMALL,
    counts_items_of,
    elements,
    is_empty_sum,
    mask_of,
    sums_of_mask,
    unclamped,
)

#: A mean is divided by a count, a sum over the batch is not, and a constant does not depend on the batch.
TermKind = Literal["mean", "sum", "constant", "other"]


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
    shared: _Position | None = None
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


#: End of the reason for a term that balances loads. On some batches it is additive over samples by chance.
BALANCING = "as in load-balancing losses"
#: Marks terms that are zero regardless of the batch.
_NOTHING = "nothing"


def find_terms(
    loss: Tensor, *, samples: int | None = None, gathers: bool = False, ranks: int = 1, by_sample: bool = True
) -> list[Term]:
    """Return the summands of a loss, in an order that depends only on the code of the step. Not collective.

    Args:
        loss: A tensor of one element that requires a gradient.
        samples: Number of samples in the batch, which identifies its dim; if None, the order of dims is used.
        gathers: Whether a gather returns the samples of all parts of the batch, so that results of gathered samples are
            those of the whole batch.
        ranks: Number of ranks that the batch is divided among.
        by_sample: Whether the loss may be the mean or sum of one loss per sample, each with its own count. A batch of
            one sample does not show it.

    Returns:
        One term for each reduction over the batch that the loss depends on.
    """
    return [] if loss.grad_fn is None else _Walk(samples, gathers, ranks, by_sample).terms(loss.grad_fn)


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


@dataclass(frozen=True)
class _Position:
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
    ) -> _Position:
        """Return the position one node further from the loss, in the same term."""
        divisors = self.divisors if divisor is None else (*self.divisors, Divisor(divisor, self, rounded, table))
        nonlinear = self.nonlinear or nonlinear
        sides = enumerate(inputs_of(self.node))
        others = [(self.node, place) for place, child in sides if child is not None and child is not node]
        beside = (*self.beside, *others)
        path = (*self.path, node)
        return replace(self, node=node, path=path, divisors=divisors, nonlinear=nonlinear, beside=beside)

    def summands(self, *, with_number: bool) -> list[_Position]:
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
            if self.nonlinear.startswith(_BY_SAMPLES):
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


class _Walk:
    """One traversal of a loss' autograd graph."""

    def __init__(self, samples: int | None, gathers: bool, ranks: int, by_sample: bool) -> None:
        self.samples, self.ranks, self._by_sample = samples, ranks, by_sample
        dims = BatchDims(samples)
        self.batch_dim, self._is_of_held = dims.of, dims.is_of_held
        self._gathered = GatheredResults(dims) if gathers else None

    def terms(self, root: Node) -> list[Term]:
        """Return all terms below a node."""
        found: dict[tuple[Node, int | None], Term] = {}
        waiting: list[_Position | Term] = [_Position(root, (root,))]
        while waiting:
            at = waiting.pop()
            step = at if isinstance(at, Term) else self._classify(at)
            if isinstance(step, Term):
                known = found.setdefault((step.node, step.element), step)
                merged = _merged(step if known.kind == "constant" else known, known, step)
                found[step.node, step.element] = merged
            else:
                waiting.extend(reversed(step))
        terms = _merge_shared_counts(_merge_total_counts(list(found.values())))
        return _without_zeros(self._of_samples(terms) if self._by_sample else terms)

    def _of_samples(self, terms: list[Term]) -> list[Term]:
        """Weight by samples if the step adds up one loss per sample."""
        whole = [term for term in terms if term.element is None]
        groups = [[term for term in whole if term.kind in kinds] for kinds in (("mean",), ("mean", "sum"))]
        for each in groups:
            if len(each) == self.samples and len({term.what for term in each if not term.is_zero}) <= 1:
                return self._of_each_sample(terms, each)
        # Next to another loss, the losses of the samples are those with the same operation, of which each sample may
        # have several.
        for what in dict.fromkeys(term.what for term in groups[0] if not term.is_zero):
            each = [term for term in terms if term.kind == "mean" and term.element is None and term.what == what]
            if self.samples and len(each) % self.samples == 0 and (self.samples > 1 or len(each) == 1):
                terms = self._of_each_sample(terms, each)
        return terms

    def _of_each_sample(self, terms: list[Term], each: list[Term]) -> list[Term]:
        """Return terms of which some are weighted by samples, if they are the losses of the samples."""
        rest = [term for term in terms if term not in each]
        some = [term for term in each if not term.is_zero]
        # Samples with a zero loss are included.
        what = f"{some[0].what if some else 'zero'} of each sample"
        separate = all(map(self._is_mean_of_samples, each)) and self._are_separate_results(some, len(each))
        if separate and not self._cover_the_batch(some):
            alike: dict[str, Any] = {"count": 0.0, "by_data": False, "what": what, "of_sample": True}
            return [*(replace(term, kind="other", **alike) for term in each), *rest]
        if not some or not all(map(self._is_single_sample, some)):
            return terms
        found = [
            replace(
                term, kind="sum", count=0.0, by_data=False, what=what, number=_constant_divisor(term), of_sample=True
            )
            for term in some
        ]
        return [*found, *(replace(term, kind="constant") for term in each if term.is_zero), *rest]

    def _is_mean_of_samples(self, term: Term) -> bool:
        """Return whether a term is divided by the number of samples, apart from its own count."""
        # A factor of 1/2 with two samples is more likely a mean of two losses.
        divisors = [each for each in term.divisors if each.at is not term.shared]
        divisors = [each for each in divisors if not each.rounded or (self.samples or 0) > 2]
        return any(number_of(each.value) == self.samples for each in divisors)

    def _are_separate_results(self, terms: Sequence[Term], number: int) -> bool:
        """Return whether terms stem from separate results, not from selections of one result of the whole batch.

        Args:
            terms: The terms.
            number: Their number with those that are zero, a multiple of the samples.
        """
        sources: list[Node] = []
        for term in terms:
            for node in (term.path[-1], *elements(term.path[-1])):
                mask, source = mask_of(node), next((child for child in inputs_of(node) if child is not None), None)
                if mask is not None and mask.dim() > 1 and len(mask) == self.samples:
                    return False
                if kind_of(node) in PICKED and _masks_several_dims(node) and self._is_batch(source):
                    return False
                if kind_of(node) in PICKED and source is not None and kind_of(source) not in PICKS:
                    sources.append(source)
        return all(count * (self.samples or 1) <= number for count in Counter(sources).values())

    def _is_batch(self, node: Node | None) -> bool:
        """Return whether a result has several samples along its first dim, and is not a part of one sample."""
        if node is None or kind_of(node) in PICKS or (self.samples or 0) < 2:
            return False
        return (shape_of(node) or ())[:1] == (self.samples,) and self.batch_dim(node) == 0

    def _cover_the_batch(self, terms: Sequence[Term]) -> bool:
        """Return whether each mean is over all samples, as those of several heads, though there are as many as samples.

        These have the same size, a multiple of the number of samples, and are computed from one result, of which no
        parts are picked or left by masks. Others are rather losses of the samples, whose number they have.
        """
        if len(terms) < 2 or all(map(self._is_single_sample, terms)):
            return False
        sizes = set()
        for term in terms:
            child = next((child for child in inputs_of(term.path[-1]) if child is not None), None)
            shape = (shape_of(child) or ()) if child is not None else ()
            dim = self.batch_dim(child) if child is not None else REDUCED
            sizes.add(shape[dim] if 0 <= dim < len(shape) else 0)
        if len(sizes) > 1 or not (size := sizes.pop()) or size % (self.samples or 1) or _have_masks_apart(terms):
            return False
        # Enough of them, since each search takes time.
        some = {0: terms[0], len(terms) // 2: terms[len(terms) // 2], len(terms) - 1: terms[-1]}
        return bool(set.intersection(*(self._results_below(term.path[-1]) for term in some.values())))

    def _results_below(self, node: Node) -> set[Node]:
        """Return results of the batch a few operations below a node, down to where parts of a result are taken."""
        found: set[Node] = set()
        waiting = [node]
        while waiting and len(found) < _MOST_RESULTS:
            for child in inputs_of(waiting.pop(0)):
                if child is None or child in found or self.batch_dim(child) == CONSTANT:
                    continue
                if not _takes_part(child):
                    found.add(child)
                    waiting.append(child)
        return found

    def _is_single_sample(self, term: Term) -> bool:
        """Return whether the reduced tensor was selected from the batch a few operations before."""
        if self.samples == 1 and not _is_added_up(term):
            return False
        node = term.path[-1]
        for _ in range(REACH):
            inputs = [child for child in inputs_of(node) if child is not None]
            if not inputs or (self.samples == 1 and kind_of(inputs[0]) == "Cat"):
                # Parts of one sample, or of all of them: one sample does not show which.
                return False
            node = inputs[0]
            origin = inputs_of(node)[0] if kind_of(node) in PICKS else None
            if origin is None:
                continue
            shape = shape_of(origin) or ()
            dim = int(saved(node, "dim") or 0) % max(len(shape), 1)
            # With one sample, any dim of size 1 could be the batch dim.
            if shape[dim : dim + 1] == (self.samples,) and dim == (0 if self.samples == 1 else self.batch_dim(origin)):
                return True
        return False

    def _classify(self, at: _Position) -> Term | Sequence[_Position | Term]:
        """Return the term that ends at a position, or the positions to continue with."""
        node, kind = at.node, kind_of(at.node)
        inputs = [child for child in inputs_of(node) if child is not None]
        if self._gathered is not None and self._gathered.has(node):
            # Neither a mean with a count nor a sum over parts: every part has the full result.
            return at.term("other", "a result of gathered samples")
        if kind in ADDITIONS:
            lone = kind not in ("Stack", "Cat") and len(inputs) < 2
            return at.summands(with_number=lone or None in inputs_of(node))
        if kind == WRITE and self.batch_dim(node) == REDUCED:
            if copies_or_adds(node):
                return at.summands(with_number=None in inputs_of(node))
            if len(inputs) == 1:
                # Without a source that has a gradient, it is taken as a factor: terms[0] *= 0.5.
                return [at.below(inputs[0])]
        if self.batch_dim(node) == CONSTANT:
            return replace(at.term("constant", kind), of_held=self._is_of_held(node))
        if kind in REDUCTIONS:
            return self._reduction(at, inputs[0], kind) if inputs else self._unknown(at, kind)
        if kind in LOSSES:
            return self._fused(at, kind)
        if kind in CONTRACTIONS and self.batch_dim(node) == REDUCED:
            return self._contraction(at, inputs, kind)
        if kind == "Trace" and inputs and self.batch_dim(inputs[0]) == REDUCED:
            # A sum over features of what was already reduced over samples.
            return [at.below(inputs[0])]
        if kind in ("Where", "NanToNum") and len(inputs) == 1 and (taken := _takes_input(node, kind)) is not None:
            return [at.below(inputs[0])] if taken else at.zero_term()
        if kind in ("Mul", "Div") and inputs:
            return self._product(at, inputs, kind)
        # A part of a tensor that was written to is a strided view for autograd.
        if (kind in SAME or kind == "AsStrided") and inputs:
            return [at.below(inputs[0])]
        if kind in CURVES or (kind in ("Minimum", "Maximum") and len(inputs) == 1):
            return [at.below(inputs[0], nonlinear=f"{kind} of a mean is not the mean over the parts of the batch")]
        return self._unknown(at, kind)

    def _unknown(self, at: _Position, kind: str) -> Term:
        coupled = f"{kind} of all samples is not the mean over the parts of the batch" if kind in STATISTICS else ""
        return replace(at, nonlinear=at.nonlinear or coupled).term("other", kind)

    def _product(self, at: _Position, inputs: list[Node], kind: str) -> Term | list[_Position]:
        """Continue with the term if it has constant factors, or with the first factor if both depend on the batch."""
        sides = inputs_of(at.node)
        of_batch = [child for child in inputs if self.batch_dim(child) != CONSTANT] or inputs[:1]
        if len(of_batch) > 1:
            verb = "divided" if kind == "Div" else "multiplied"
            return [replace(at.below(of_batch[0], nonlinear=f"two results of the batch are {verb}"), joined=True)]
        other = saved(at.node, "other")
        factor = _scalar_factor(at.node, of_batch[0]) if kind == "Mul" and len(inputs) == 1 else None
        if factor is not None and factor == 0:
            return at.zero_term()
        if factor is not None and (count := reciprocal(factor)):
            return [at.below(of_batch[0], divisor=count, rounded=is_rounded(factor))]
        if factor is not None and factor > 1:
            by_samples = factor == self.samples and factor > 2 and self.ranks > 1
            nonlinear = f"{_BY_SAMPLES}, {self.samples}" if by_samples else ""
            return [at.below(of_batch[0], divisor=1 / factor, rounded=True, nonlinear=nonlinear)]
        if kind == "Mul" and len(inputs) == 1 and self.batch_dim(of_batch[0]) == REDUCED:
            factor = other if sides[0] is of_batch[0] else saved(at.node, "self")
            if isinstance(factor, Tensor) and factor.numel() > 1:
                what = f"a result that is reduced over samples is multiplied by a tensor of shape {list(factor.shape)}"
                return [at.below(of_batch[0], nonlinear=f"{what}, {BALANCING}")]
        if kind == "Div" and sides[0] is of_batch[0]:
            several = len(inputs) == 1 and isinstance(other, Tensor) and other.numel() > 1
            table = several and self.batch_dim(of_batch[0]) == REDUCED
            if table and not _is_elementwise_division(at, other):
                return [at.below(of_batch[0], nonlinear=_BY_TABLE)]
            return [at.below(of_batch[0], divisor=other if len(inputs) == 1 else None, table=table)]
        if kind == "Div":
            return [at.below(of_batch[0], nonlinear="a result of the batch is a divisor")]
        return [at.below(of_batch[0])]

    def _reduction(self, at: _Position, child: Node, kind: str) -> Term | Sequence[_Position | Term]:
        dim = self.batch_dim(child)
        dims = reduced_dims(at.node, shape_of(child))
        sizes = shape_of(child) or ()
        if dim == REDUCED and self._is_selected(child):
            # A reduction of the result of one sample.
            items = float(math.prod(sizes[each] for each in dims))
            return at.mean(kind, items) if kind == "Mean" else at.divided(kind, sizes, 0, self.samples, self.ranks)
        if dim not in dims:
            # A mean of stacked losses has a divisor; a mean over features counts no items of the batch.
            items = math.prod(sizes[each] for each in dims)
            counts = kind == "Mean" and kind_of(child) in ("Stack", "Cat", WRITE)
            return [at.below(child, divisor=float(items) if counts else None)]
        if any(each.table for each in at.divisors):
            return self._means(at, kind, dims, sizes)
        if kind != "Mean":
            return at.divided(kind, sizes, dim, self.samples, self.ranks)
        count = float(math.prod(sizes[each] for each in dims))
        return at.mean(kind, count, by_data=kind_of(child) in PICKED)

    def _is_selected(self, node: Node) -> bool:
        """Return whether a result was computed elementwise from the result of one sample."""
        for _ in range(REACH):
            inputs = [child for child in inputs_of(node) if child is not None]
            kind = kind_of(node)
            if kind in PICKS and inputs:
                dim = saved(node, "dim")
                if dim is not None and self.batch_dim(inputs[0]) == int(dim) % len(shape_of(inputs[0]) or (1,)):
                    return True
            if not inputs or kind not in SAME | ELEMENTWISE | PICKS:
                return False
            node = inputs[0]
        return False

    def _means(self, at: _Position, kind: str, dims: tuple[int, ...], sizes: tuple[int, ...]) -> Term | list[Term]:
        """Return sums or means over the batch that are each divided by an element of one tensor."""
        table: Tensor = next(each.value.detach() for each in at.divisors if each.table)
        counts: Tensor | None = table * math.prod(sizes[each] for each in dims)
        if kind != "Mean":
            # A divisor of a sum may be a constant; it is a count only if it matches a mask, or is an integer tensor.
            counts = sums_of_mask(at.node, dims, sizes, table)
            counts = table if counts is None and not table.is_floating_point() else counts
        if counts is None:
            return replace(at, nonlinear=at.nonlinear or _BY_TABLE).term("other", kind)
        for divisor in at.divisors:
            if not divisor.table and is_computed(divisor.value):
                counts = counts * divisor.value.detach().reshape(())
        return at.elementwise_means(kind, counts, tuple(table.shape))

    def _contraction(self, at: _Position, inputs: Sequence[Node], kind: str) -> Term:
        """Return the sum over the batch that a matrix product with a constant is; "other" if both operands vary."""
        of_batch = [child for child in inputs if self.batch_dim(child) != CONSTANT]
        if len(of_batch) != 1 or self.batch_dim(of_batch[0]) < 0:
            return self._unknown(at, kind)
        return at.divided(kind, shape_of(of_batch[0]) or (), self.batch_dim(of_batch[0]), self.samples, self.ranks)

    def _fused(self, at: _Position, kind: str) -> Term:
        reduction = saved(at.node, "reduction")
        weight, operand = saved(at.node, "total_weight"), saved(at.node, "self")
        if reduction == 2:
            sizes = tuple(operand.shape) if isinstance(operand, Tensor) else ()
            return at.divided(kind, sizes or (self.samples or 1,), 0, self.samples, self.ranks)
        if reduction == 1 and isinstance(weight, Tensor):
            return at.mean(kind, weight.detach(), by_data=True)
        if reduction == 1 and isinstance(operand, Tensor):
            return at.mean(kind, float(operand.numel()))
        return self._unknown(at, kind)


def _takes_input(node: Node, kind: str) -> bool | None:
    """Return whether a number is that of its input or a replacement without gradient, such as 0 if nothing counts.

    None if it is no single number, or cannot be read.
    """
    value = kept(node, "condition" if kind == "Where" else "self")
    number = scalar(value.detach()) if isinstance(value, Tensor) else None
    if number is None or kind != "Where":
        return None if number is None else math.isfinite(number)
    return bool(number) == (inputs_of(node)[0] is not None)


def _merged(term: Term, one: Term, other: Term) -> Term:
    """Return a term that was reached on two paths, with the edges of both."""
    edges = tuple(dict.fromkeys((*one.edges, *other.edges)))
    cofactors = tuple(dict.fromkeys((*one.cofactors, *other.cofactors)))
    nonlinear = one.nonlinear or other.nonlinear
    return replace(term, edges=edges, cofactors=cofactors, offset=one.offset or other.offset, nonlinear=nonlinear)


def _merge_total_counts(terms: list[Term]) -> list[Term]:
    """Turn sums into means that share a divisor equal to the total number of their items."""
    groups: dict[Node, list[tuple[Term, Divisor]]] = {}
    for term in terms:
        for each in term.divisors:
            if each.at is not None and not each.rounded and number_of(each.value) is not None:
                groups.setdefault(each.at.node, []).append((term, each))
    for members in groups.values():
        sums = [term for term, each in members if term.kind == "sum" or (term.shared and term.shared is each.at)]
        if len(sums) < 2 or len(sums) < len(members) or not all(term.items for term in sums):
            continue
        number = number_of(members[0][1].value)
        if sum(term.items for term in sums) != number:
            continue
        for term, each in members:
            if term.kind == "sum":
                what = f"{term.what} divided by a count"
                mean = replace(term, kind="mean", count=number, by_data=True, what=what, shared=each.at)
                terms = [mean if other is term else other for other in terms]
    return terms


def _merge_shared_counts(terms: list[Term]) -> list[Term]:
    """Merge means that are added up and divided by one shared count into one mean."""
    groups: dict[Node, list[Term]] = {}
    for term in terms:
        if term.shared is not None and term.kind == "mean":
            groups.setdefault(term.shared.node, []).append(term)
    for node, members in groups.items():
        below = [term for term in terms if any(each.at is not None and each.at.node is node for each in term.divisors)]
        below = [term for term in below if term.kind != "constant" and not term.is_zero]
        at = members[0].shared
        alone = len(members) == 1 and (at is None or at.node in members[0].path)
        if alone or len(below) != len(members) or at is None or any(term.nonlinear for term in members):
            continue
        count, surplus = (reduce(larger, each) for each in zip(*((m.count, m.surplus) for m in members), strict=True))
        terms = [term for term in terms if term not in members]
        merged = at.term("mean", f"several {members[0].what}", count, by_data=True)
        terms.append(replace(merged, shared=at, surplus=surplus, added=members[0].added))
    return terms


def larger(one: Tensor | float, other: Tensor | float) -> Tensor | float:
    """Return the larger of two numbers, each a Python number or a tensor."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return torch.maximum(*map(torch.as_tensor, (one, other)))
    return max(one, other)


def _without_zeros(terms: list[Term]) -> list[Term]:
    """Turn zero terms into constants if the loss has other, non-constant terms."""
    if all(term.is_zero or term.kind == "constant" for term in terms):
        return terms
    return [replace(term, kind="constant", count=0.0) if term.is_zero else term for term in terms]


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
        found[key] = _merged(found[key], found[key], mean) if key in found else mean
    return list(found.values())


def _constant_divisor(term: Term) -> float:
    """Return the product of the Python numbers that divide a term above its own reduction."""
    return product_of_numbers([each for each in term.divisors if each.at is not term.shared])


def _scalar_factor(node: Node, child: Node) -> float | None:
    """Return the scalar that a product multiplies ``child`` by; None if the factor is not a number or scalar tensor."""
    return scalar(saved(node, "other" if inputs_of(node)[0] is child else "self"))


def _takes_part(node: Node) -> bool:
    """Return whether an operation may take the part of one sample from a result."""
    kind, whole = kind_of(node), next((child for child in inputs_of(node) if child is not None), None)
    if kind in ("Slice", "IndexSelect") and whole is not None:
        return (shape_of(node) or (0,))[0] != (shape_of(whole) or (0,))[0]
    if kind in PICKED:
        # Elements of several dims are chosen from all samples.
        return not _masks_several_dims(node)
    return kind in PICKS


def _have_masks_apart(terms: Sequence[Term]) -> bool:
    """Return whether the masks of the first and of the last term have no element in common, as those of two graphs."""
    found = []
    for term in (terms[0], terms[-1]):
        nodes = (term.path[-1], *elements(term.path[-1]))
        found.append(next((mask for node in nodes if (mask := mask_of(node)) is not None), None))
    first, last = found
    if first is None or last is None or first.shape != last.shape or first.numel() > SMALL:
        return False
    return not bool((first.bool() & last.bool()).any())


def _masks_several_dims(node: Node) -> bool:
    """Return whether an operation selects elements of several dims, by a mask or by one index tensor for each."""
    chosen = [each for each in (saved(node, "mask"), *(saved(node, "indices") or ())) if isinstance(each, Tensor)]
    return sum(max(each.dim(), 1) if each.dtype == torch.bool else 1 for each in chosen) > 1


def _is_added_up(term: Term) -> bool:
    """Return whether a term is a summand that has its own count, as the losses of samples in a loop."""
    return bool(term.edges) and (term.shared is None or term.shared.node in term.path[:-1])


#: Maximum number of results of a term that are compared with those of others.
_MOST_RESULTS = 100
#: Maximum number of means in one tensor that are each weighted by their own count.
_ONE_BY_ONE = 16
_BY_SAMPLES = "a mean is multiplied by the number of samples"
_BY_TABLE = "a result that is reduced over samples is divided by a tensor"
#: Operations that may permute elements without a change of shape.
_REARRANGING = {"T", "Transpose", "Permute", "Index", "View", "UnsafeView", "ReshapeAlias"}


def _is_elementwise_division(at: _Position, other: Tensor) -> bool:
    """Return whether a division is the first elementwise one of few results by a tensor of the same shape."""
    first = not any(each.table for each in at.divisors)
    return first and not at.joined and shape_of(at.node) == tuple(other.shape) and other.numel() <= _ONE_BY_ONE
