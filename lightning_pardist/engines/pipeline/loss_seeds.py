"""Weights of micro-batch losses: their gradients add up to those of the batch's loss, over data ranks as well.

[Note: when a count is known]
In a mean over N items, a micro-batch with n of them has the weight n / N, and N is known only after all forwards. 1F1B
starts backwards before that. This is correct as long as a single count scales the whole loss: gradients are computed
with n / E, where E is the count of the previous step, and multiplied by E / N at the end. Terms that depend on
parameters alone are added in the last backward. A loss of several means with different counts has no common factor:
all forwards have to run first.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from lightning_pardist.engines.common.combined_values import Value
from lightning_pardist.engines.common.devices import number_on
from lightning_pardist.engines.common.loss_balance import (
    agreed_terms,
    exchange,
    scale_gradients,
    signature,
    uneven_products,
)
from lightning_pardist.engines.common.loss_couplings import couplings
from lightning_pardist.engines.common.loss_setting import LossWeight, terms_of
from lightning_pardist.engines.common.loss_term import Term, larger, weight_of
from lightning_pardist.engines.common.mean_counts import MeanPart
from lightning_pardist.engines.pipeline.microbatch import MicroBatch


@dataclass(frozen=True)
class LossMakeup:
    """Structure of a loss, found from the autograd graph of a recorded run.

    Attributes:
        terms: Descriptions of its terms.
        is_sum: Whether it is a sum over samples.
        by_data: Whether a count depends on values of the batch, and not on its shape alone.
        several_counts: Whether all counts have to be known before the first backward, as seen in one micro-batch.
        coupled: Description of an operation that couples samples, so that the loss is no sum over them; empty if none.
        is_partly_fixed: Whether a term was computed from tensors that the module holds, and from no sample. The last
            stage cannot detect this for values that it receives from other stages.
        by_sample: Whether a micro-batch's loss may be a mean or sum of one loss per sample, each with its own count.
        is_of_sample: Whether it was taken as the loss of the only sample of the micro-batch.
    """

    terms: tuple[str, ...] = ()
    is_sum: bool = False
    by_data: bool = False
    several_counts: bool = False
    coupled: str = ""
    is_partly_fixed: bool = False
    by_sample: bool = True
    is_of_sample: bool = False

    @classmethod
    def of(
        cls, loss: Tensor, batch: Any, samples: int | None, setting: LossWeight, *, by_sample: bool = True
    ) -> LossMakeup:
        """Analyse a loss and its autograd graph.

        Args:
            loss: Loss of the batch.
            batch: The batch that it was computed from.
            samples: Number of samples in the batch.
            setting: The ``loss_weight`` setting.
            by_sample: Whether the loss may be a mean or sum of one loss per sample.
        """
        terms = terms_of(loss, batch, samples, setting, by_sample=by_sample)
        varying = _varying(terms)
        words = tuple(dict.fromkeys(term.describe() for term in varying))
        is_sum = bool(varying) and all(term.kind == "sum" for term in varying)
        coupled = [*(term.nonlinear for term in terms if term.nonlinear), *uneven_products(terms)]
        coupled += couplings(loss, samples=samples) if setting == "auto" else []
        by_data = any(term.by_data for term in terms)
        fixed = setting == "auto" and any(term.of_held for term in terms)
        several = common_ratios([(terms, samples or 1)]) is None or (by_data and len(varying) > 1)
        lone = samples == 1 and any(term.of_sample for term in terms)
        return cls(words, is_sum, by_data, several, next(iter(coupled), ""), fixed, by_sample, lone)


@dataclass(frozen=True)
class LossWeighting:
    """Weights of the losses of a step's micro-batches.

    Attributes:
        weights: Relative weights; each is 1 if the losses are summed.
        is_sum: Whether the batch's loss is the sum of the losses.
        correction: Factor to apply to the step's gradients on all stages.
        several_counts: Whether losses had several counts on any data rank; False for a single micro-batch.
        alike: Whether all losses consisted of the same terms.
        added: Number contained in each weight that is added once for the batch.
    """

    weights: tuple[float, ...]
    is_sum: bool = False
    correction: float = 1.0
    several_counts: bool = False
    alike: bool = True
    added: float = 0.0

    @property
    def total(self) -> float:
        """Weight of the batch's loss."""
        return sum(self.weights) - (len(self.weights) - 1) * self.added

    def value(self, losses: Sequence[Tensor]) -> Tensor:
        """Return the batch's loss, given the micro-batches' losses."""
        total = 1.0 if self.is_sum else self.total
        # Skip zero-weight parts: a mean over no tokens is NaN.
        wide = torch.promote_types(losses[0].dtype, torch.float32)
        counted = [loss.to(wide) * (w / total) for loss, w in zip(losses, self.weights, strict=True) if w]
        return torch.stack(counted or list(losses)).sum(0)


