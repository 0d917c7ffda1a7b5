"""Tell the losses of single samples, which a step adds up in a loop, from losses over the whole batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lightning_pardist.compat.autograd_graph import inputs_of, kind_of, saved, shape_of
from lightning_pardist.engines.common.batch_dim import CONSTANT, PICKED, PICKS, REACH, REDUCED
from lightning_pardist.engines.common.divisor_counts import number_of, product_of_numbers
from lightning_pardist.engines.common.loss_term import Term
from lightning_pardist.engines.common.masked_sums import SMALL, elements, mask_of

#: Maximum number of results of a term that are compared with those of others.
_MOST_RESULTS = 100


class SampleLosses:
    """Losses of single samples among the terms of a loss.

    A loss that adds up one loss per sample, each with its own number of boxes or tokens, is weighted by samples: the
    counts in it are those of samples. As many losses of the whole batch as there are samples look similar.

    Args:
        samples: Number of samples in the batch, if it is known.
        batch_dim: Returns the batch dim of a node's result.
    """

    def __init__(self, samples: int | None, batch_dim: Callable[[Node], int]) -> None:
        self._samples, self._batch_dim = samples, batch_dim

    def weighted(self, terms: list[Term]) -> list[Term]:
        """Return terms of which the losses of samples are weighted by samples, if the step adds up one per sample."""
        whole = [term for term in terms if term.element is None]
        groups = [[term for term in whole if term.kind in kinds] for kinds in (("mean",), ("mean", "sum"))]
        for each in groups:
            if len(each) == self._samples and len({term.what for term in each if not term.is_zero}) <= 1:
                return self._of_each_sample(terms, each)
        # Next to another loss, the losses of the samples are those with the same operation, of which each sample may
        # have several.
        for what in dict.fromkeys(term.what for term in groups[0] if not term.is_zero):
            each = [term for term in terms if term.kind == "mean" and term.element is None and term.what == what]
            if self._samples and len(each) % self._samples == 0 and (self._samples > 1 or len(each) == 1):
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
        divisors = [each for each in divisors if not each.rounded or (self._samples or 0) > 2]
        return any(number_of(each.value) == self._samples for each in divisors)

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
                if mask is not None and mask.dim() > 1 and len(mask) == self._samples:
                    return False
                if kind_of(node) in PICKED and _masks_several_dims(node) and self._is_batch(source):
                    return False
                if kind_of(node) in PICKED and source is not None and kind_of(source) not in PICKS:
                    sources.append(source)
        return all(count * (self._samples or 1) <= number for count in Counter(sources).values())

    def _is_batch(self, node: Node | None) -> bool:
        """Return whether a result has several samples along its first dim, and is not a part of one sample."""
        if node is None or kind_of(node) in PICKS or (self._samples or 0) < 2:
            return False
        return (shape_of(node) or ())[:1] == (self._samples,) and self._batch_dim(node) == 0

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
            dim = self._batch_dim(child) if child is not None else REDUCED
            sizes.add(shape[dim] if 0 <= dim < len(shape) else 0)
        if len(sizes) > 1 or not (size := sizes.pop()) or size % (self._samples or 1) or _have_masks_apart(terms):
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
                if child is None or child in found or self._batch_dim(child) == CONSTANT:
                    continue
                if not _takes_part(child):
                    found.add(child)
                    waiting.append(child)
        return found

    def _is_single_sample(self, term: Term) -> bool:
        """Return whether the reduced tensor was selected from the batch a few operations before."""
        if self._samples == 1 and not _is_added_up(term):
            return False
        node = term.path[-1]
        for _ in range(REACH):
            inputs = [child for child in inputs_of(node) if child is not None]
            if not inputs or (self._samples == 1 and kind_of(inputs[0]) == "Cat"):
                # Parts of one sample, or of all of them: one sample does not show which.
                return False
            node = inputs[0]
            origin = inputs_of(node)[0] if kind_of(node) in PICKS else None
            if origin is None:
                continue
            shape = shape_of(origin) or ()
            dim = int(saved(node, "dim") or 0) % max(len(shape), 1)
            # With one sample, any dim of size 1 could be the batch dim.
            if shape[dim : dim + 1] == (self._samples,) and dim == (
                0 if self._samples == 1 else self._batch_dim(origin)
            ):
                return True
        return False


def _constant_divisor(term: Term) -> float:
    """Return the product of the Python numbers that divide a term above its own reduction."""
    return product_of_numbers([each for each in term.divisors if each.at is not term.shared])


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
