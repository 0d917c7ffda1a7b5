"""How the numbers of micro-batches make up the number of the batch, found out by trying.

A logged value may be a mean over samples or over tokens that are not padding, a sum, a count, an extreme, a learning
rate. Nothing in the module says which. So the step is run once on a whole sample batch and once on
each of its micro-batches, in evaluation mode and without gradients, and for every number that it returns, logs or keeps
the rule is taken that leads from the parts to the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_pardist.engines.pipeline.microbatch import weighted_mean

#: Place of a number among the effects of a step.
Place = tuple[Hashable, ...]

#: Of several rules that fit, the first is taken. "mean" is weighted as the loss is, "samples" by samples.
#: "cat0" and its kind put tensors side by side, along that dim.
#: The largest number of a batch is that of its last sample now and then, and asked for more often.
_RULES = ("mean", "samples", "sum", "max", "min", "last", "first", "cat0", "cat1", "cat2")
#: Functions of a mean, as a root of a mean of squares or a perplexity: inverse and function. They have to fit closely.
_OF_A_MEAN: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "root": (torch.square, torch.sqrt),
    "exp": (torch.log, torch.exp),
    "log": (torch.exp, torch.log),
    "decibel": (lambda value: 10 ** (value / -10), lambda value: -10 * torch.log10(value)),
    "inverse": (torch.reciprocal, torch.reciprocal),
    "square": (torch.sqrt, torch.square),
}


@dataclass(frozen=True)
class Shares:
    """What micro-batches make up of a batch; each adds up to 1.

    Attributes:
        loss: Shares in the loss.
        samples: Shares of the samples.
        sizes: Samples.
    """

    loss: tuple[float, ...]
    samples: tuple[float, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, weights: Sequence[float], sizes: Sequence[int]) -> Shares:
        """Shares out of any weights and sizes."""
        return cls(_normalized(weights), _normalized(sizes), tuple(sizes))

    def only(self, which: Sequence[int]) -> Shares:
        """Shares of some micro-batches in what they make up together."""
        if len(which) == len(self.sizes):
            return self
        return Shares.of([self.loss[index] for index in which], [self.sizes[index] for index in which])


@dataclass(frozen=True)
class Rules:
    """What was found out about one step.

    Attributes:
        of: Rules by place.
        loss_weight: How losses are weighed, where a trial shows something else than the loss' graph.
        is_explained: Whether the losses of micro-batches can be weighed so that they make up the batch's.
        unexplained: Logged values, attributes and buffers of which none does.
        untried: Why the step could not be tried; empty if it was.
        mixing: Name of a layer that mixes samples; None if none was found.
        metrics: Names of metrics that make something else of micro-batches than of the batch.
        orders: How the step itself puts samples together, in words; None if it does not.
    """

    of: Mapping[Place, str] = field(default_factory=dict)
    loss_weight: Literal["samples", "sum"] | None = None
    is_explained: bool = True
    unexplained: tuple[str, ...] = ()
    untried: str = ""
    mixing: str | None = None
    orders: str | None = None
    metrics: tuple[str, ...] = ()

    def combine(self, place: Place, column: Sequence[Any], shares: Shares, otherwise: str = "mean") -> Any:
        """The batch's number.

        Args:
            place: Where the numbers stand.
            column: The micro-batches' numbers.
            shares: Of the micro-batches.
            otherwise: Rule for a place that is not known.
        """
        return combined(self.of.get(place, otherwise), column, shares)


class Collector(Rules):
    """Collects numbers by place instead of combining them.

    Attributes:
        found: The micro-batches' numbers.
        meant: By which rule they are combined if nothing is known, as ``reduce_fx`` of what is logged says.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Place, list[Any]]
        self.meant: dict[Place, str]
        object.__setattr__(self, "found", {})
        object.__setattr__(self, "meant", {})

    def combine(self, place: Place, column: Sequence[Any], shares: Shares, otherwise: str = "mean") -> Any:
        """Note the numbers; the first one."""
        self.found[place], self.meant[place] = list(column), otherwise
        return column[0]


