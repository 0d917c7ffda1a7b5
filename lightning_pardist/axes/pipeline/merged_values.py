"""What micro-batches log, and leave in attributes and buffers, put together to what the batch does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pardist.axes.pipeline.reduction_rules import Place, Rules, Shares, combined

#: In place of a key of what is logged: its ``batch_size``.
_BATCH_SIZE = ("batch_size",)
#: Beside the arguments of a call of ``log``: what weighs its value among those of other parts, None for a sum.
WEIGHT = "weight of the value"


@dataclass(frozen=True)
class MetricName:
    """Stands for a torchmetrics object on its way to other ranks."""

    name: str


def is_numeric(value: Any) -> bool:
    """Whether a value is a number or a tensor."""
    return isinstance(value, (Tensor, int, float)) and not isinstance(value, bool)


def change_of(place: Place) -> Place:
    """The place of what a step adds to a number that stays from step to step."""
    return (f"change of {place[0]}", *place[1:])


def merged_numbers(column: list[Any], before: Any, place: Place, shares: Shares, rules: Rules) -> Any:
    """What stays after the batch: out of what micro-batches have left, or out of what each has changed."""
    if len(column) == 1:
        return column[0]
    value = rules.combine(place, column, shares, _otherwise(column, shares))
    if not is_numeric(before) or not _are_alike([before, *column]):
        return value
    changes = [item - before for item in column]
    change = rules.combine(change_of(place), changes, shares, _otherwise(changes, shares))
    return before + change if change_of(place) in rules.of or place not in rules.of else value


def _are_alike(values: list[Any]) -> bool:
    if not all(isinstance(value, Tensor) for value in values):
        return not any(isinstance(value, Tensor) for value in values)
    return len({(value.shape, value.dtype, value.device) for value in values}) == 1 and values[0].dtype != torch.bool


def rule_of(column: list[Any], place: Place, shares: Shares, rules: Rules) -> str:
    """The rule by which :func:`merged_numbers` goes."""
    return "last" if change_of(place) in rules.of else rules.of.get(place, _otherwise(column, shares))


def _otherwise(column: list[Any], shares: Shares) -> str:
    """The rule for numbers that the trial has not shown."""
    first = column[0]
    if not isinstance(first, Tensor):
        return "mean" if isinstance(first, float) else "last"
    batched = all(t.ndim and t.shape[0] == size for t, size in zip(column, shares.sizes, strict=True))
    return "cat0" if batched else "mean" if first.is_floating_point() else "last"


def combined_logs(
    logs: Sequence[list[dict[str, Any]]], kept: Sequence[tuple[list[Any], Any]], shares: Shares, rules: Rules
) -> Iterator[dict[str, Any]]:
    """One call of ``log`` for each that a run over the whole batch would have made.

    Args:
        logs: Of each micro-batch.
        kept: Attributes that stay from step to step: what micro-batches made of them, and what the batch does.
        shares: Of the micro-batches.
        rules: How numbers are combined.
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
        done = _combine_log([arguments for _, arguments in column], own, rules, ("logged", name, time))
        values = [arguments["value"] for _, arguments in column]
        # A counter, say: what it comes to depends on what it was before.
        same = [value for items, value in kept if len(items) == len(values) and all(map(_are_equal, items, values))]
        yield {**done, "value": _as_float(same[0])} if same else done


def _combine_log(column: list[dict[str, Any]], shares: Shares, rules: Rules, place: Place) -> dict[str, Any]:
    done = dict(column[-1])
    if all(arguments.get("batch_size") is not None for arguments in column):
        sizes = [int(arguments["batch_size"]) for arguments in column]
        # Written as a number, it is that of the batch as well; counted, it is a micro-batch's.
        counted = len(set(sizes)) > 1 or sizes == list(shares.sizes)
        done["batch_size"] = rules.combine((*place, _BATCH_SIZE), sizes, shares, "sum" if counted else "last")
        if done["batch_size"] == sum(sizes) and sizes != list(shares.sizes):
            shares = Shares.of(sizes, shares.sizes)
    if all(WEIGHT in arguments for arguments in column) and rules.of.get(place, "mean") in ("mean", "samples", "sum"):
        return done | _weighed(column, shares)
    done.pop(WEIGHT, None)
    reduce_fx = done.get("reduce_fx", "mean")
    name = getattr(reduce_fx, "__name__", reduce_fx)
    otherwise = name if name in ("sum", "max", "min") else "mean"
    values = [arguments["value"] for arguments in column]
    if isinstance(values[0], dict):
        done["value"] = {
            key: rules.combine((*place, key), [_as_float(value[key]) for value in values], shares, otherwise)
            for key in values[0]
        }
    elif not isinstance(values[0], MetricName):
        done["value"] = rules.combine(place, [_as_float(value) for value in values], shares, otherwise)
    return done


def _weighed(column: list[dict[str, Any]], shares: Shares) -> dict[str, Any]:
    """A logged value whose graph has shown what weighs it, and what weighs the batch's."""
    values, weights = ([arguments[key] for arguments in column] for key in ("value", WEIGHT))
    if None in weights:
        return {"value": combined("sum", [_as_float(value) for value in values], shares), WEIGHT: None}
    own = Shares.of([float(weight) for weight in weights], shares.sizes)
    return {"value": combined("mean", [_as_float(value) for value in values], own), WEIGHT: float(sum(weights))}


def _are_equal(kept: Any, logged: Any) -> bool:
    numbers = is_numeric(kept) and is_numeric(logged) and all(torch.as_tensor(x).numel() == 1 for x in (kept, logged))
    return numbers and bool(_as_float(kept) == _as_float(logged))


def _as_float(value: Any) -> Tensor:
    """As ``log`` will keep it, so that counts have a mean."""
    tensor = torch.as_tensor(value)
    return tensor.reshape(()) if tensor.is_floating_point() else tensor.reshape(()).to(torch.get_default_dtype())
