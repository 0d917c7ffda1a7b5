"""Rules that combine micro-batches' values to those of the batch, found by a trial.

A logged value may be a mean over samples or over non-padding tokens, a sum, a count, an extreme or a learning rate,
which the module's code does not declare. The step is therefore run on a whole sample batch and on each of its
micro-batches, in evaluation mode and without gradients. For every number that it returns, logs or stores, the rule
that maps the micro-batches' values to the batch's is selected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_pardist.engines.pipeline.microbatch import weighted_mean

#: Key of a value among the results and side effects of a step.
Place = tuple[Hashable, ...]

#: If several rules fit, the first is taken. "mean" is weighted as the loss, "samples" by samples.
#: "cat0" to "cat2" concatenate tensors along that dim.
#: "max" and "min" precede "last": the extreme may happen to be the last micro-batch's, but is more often meant.
_RULES = ("mean", "samples", "sum", "max", "min", "last", "first", "cat0", "cat1", "cat2")
#: Functions of a mean, such as root mean square or perplexity: (inverse, function). They must fit closely.
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
    """Shares of micro-batches in the batch; ``loss`` and ``samples`` each sum to 1.

    Attributes:
        loss: Weights in the batch's loss.
        samples: Fractions of the batch's samples.
        sizes: Numbers of samples.
    """

    loss: tuple[float, ...]
    samples: tuple[float, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, weights: Sequence[float], sizes: Sequence[int]) -> Shares:
        """Build shares from unnormalized weights and sizes."""
        return cls(_normalized(weights), _normalized(sizes), tuple(sizes))

    def only(self, which: Sequence[int]) -> Shares:
        """Return the shares of some micro-batches, normalized among these."""
        if len(which) == len(self.sizes):
            return self
        return Shares.of([self.loss[index] for index in which], [self.sizes[index] for index in which])


@dataclass(frozen=True)
class Rules:
    """Rules that combine the values of one step, and other findings of its trial.

    Attributes:
        of: Rules by place.
        loss_weight: How losses are weighted, if the trial contradicts the loss' autograd graph.
        is_explained: Whether some weighting of the micro-batches' losses yields the batch's loss.
        unexplained: Logged values, attributes and buffers for which no rule was found.
        zeros: Logged values that were 0, so that they are combined as means though they may be sums.
        untried: Why the step could not be tried; empty if it was.
        mixing: Name of a layer that mixes samples; None if none was found.
        metrics: Names of metrics whose states after the micro-batches differ from those after the batch.
        orders: Description of how the step itself mixes samples; None if it does not.
    """

    of: Mapping[Place, str] = field(default_factory=dict)
    loss_weight: Literal["samples", "sum"] | None = None
    is_explained: bool = True
    unexplained: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    untried: str = ""
    mixing: str | None = None
    orders: str | None = None
    metrics: tuple[str, ...] = ()

    def combine(self, place: Place, column: Sequence[Any], shares: Shares, otherwise: str = "mean") -> Any:
        """Combine the micro-batches' values at one place to the batch's.

        Args:
            place: Key of the value.
            column: Values of the micro-batches.
            shares: Shares of the micro-batches in the batch.
            otherwise: Rule for a place without one.
        """
        return combined(self.of.get(place, otherwise), column, shares)


def zeros_message(name: str, zeros: Sequence[str]) -> str:
    """Return the message about logged values of a step that were 0 when it was tried."""
    return (
        f"{name} logged {', '.join(zeros)} as 0 in its trial, where a mean over samples and a sum look alike: combined"
        " as a mean. Log counts as integer tensors, and other sums with reduce_fx='sum'."
    )


class Collector(Rules):
    """Collects values by place instead of combining them.

    Attributes:
        found: Values of the micro-batches, by place.
        meant: Default rules by place, such as ``reduce_fx`` of logged values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Place, list[Any]]
        self.meant: dict[Place, str]
        object.__setattr__(self, "found", {})
        object.__setattr__(self, "meant", {})

    def combine(self, place: Place, column: Sequence[Any], shares: Shares, otherwise: str = "mean") -> Any:
        """Record the values and return the first one."""
        self.found[place], self.meant[place] = list(column), otherwise
        return column[0]


def combined(rule: str, column: Sequence[Any], shares: Shares) -> Any:
    """Apply one rule to the micro-batches' values."""
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
    """Find the rule at each place that maps the micro-batches' values to the batch's; omit places without one.

    Args:
        whole: Values of the batch.
        parts: Values of the micro-batches.
        shares: Shares of the micro-batches in the batch.
        close: Relative error within which a rule is preferred. It is tight, since an untrained module's values are
            similar to each other, so that wrong rules come near.
        tolerance: Largest relative error accepted if no rule is as close.
        rough: Whether the step draws random numbers: if no rule fits, the closer of mean and sum is then taken.
        meant: Rules that take precedence if several fit.
    """
    found: dict[Place, str] = {}
    for place, column in parts.items():
        if place not in whole:
            continue
        named = (meant or {}).get(place)
        # Only these take precedence: the other defaults have not been requested by the user.
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
    """Find logged values that are functions of the loss; this works even if the step draws random numbers.

    Args:
        parts: Values of the micro-batches.
        losses: Losses of the micro-batches.
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
        if all(relative_error(value, loss) <= close for value, loss in pairs):
            # The loss itself. If it is 0 or 1, it equals its root or its square as well.
            continue
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
    """Return the maximum absolute difference of two numbers or tensors, relative to their maximum magnitude."""
    if isinstance(candidate, list):
        return math.inf
    first, second = (torch.as_tensor(value).detach().double().cpu() for value in (whole, candidate))
    if first.shape != second.shape or not first.numel():
        return 0.0 if first.shape == second.shape else math.inf
    scale = float(torch.maximum(first.abs().max(), second.abs().max()))
    error = float((first - second).abs().max())
    return 0.0 if error == 0.0 else error / scale if math.isfinite(error) else math.inf