def combined(rule: str, column: Sequence[Any], shares: Shares) -> Any:
    """Apply one rule to the micro-batches' numbers."""
    if rule in ("mean", "samples"):
        return weighted_mean(column, shares.loss if rule == "mean" else shares.samples)
    if rule.startswith("cat"):
        return torch.cat(list(column), int(rule[3:]))
    if rule in _OF_A_MEAN:
        inverse, function = _OF_A_MEAN[rule]
        value = function(weighted_mean([inverse(torch.as_tensor(each).double()) for each in column], shares.loss))
        return value.to(column[0].dtype) if isinstance(column[0], Tensor) else float(value)
    if rule in ("first", "last"):
        return column[0 if rule == "first" else -1]
    if isinstance(column[0], Tensor):
        return getattr(torch.stack(list(column)), _TORCH_NAMES[rule])(dim=0)
    folds: dict[str, Callable[[Sequence[Any]], Any]] = {"sum": sum, "max": max, "min": min}
    return folds[rule](column)


_TORCH_NAMES = {"sum": "sum", "max": "amax", "min": "amin"}


def find_rules(
    whole: Mapping[Place, Any],
    parts: Mapping[Place, Sequence[Any]],
    shares: Shares,
    *,
    close: float,
    tolerance: float,
    rough: bool = False,
    meant: Mapping[Place, str] | None = None,
) -> dict[Place, str]:
    """The rules that lead from micro-batches' numbers to the batch's; none where none does.

    Args:
        whole: The batch's numbers.
        parts: The micro-batches'.
        shares: Of the micro-batches.
        close: Relative error of a rule that is right; numbers of an untrained module are alike, and others come near.
        tolerance: Largest relative error, where no rule is as close.
        rough: Whether the step draws random numbers, so that only the closer of mean and sum can be told.
        meant: Rules that come first where several fit as well.
    """
    found: dict[Place, str] = {}
    for place, column in parts.items():
        if place not in whole:
            continue
        named = (meant or {}).get(place)
        # The others come about without anybody having asked for them.
        rules = sorted(_RULES, key=named.__eq__, reverse=True) if named in ("sum", "max", "min") else _RULES
        errors = {rule: _error_of(rule, whole[place], column, shares) for rule in rules}
        if min(errors.values()) > close:
            errors |= {rule: _error_of(rule, whole[place], column, shares) for rule in _OF_A_MEAN}
            rules = (*_OF_A_MEAN, *rules)
            errors = {rule: error for rule, error in errors.items() if rule not in _OF_A_MEAN or error <= close}
        fitting = [rule for limit in (close, tolerance) for rule in rules if errors.get(rule, math.inf) <= limit]
        if rough and not fitting:
            fitting = [min(("mean", "sum"), key=errors.__getitem__)]
        if fitting:
            found[place] = fitting[0]
    return found


def find_derived(parts: Mapping[Place, Sequence[Any]], losses: Sequence[Any], *, close: float) -> dict[Place, str]:
    """Logged values that are functions of the loss, which random numbers in a step do not hide.

    Args:
        parts: The micro-batches' numbers.
        losses: Their losses.
        close: As in :func:`find_rules`.
    """
    found: dict[Place, str] = {}
    if any(torch.as_tensor(loss).numel() != 1 for loss in losses):
        return found
    for place, column in parts.items():
        if place[0] != "logged" or any(torch.as_tensor(value).numel() != 1 for value in column):
            continue
        pairs = [
            (torch.as_tensor(v).double(), torch.as_tensor(x).double()) for v, x in zip(column, losses, strict=True)
        ]
        for rule, (_, function) in _OF_A_MEAN.items():
            if all(relative_error(value, function(loss)) <= close for value, loss in pairs):
                found[place] = rule
                break
    return found


def _normalized(values: Sequence[float]) -> tuple[float, ...]:
    total = float(sum(values))
    return tuple(value / total if total else 1.0 / len(values) for value in values)


def _error_of(rule: str, whole: Any, column: Sequence[Any], shares: Shares) -> float:
    try:
        return relative_error(whole, combined(rule, column, shares))
    except (IndexError, RuntimeError, TypeError, ValueError):
        return math.inf


def relative_error(whole: Any, candidate: Any) -> float:
    """The largest difference between two numbers or tensors over their largest magnitude."""
    if isinstance(candidate, list):
        return math.inf
    first, second = (torch.as_tensor(value).detach().double().cpu() for value in (whole, candidate))
    if first.shape != second.shape or not first.numel():
        return 0.0 if first.shape == second.shape else math.inf
    scale = float(torch.maximum(first.abs().max(), second.abs().max()))
    error = float((first - second).abs().max())
    return 0.0 if error == 0.0 else error / scale if math.isfinite(error) else math.inf
