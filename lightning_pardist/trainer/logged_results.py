"""Reduces logged epoch values over the data axis, so that callbacks and schedulers use the same values on all ranks.

Without ``sync_dist=True`` Lightning reports the first rank's share of an epoch as the epoch's value. A module written
for one process does not set it, so its epoch values are combined here: means weighted by samples, sums, minima and
maxima over ranks, equal to the values of a single process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning_utilities.core.rank_zero import WarningCache
from torch import nn
from torchmetrics import Metric
from typing_extensions import override

from lightning_pardist.compat.lightning_loops import (
    GET_MONITOR_VALUE,
    LoggedMetric,
    LoggedMetrics,
    LogMetadata,
    logged,
    logger_connector,
    replace,
    restore,
    wants_sync,
)
from lightning_pardist.compat.metrics import computed_of, set_computed, set_update_count
from lightning_pardist.trainer.evaluated_means import BatchMean, EvaluatedMeans, mean_of_ranks
from lightning_pardist.trainer.patch_stack import Patch


@dataclasses.dataclass(frozen=True)
class _Share:
    """A rank's part of a logged value.

    Attributes:
        meta: Metadata of the log call.
        sync_dist: Whether it was logged with ``sync_dist=True``.
        value: This rank's accumulated value; None for a torchmetrics object.
        weight: Number of samples in a mean.
        batches: Means by number of the batch, if what they divide by is known.
    """

    meta: LogMetadata
    sync_dist: bool
    value: float | None
    weight: float = 1.0
    batches: dict[int, BatchMean] | None = None


#: (metric's name, state's name) -> (shape of an element, dtype)
_Layouts = dict[tuple[str, str], tuple[torch.Size, torch.dtype]]


class EpochResults:
    """Combines the Trainer's logged values over a group at the end of each training or evaluation epoch.

    Uses one collective per call, whatever the number of values. Ranks may have logged different keys: a rank that lacks
    one contributes nothing to its value and receives the result. torchmetrics objects synchronise themselves in
    ``compute``, which is called here on all ranks in the same order. Values logged with ``rank_zero_only`` or with
    their own ``sync_dist_group`` are left alone.

    Args:
        trainer: Trainer whose results are combined.
        group: Process group of the data axis.
        before: Called before each collective.
        means: Means that evaluation logs, with what they divide by; None to weigh all by samples.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        group: dist.ProcessGroup,
        before: Callable[[], None],
        means: EvaluatedMeans | None = None,
    ) -> None:
        self.group = group
        self._means = means
        self._announce = before
        self._trainer = trainer
        self._connector: Any = logger_connector(trainer)
        self._epoch_loop: Any = trainer.fit_loop.epoch_loop

    def attach(self) -> None:
        """Patch the Trainer to combine values from now on."""
        # The two points at which all ranks are at the end of an epoch: before the epoch-end hooks, which may read
        # logged values, and after them, since they may log.
        self._after("epoch_end_reached", self.combine)
        self._before("on_epoch_end", self.combine)
        replace(self._epoch_loop, GET_MONITOR_VALUE, self._monitored)

    def detach(self) -> None:
        """Restore the Trainer."""
        for name in ("epoch_end_reached", "on_epoch_end"):
            self._connector.__dict__.pop(name, None)
        restore(self._epoch_loop, GET_MONITOR_VALUE)

    def _monitored(self, key: str) -> Any:
        """Return the metric that a scheduler steps by: the mean over ranks that have it. Collective over the group.

        Replacement for the loop's lookup, where a value logged in a step is still local to its rank.
        """
        value = self._trainer.callback_metrics.get(key)
        self._announce()
        gathered: list[float | None] = [None] * self.group.size()
        dist.all_gather_object(gathered, None if value is None else float(value), group=self.group)
        known = [each for each in gathered if each is not None]
        if not known:
            return None
        mean = torch.tensor(sum(known) / len(known), device=self._trainer.strategy.root_device)
        return mean if value is None else mean.to(value.dtype)

    def combine(self) -> None:
        """Combine the logged values that are not combined yet. Collective over the group."""
        results = logged(self._trainer)
        if results is None:
            return
        self._announce()
        shares = {key: self._share(key, item) for key, item in results.valid_items() if _wants_combining(item)}
        module = self._trainer.lightning_module
        gathered: list[tuple[dict[str, _Share], _Layouts]] = [({}, {}) for _ in range(self.group.size())]
        dist.all_gather_object(gathered, (shares, _list_states(module)), group=self.group)
        combined: dict[str, list[_Share]] = {}
        for rank_shares, layouts in gathered:
            _fill_empty_states(module, layouts)
            for key, share in rank_shares.items():
                combined.setdefault(key, []).append(share)
        for key, parts in combined.items():
            if parts[0].value is None:
                self._compute_metric(results, key, parts[0])
            else:
                self._set(results, key, parts)

    def _share(self, key: str, item: LoggedMetric) -> _Share:
        meta = dataclasses.replace(item.meta, _sync=None)
        if not item.is_tensor:
            return _Share(meta, item.meta.sync.should, None)
        # Python floats are float64, so no precision is lost.
        weight = float(item.cumulated_batch_size) if item.meta.is_mean_reduction else 1.0
        batches = None if self._means is None else self._means.of(key, weight)
        return _Share(meta, item.meta.sync.should, float(item.value), weight, batches)

    def _compute_metric(self, results: LoggedMetrics, key: str, share: _Share) -> None:
        item = results.get(key)
        if item is None:
            # This rank saw no samples: its metric object takes part with its empty state.
            item = results[key] = self._new_item(share)
            item.value = attrgetter(share.meta.metric_attribute or "")(self._trainer.lightning_module)
        if item.has_reset:
            # Not logged since the reset: the cached result is from an earlier epoch.
            set_computed(item, None)
            item.has_reset = False
        item.compute()

    def _new_item(self, share: _Share) -> LoggedMetric:
        """Create the entry for a value that only other ranks have logged, as if it had been logged on this rank."""
        meta = dataclasses.replace(share.meta)
        meta.sync = wants_sync(share.sync_dist, self._trainer.strategy.reduce)
        item = LoggedMetric(meta, is_tensor=share.value is not None)
        set_update_count(item, 1)
        return item

    def _set(self, results: LoggedMetrics, key: str, parts: list[_Share]) -> None:
        item = results.get(key)
        if item is None:
            item = results[key] = self._new_item(parts[0]).to(self._trainer.strategy.root_device)
        item.has_reset = False
        value = torch.tensor(_merge(item.meta, parts), dtype=item.value.dtype, device=item.value.device)
        set_computed(item, value)
        item._pardist_combined = value

    def _after(self, name: str, extra: Callable[[], None]) -> None:
        original = getattr(self._connector, name)

        def wrapped() -> None:
            original()
            extra()

        setattr(self._connector, name, wrapped)

    def _before(self, name: str, extra: Callable[[], None]) -> None:
        original = getattr(self._connector, name)

        def wrapped() -> None:
            extra()
            original()

        setattr(self._connector, name, wrapped)


