"""Combination of micro-batches' logged values, attributes and buffers to those of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pardist.axes.pipeline.reduction_rules import Place, Rules, Shares
from lightning_pardist.engines.common.logged_weights import combined_weight

#: Used as a key of a logged value's place, for its ``batch_size``.
_BATCH_SIZE = ("batch_size",)
#: Extra key in the arguments of a ``log`` call: the :class:`LoggedWeight` of its value.
WEIGHT = "weight of the value"


@dataclass(frozen=True)
class MetricName:
    """Name of a torchmetrics object, sent to other ranks in its place."""

    name: str


def is_numeric(value: Any) -> bool:
    """Return whether a value is a number or a tensor; False for bools."""
    return isinstance(value, (Tensor, int, float)) and not isinstance(value, bool)


def increment_of(place: Place) -> Place:
    """Return the place of a step's increment of a value that persists between steps."""
    return (f"change of {place[0]}", *place[1:])


def merged_numbers(column: list[Any], before: Any, place: Place, shares: Shares, rules: Rules) -> Any:
    """Combine the values that micro-batches have left in an attribute or buffer, or their changes, to the batch's."""
    if len(column) == 1:
        return column[0]
    value = rules.combine(place, column, shares, _default_rule(column, shares))
    if not is_numeric(before) or not _are_alike([before, *column]):
        return value
    changes = [item - before for item in column]
    change = rules.combine(increment_of(place), changes, shares, _default_rule(changes, shares))
    return before + change if increment_of(place) in rules.of or place not in rules.of else value


def _are_alike(values: list[Any]) -> bool:
    if not all(isinstance(value, Tensor) for value in values):
        return not any(isinstance(value, Tensor) for value in values)
    return len({(value.shape, value.dtype, value.device) for value in values}) == 1 and values[0].dtype != torch.bool


def rule_of(column: list[Any], place: Place, shares: Shares, rules: Rules) -> str:
    """Return the rule that :func:`merged_numbers` applies."""
    return "last" if increment_of(place) in rules.of else rules.of.get(place, _default_rule(column, shares))


def _default_rule(column: list[Any], shares: Shares) -> str:
    """Return the default rule for values without a rule from the trial."""
    first = column[0]
    if not isinstance(first, Tensor):
        return "mean" if isinstance(first, float) else "last"
    batched = all(t.ndim and t.shape[0] == size for t, size in zip(column, shares.sizes, strict=True))
    return "cat0" if batched else "mean" if first.is_floating_point() else "last"


def combined_logs(
    logs: Sequence[list[dict[str, Any]]], kept: Sequence[tuple[list[Any], Any]], shares: Shares, rules: Rules
) -> Iterator[dict[str, Any]]:
    """Yield the ``log`` calls that a run over the whole batch would have made.

    Args:
        logs: Arguments of the ``log`` calls of each micro-batch.
        kept: For each attribute that persists between steps, its values after each micro-batch, and after the batch.
        shares: Shares of the micro-batches in the batch.
        rules: How values are combined.
    """
    columns: dict[tuple[str, int], list[tuple[int, dict[str, Any]]]] = {}
    for index, logged in enumerate(logs):
        times: dict[str, int] = {}
        for arguments in logged:
            name = arguments["name"]
            times[name] = times.get(name, -1) + 1
            columns.setdefault((name, times[name]), []).append((index, arguments))
    for (name, time), column in columns.items():
        indices = [index for index, _ in column]
        own = Shares.of([shares.loss[i] for i in indices], [shares.sizes[i] for i in indices])
        some = len(column) < len(logs)
        done = _combine_log([arguments for _, arguments in column], own, rules, ("logged", name, time), some=some)
        values = [arguments["value"] for _, arguments in column]
        # Such as a counter, whose value depends on the one before the step.
        same = [value for items, value in kept if len(items) == len(values) and all(map(_are_equal, items, values))]
        yield {**done, "value": _as_float(same[0])} if same else done


def _combine_log(
    column: list[dict[str, Any]], shares: Shares, rules: Rules, place: Place, *, some: bool
) -> dict[str, Any]:
    """Combine the calls of the micro-batches that made one; ``some`` says that others made none."""
    done = dict(column[-1])
    if all(arguments.get("batch_size") is not None for arguments in column):
        sizes = [int(arguments["batch_size"]) for arguments in column]
        # A constant also holds for the batch; a count is that of a micro-batch, probably so if only some log.
        counted = len(set(sizes)) > 1 or sizes == list(shares.sizes)
        counted |= some and all(1 < size <= own for size, own in zip(sizes, shares.sizes, strict=True))
        done["batch_size"] = rules.combine((*place, _BATCH_SIZE), sizes, shares, "sum" if counted else "last")
        if done["batch_size"] == sum(sizes) and sizes != list(shares.sizes):
            shares = Shares.of(sizes, shares.sizes)
    if all(WEIGHT in arguments for arguments in column) and rules.of.get(place, "mean") in ("mean", "samples", "sum"):
        return done | _combine_weighted(column)
    done.pop(WEIGHT, None)
    reduce_fx = done.get("reduce_fx", "mean")
    name = getattr(reduce_fx, "__name__", reduce_fx)
    values = [arguments["value"] for arguments in column]

    def merged(place: Place, values: list[Any]) -> Any:
        otherwise = name if name in ("sum", "max", "min") else "sum" if all(map(_is_count, values)) else "mean"
        return rules.combine(place, [_as_float(value) for value in values], shares, otherwise)

    if isinstance(values[0], dict):
        done["value"] = {key: merged((*place, key), [value[key] for value in values]) for key in values[0]}
    elif not isinstance(values[0], MetricName):
        done["value"] = merged(place, values)
    return done


def _combine_weighted(column: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine logged values with known weights; return the batch's value and its weight."""
    weight = combined_weight([arguments[WEIGHT] for arguments in column])
    return {"value": torch.full_like(_as_float(column[0]["value"]), weight.value), WEIGHT: weight}


def _are_equal(kept: Any, logged: Any) -> bool:
    numbers = is_numeric(kept) and is_numeric(logged) and all(torch.as_tensor(x).numel() == 1 for x in (kept, logged))
    return numbers and bool(_as_float(kept) == _as_float(logged))


def _is_count(value: Any) -> bool:
    """Return whether a value is an integer tensor, which no mean over samples is."""
    # Booleans are as likely those of any() or all().
    kinds = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    return isinstance(value, Tensor) and value.dtype in kinds


def _as_float(value: Any) -> Tensor:
    """Convert a value to a floating-point scalar as ``log`` does, so that counts can be averaged."""
    tensor = torch.as_tensor(value)
    return tensor.reshape(()) if tensor.is_floating_point() else tensor.reshape(()).to(torch.get_default_dtype())