class LossSeeds:
    """Seed gradients for the micro-batches' backwards in every training step, on the rank of the last stage.

    Args:
        setting: The ``loss_weight`` setting.
        group: Returns the process group of the next step's data-parallel ranks with the same stage, whose losses are
            combined; None if there are none.
        device: Device for the messages.
        agree: Combines the counts of ranks that share a micro-batch and see a part of it each; None if no ranks share
            one.
        by_sample: Whether a loss may be a mean or sum of one loss per sample, each with its own count.
    """

    def __init__(
        self,
        setting: LossWeight,
        group: Callable[[], dist.ProcessGroup | None],
        device: torch.device,
        agree: Callable[[Tensor], Tensor] | None = None,
        *,
        by_sample: bool = True,
    ) -> None:
        self.setting: LossWeight = setting
        self._by_sample = by_sample
        self._agree = agree
        self._group_of = group
        self._device = device
        #: Average count per rank in the previous step, and in the current one.
        self._expected: Tensor | None = None
        self._counted: Tensor | None = None
        self.begin([])

    def begin(self, parts: Sequence[MicroBatch], *, scale: float = 1.0, present: bool = True) -> None:
        """Begin a step. Not collective.

        Args:
            parts: The step's micro-batches.
            scale: Factor on all gradients.
            present: Whether the batch counts; if not, it adds zeros.
        """
        group = self._group_of()
        self._group = None if group is None or group.size() == 1 else group
        self._ranks = 1 if self._group is None else self._group.size()
        self._parts, self._scale, self._present = parts, scale, present
        self._expected, self._counted = self._counted, None
        self._samples = float(sum(part.size for part in parts))
        self._terms: list[list[Term]] = [[] for _ in parts]
        self._forwards = self._backwards = 0
        self._all_known = False
        #: By key of a term: its factor, and the count over all micro-batches.
        self._known: dict[str, tuple[Tensor, Tensor]] = {}
        self._agreed = torch.ones(1, dtype=torch.bool, device=self._device)
        self._several = torch.zeros(1, dtype=torch.bool, device=self._device)
        self._correction = self._number(1.0)

    def add(self, index: int, loss: Tensor | None) -> None:
        """Add a micro-batch's loss after its forward. Collective over the ranks that share the micro-batch, if any do.

        Args:
            index: Index of the micro-batch.
            loss: Its loss, if it has one.
        """
        part = self._parts[index]
        terms = [] if loss is None else terms_of(loss, part.value, part.size, self.setting, by_sample=self._by_sample)
        terms = agreed_terms(terms, self._agree, self._device)
        if self.setting == "ranks":
            terms = [replace(term, count=1.0 / len(self._parts)) for term in terms]
        self._terms[index] = terms
        self._forwards += 1

    def before_backward(self, index: int) -> None:
        """Prepare the factors for a micro-batch's backward. Collective over the group in a step's first and last call.

        Args:
            index: Index of the micro-batch.
        """
        self._backwards += 1
        if self._backwards == 1:
            self._all_known = self._forwards == len(self._parts)
            if self._expected is None:
                self._expected = self._estimate_count(index)
        if self._backwards == (1 if self._all_known else len(self._parts)):
            self._settle()

    def seed(self, index: int, loss: Tensor) -> tuple[Tensor, dict[Node, RemovableHandle]]:
        """Return the gradient to seed a backward with, and register hooks that scale the loss's terms. Not collective.

        Args:
            index: Index of the micro-batch.
            loss: Its loss.

        Returns:
            The gradient, and the pre-hooks that scale a node's incoming gradient, by node of the autograd graph.
        """
        terms = self._terms[index]
        factors = [self._factor(key, term, index) for key, term in _keyed(terms)]
        handles = scale_gradients(terms, torch.stack(factors)).coming_in if factors else {}
        return torch.full_like(loss, self._scale), handles

    def finish(self) -> LossWeighting:
        """Return the weights of the step's losses, after the last backward. Not collective."""
        weights = [part_weight(terms, part.size) for terms, part in zip(self._terms, self._parts, strict=True)]
        is_sum = any(weight is None for weight in weights)
        shares = [self._number(1.0 if weight is None else weight) for weight in weights]
        # One device-to-host synchronisation for all values.
        said = (self._correction, self._several.double(), self._agreed.double())
        numbers: list[float] = torch.stack([each.reshape(()) for each in (*shares, *said)]).tolist()
        *found, correction, several, alike = numbers
        leads = [_first_mean(terms) for terms in self._terms]
        added = next((lead.added for lead in leads if lead is not None), 0.0)
        several = several and len(self._parts) > 1
        return LossWeighting(tuple(found), is_sum, correction, bool(several), bool(alike), added)

    # --- factors before all counts are known --------------------------------------------------------------------

    def _factor(self, key: str, term: Term, index: int) -> Tensor:
        """Return the factor for the gradient of a term."""
        if term.is_zero:
            return self._number(0.0)
        if self._all_known:
            return self._known_factor(term, key, self._parts[index].size)
        if term.kind == "constant":
            return 1.0 / self._correction if self._backwards == len(self._parts) else self._number(0.0)
        if term.kind == "sum":
            return self._number(self._ranks * self._present)
        expected = self._number(1.0) if self._expected is None else self._expected
        return self._own(index) * float(self._present) / expected

    def _own(self, index: int) -> Tensor:
        """Return the count of a micro-batch's first mean, or its samples if the loss has no mean."""
        first = _first_mean(self._terms[index])
        return self._number(self._parts[index].size if first is None else first.divisor)

    def _estimate_count(self, index: int) -> Tensor:
        """Estimate the step's average count per rank from one micro-batch. Collective over the group."""
        own = self._own(index) * (self._samples / max(self._parts[index].size, 1))
        counted = torch.stack([own, (own > 0).to(own)])
        if self._group is not None:
            dist.all_reduce(counted, group=self._group)
        return torch.where(counted[1] > 0, counted[0] / counted[1], 1.0)

    # --- factors after all counts are known ---------------------------------------------------------------------

    def _settle(self) -> None:
        """Combine the counts of all micro-batches and ranks. Collective over the group."""
        found = [terms for terms in self._terms if terms]
        alike = _are_alike(found)
        sizes = [part.size for part in self._parts]
        ratios: list[float] | None = None
        names = [[name for name, _ in _keyed(_varying(terms))] for terms in found if _varying(terms)]
        if alike and all(len(each) == 1 and each == names[0] for each in names):
            # One mean each: its ratio to itself is 1, so that no count has to be copied to the host.
            ratios = [1.0] if names else []
        elif alike:
            ratios = common_ratios(zip(self._terms, sizes, strict=True))
        mark = signature([f"{ratio:.4g}" for ratio in ratios or []])
        if not alike:
            for terms in found:
                terms[:] = [replace(term, kind="other") if term.kind == "mean" else term for term in terms]
        merged: dict[str, Term] = {}
        for terms in found:
            for key, term in _keyed(terms):
                if term.is_zero:
                    continue
                merged[key] = _sum_terms(merged[key], term) if key in merged else term
        merged = {key: _floored_once(term) for key, term in merged.items()}
        signs = (float(ratios is None), float(bool(ratios)), mark, mark**2)
        balance = exchange(
            list(merged.values()),
            samples=self._samples,
            present=self._present,
            values=[Value(str(place), MeanPart.of_sum(self._number(sign))) for place, sign in enumerate(signs)],
            group=self._group,
            device=self._device,
        )
        several, ranks, marks, squares = (self._number(each.value) for each in balance.values)
        self._agreed = balance.agreed & alike
        self._several = (several > 0) | (marks**2 != squares * ranks) | ~self._agreed
        counts = [self._number(term.divisor) for term in merged.values()]
        self._known = dict(zip(merged, zip(balance.factors, counts, strict=True), strict=True))
        totals = [total for term, total in zip(merged.values(), balance.totals, strict=True) if term.kind == "mean"]
        total = totals[0] if totals else balance.samples
        average = total / self._ranks
        expected = average if self._expected is None else self._expected
        self._counted = torch.where(total > 0, average, expected)
        if not self._all_known and any(term.kind in ("mean", "other") for term in merged.values()):
            self._correction = torch.where(total > 0, expected / average, 1.0)

    def _known_factor(self, term: Term, key: str, size: int) -> Tensor:
        """Return the factor for the gradient of a term after :meth:`_settle`."""
        if term.kind == "constant":
            return self._number(1.0 / sum(map(bool, self._terms)))
        factor, counted = self._known[key]
        if term.kind == "sum":
            return factor
        by_samples = self._number(size / self._samples)
        if term.kind == "other":
            return factor * by_samples
        by_count = self._number(term.divisor) / torch.where(counted > 0, counted, 1.0)
        return factor * torch.where(self._agreed, by_count, by_samples)

    def _number(self, value: Tensor | float) -> Tensor:
        return number_on(self._device, value, torch.float64)