class _WithoutAdvice(WarningCache):
    @override
    def warn(self, message: str, *args: Any, **kwargs: Any) -> None:
        if "sync_dist=True" not in message:
            super().warn(message, *args, **kwargs)


def no_sync_advice() -> Patch:
    """Return a patch that suppresses the advice to set ``sync_dist=True``: epoch values are right without it."""
    return Patch(result, "warning_cache", _WithoutAdvice(result.warning_cache))


def _wants_combining(item: LoggedMetric) -> bool:
    meta = item.meta
    if not meta.on_epoch or meta.sync.rank_zero_only or meta.sync.group is not None:
        return False
    # Logging again clears the computed value, so a value that is still set is the combined one.
    computed = computed_of(item)
    if not item.is_tensor:
        return computed is None
    return computed is None or computed is not getattr(item, "_pardist_combined", None)


def _list_states(module: nn.Module) -> _Layouts:
    """Return shape (without the first dim) and dtype of the non-empty list states of a module's torchmetrics."""
    return {
        (name, state): (values[0].shape[1:], values[0].dtype)
        for name, metric in module.named_modules()
        if isinstance(metric, Metric)
        for state, values in metric.metric_state.items()
        if isinstance(values, list) and values and values[0].dim()
    }


def _fill_empty_states(module: nn.Module, layouts: _Layouts) -> None:
    """Put empty tensors of the right layout into empty list states, which torchmetrics would gather as 1-D floats."""
    for (name, state), (shape, dtype) in layouts.items():
        metric = module.get_submodule(name)
        if isinstance(metric, Metric) and getattr(metric, state) == []:
            setattr(metric, state, [torch.empty((0, *shape), dtype=dtype, device=metric.device)])


def _merge(meta: LogMetadata, parts: list[_Share]) -> float:
    values = [share.value for share in parts if share.value is not None]
    batches = [share.batches for share in parts if share.batches is not None]
    if meta.is_mean_reduction and len(batches) == len(parts):
        return mean_of_ranks(batches)
    if meta.is_mean_reduction:
        total = sum(share.weight for share in parts)
        return sum(values) / total if total else float("nan")
    if meta.is_max_reduction:
        return max(values)
    if meta.is_min_reduction:
        return min(values)
    return sum(values)
