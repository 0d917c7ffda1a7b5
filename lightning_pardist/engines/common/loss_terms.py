"""Decompose a loss into means and sums over the batch, with their divisors, from its autograd graph.

A single process divides a loss by a count over the whole batch: non-padding tokens, class weights. If the batch is
spread over ranks or split into micro-batches, each part divides by its own count, and parts are weighted equally
although their counts differ. The autograd graph of a part's loss contains what is needed to correct this: it ends in a
few additions and multiplications by numbers, below these are the reductions over the batch, and each saves its divisor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

from torch import Tensor
from torch.autograd.graph import Node

from lightning_pardist.compat.autograd_graph import copies_or_adds, inputs_of, kept, kind_of, saved, scalar, shape_of
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
from lightning_pardist.engines.common.divisor_counts import Divisor, is_computed, is_rounded, number_of, reciprocal
from lightning_pardist.engines.common.loss_term import BALANCING, BY_SAMPLES, Position, Term, larger, merged_term
from lightning_pardist.engines.common.masked_sums import sums_of_mask
from lightning_pardist.engines.common.sample_losses import SampleLosses


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
        waiting: list[Position | Term] = [Position(root, (root,))]
        while waiting:
            at = waiting.pop()
            step = at if isinstance(at, Term) else self._classify(at)
            if isinstance(step, Term):
                known = found.setdefault((step.node, step.element), step)
                merged = merged_term(step if known.kind == "constant" else known, known, step)
                found[step.node, step.element] = merged
            else:
                waiting.extend(reversed(step))
        terms = _merge_shared_counts(_merge_total_counts(list(found.values())))
        if self._by_sample:
            terms = SampleLosses(self.samples, self.batch_dim).weighted(terms)
        return _without_zeros(terms)

    def _classify(self, at: Position) -> Term | Sequence[Position | Term]:
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

    def _unknown(self, at: Position, kind: str) -> Term:
        coupled = f"{kind} of all samples is not the mean over the parts of the batch" if kind in STATISTICS else ""
        return replace(at, nonlinear=at.nonlinear or coupled).term("other", kind)

    def _product(self, at: Position, inputs: list[Node], kind: str) -> Term | list[Position]:
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
            nonlinear = f"{BY_SAMPLES}, {self.samples}" if by_samples else ""
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

    def _reduction(self, at: Position, child: Node, kind: str) -> Term | Sequence[Position | Term]:
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

    def _means(self, at: Position, kind: str, dims: tuple[int, ...], sizes: tuple[int, ...]) -> Term | list[Term]:
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

    def _contraction(self, at: Position, inputs: Sequence[Node], kind: str) -> Term:
        """Return the sum over the batch that a matrix product with a constant is; "other" if both operands vary."""
        of_batch = [child for child in inputs if self.batch_dim(child) != CONSTANT]
        if len(of_batch) != 1 or self.batch_dim(of_batch[0]) < 0:
            return self._unknown(at, kind)
        return at.divided(kind, shape_of(of_batch[0]) or (), self.batch_dim(of_batch[0]), self.samples, self.ranks)

    def _fused(self, at: Position, kind: str) -> Term:
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


def _without_zeros(terms: list[Term]) -> list[Term]:
    """Turn zero terms into constants if the loss has other, non-constant terms."""
    if all(term.is_zero or term.kind == "constant" for term in terms):
        return terms
    return [replace(term, kind="constant", count=0.0) if term.is_zero else term for term in terms]


def _scalar_factor(node: Node, child: Node) -> float | None:
    """Return the scalar that a product multiplies ``child`` by; None if the factor is not a number or scalar tensor."""
    return scalar(saved(node, "other" if inputs_of(node)[0] is child else "self"))


#: Maximum number of means in one tensor that are each weighted by their own count.
_ONE_BY_ONE = 16
_BY_TABLE = "a result that is reduced over samples is divided by a tensor"


def _is_elementwise_division(at: Position, other: Tensor) -> bool:
    """Return whether a division is the first elementwise one of few results by a tensor of the same shape."""
    first = not any(each.table for each in at.divisors)
    return first and not at.joined and shape_of(at.node) == tuple(other.shape) and other.numel() <= _ONE_BY_ONE