def _keyed(terms: Sequence[Term]) -> list[tuple[str, Term]]:
    """Pair terms with keys that match them across micro-batches: numbered per operation for means, else the kind."""
    names: list[str] = []
    means: dict[str, int] = {}
    for term in terms:
        means[term.what] = means.get(term.what, 0) + (term.kind == "mean")
        names.append(f"mean {means[term.what]} {term.what}" if term.kind == "mean" else term.kind)
    return list(zip(names, terms, strict=True))


def _sum_terms(one: Term, other: Term) -> Term:
    """Return the combined term of two sets of micro-batches."""
    return replace(one, count=one.count + other.count, surplus=larger(one.surplus, other.surplus))


def _floored_once(term: Term) -> Term:
    """Drop the surplus of a clamped count if the combined count is positive."""
    if not isinstance(term.surplus, Tensor):
        return term
    return replace(term, surplus=torch.where(torch.as_tensor(term.count) > 0, 0.0, term.surplus))


def _are_alike(losses: Sequence[list[Term]]) -> bool:
    """Return whether losses consist of the same terms, or of a subset of one loss's terms (others counted no items)."""
    varying = [_varying(terms) for terms in losses if _varying(terms)]
    others = {tuple(dict.fromkeys(term.kind for term in terms if term.kind != "mean")) for terms in varying}
    means = [Counter(term.what for term in terms if term.kind == "mean") for terms in varying]
    most: Counter[str] = reduce(operator.or_, means, Counter())
    # A loss with fewer means of an operation had no items for the missing ones.
    return len(others) <= 1 and most in [Counter(), *means] and all(each.items() <= most.items() for each in means)


