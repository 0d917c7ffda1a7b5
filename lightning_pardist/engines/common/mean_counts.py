"""Record what the means of a step divide by: targets that are not ignored, elements that a mask selects.

A mean over part of a batch weighs as much as it has items in the mean over the whole batch. In training these counts
are found in the graph of the loss (:mod:`~lightning_pardist.engines.common.loss_terms`); here, where there is no
graph, they are noted as the means are computed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pardist.compat import patches

_LABELLED = {name: inspect.signature(getattr(F, name)) for name in patches.LABEL_LOSSES}
_ELEMENTWISE = {name: inspect.signature(getattr(F, name)) for name in patches.ELEMENT_LOSSES}

Count = Tensor | int


class MeanCounts:
    """Counts of the means that a step computes, in eager code.

    Known are the losses of ``torch.nn.functional`` that average over labels or elements, sums divided by sums
    (``(losses * mask).sum() / mask.sum().clamp(min=1)``), and means of what was boolean (an accuracy over selected
    tokens). A function of torch that was imported by name is not seen.
    """

    def __init__(self) -> None:
        #: Means by address, as detached aliases: they keep the memory, and not the graph of a training step.
        self._means: dict[int, tuple[Tensor, Count]] = {}
        #: Results by id, with the tensors themselves, which keeps the ids theirs; during the step only.
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}
        self._masks: dict[int, Tensor] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context of a step: forget the previous one's means, and record. Not collective."""
        self.forget()
        reductions = patches.report_reductions(self._note)
        try:
            with patches.report_scalar_casts(self._follow, self._follow, mask=self._note_mask), reductions:
                yield
        finally:
            self._sums, self._masks = {}, {}

    def forget(self) -> None:
        """Forget the means that were recorded last."""
        self._means, self._sums, self._masks = {}, {}, {}

    def of(self, value: Any) -> Count | None:
        """Return the count of a mean, given it, a detached alias or its Python number; None if it is not known."""
        if isinstance(value, float):
            numbers = ((float(mean), count) for mean, count in self._means.values())
            return next((count for mean, count in numbers if mean == value or math.isnan(mean + value)), None)
        if not isinstance(value, Tensor) or not self._means or value.numel() != 1:
            return None
        known = self._means.get(value.data_ptr())
        return None if known is None else known[1]

    # --- what is recorded ---------------------------------------------------------------------------------------

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        if name in _LABELLED:
            self._record(result, _label_count(_bound(_LABELLED[name], args, kwargs)))
        elif name in _ELEMENTWISE:
            self._record(result, _element_count(_bound(_ELEMENTWISE[name], args, kwargs)))
        elif name in ("sum", "count_nonzero"):
            self._sums[id(result)] = result, result
        elif name == "mean" and args and id(args[0]) in self._masks:
            self._record(result, args[0].numel())
        elif name in ("div", "true_divide") and len(args) == 2 and not kwargs:
            above, below = (self._sums.get(id(each)) for each in args)
            if above is not None and below is not None:
                self._record(result, below[1])

    def _record(self, mean: Tensor, count: Count | None) -> None:
        if count is not None and (place := mean.data_ptr()):
            self._means[place] = mean.detach(), count

    def _follow(self, before: Tensor, after: Any) -> None:
        """Note a sum that was clamped or cast: its count is that of before."""
        known = self._sums.get(id(before))
        if known is not None and isinstance(after, Tensor):
            self._sums[id(after)] = after, known[1]

    def _note_mask(self, before: Tensor, after: Any) -> None:
        if isinstance(after, Tensor):
            self._masks[id(after)] = after


def _bound(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _averages(call: Mapping[str, Any]) -> bool:
    return bool(call["reduction"] == "mean" and call.get("size_average") is None and call.get("reduce") is None)


def _label_count(call: Mapping[str, Any]) -> Count | None:
    """Return what ``cross_entropy`` and ``nll_loss`` divide by: labels that are not ignored, times their weights."""
    target, weight = call["target"], call["weight"]
    if not _averages(call):
        return None
    if target.is_floating_point():
        # Probabilities, with the classes along dim 1 of a batch.
        return int(target.numel() // target.shape[1 if target.dim() > 1 else 0])
    counts: Tensor = target != call["ignore_index"]
    if weight is not None:
        counts = torch.where(counts, weight[torch.where(counts, target, 0)], 0)
    return counts.sum()


def _element_count(call: Mapping[str, Any]) -> Count | None:
    if not _averages(call):
        return None
    return int(torch.broadcast_shapes(call["input"].shape, call["target"].shape).numel())