def _varying(terms: Sequence[Term]) -> list[Term]:
    return [term for term in terms if term.kind != "constant" and not term.is_zero]


def _first_mean(terms: Sequence[Term]) -> Term | None:
    return next((term for term in terms if term.kind == "mean"), None)


def _count(term: Term, samples: int) -> float:
    return float(term.count) if term.kind == "mean" else float(samples)


def common_ratios(losses: Iterable[tuple[Sequence[Term], int]]) -> list[float] | None:
    """Return the ratio of each term's count to the count of the loss's first mean, if equal in all micro-batches.

    Args:
        losses: Terms and number of samples of each micro-batch; the iterable is consumed.

    Returns:
        One ratio per term, or an empty list if nothing is counted; None if the ratios differ between micro-batches, so
        that no single factor corrects for counts that are not known yet.
    """
    found: list[float] = []
    differ = False
    for terms, samples in losses:
        varying = _varying(terms)
        differ |= 0 < sum(term.kind == "sum" for term in varying) < len(varying)
        counts = [_count(term, samples) for term in dict(_keyed(varying)).values()]
        own = _count(_first_mean(varying) or varying[0], samples) if varying else 0.0
        differ |= len({term.added for term in varying if term.kind == "mean"}) > 1
        if own:
            ratios = [count / own for count in counts]
            found = found or ratios
            differ |= len(found) != len(ratios) or not all(map(partial(math.isclose, rel_tol=1e-5), ratios, found))
        else:
            differ |= any(counts)
    return None if differ else found


def part_weight(terms: Sequence[Term], samples: int) -> Tensor | float | None:
    """Return the weight of a micro-batch's loss: None for a sum, the number of samples if no single weight is exact."""
    try:
        return weight_of(terms, float(samples))
    except LookupError:
        return float(samples)
