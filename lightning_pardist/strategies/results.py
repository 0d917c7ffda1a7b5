"""Logged epoch values over the whole data axis, so that every rank decides by the same numbers.

Without ``sync_dist=True`` Lightning reports the first rank's share of an epoch as the epoch's value. A module written
for one process does not set it, so its epoch values are combined here: means weighted by samples, sums, minima and
maxima over ranks, as one process would have computed them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)

_Share = tuple[_Metadata, float, float]


class EpochResults:
    """Combines the Trainer's logged values over a group whenever an epoch of training or evaluation ends.

    One collective an epoch end for all plain values. Ranks need not have logged the same keys: a rank that
    lacks one takes no part in its value, and receives it. Values logged with ``rank_zero_only`` or with a
    ``sync_dist_group`` of their own are left alone; torchmetrics objects combine themselves.

    Args:
        trainer: Whose results are combined.
        group: The data axis' process group.
        before: Called before each collective.
    """

    def __init__(self, trainer: Trainer, *, group: dist.ProcessGroup, before: Callable[[], None]) -> None:
        self.group = group
        self._announce = before
        self._trainer = trainer
        self._connector: Any = trainer._logger_connector

    def attach(self) -> None:
        """Combine from now on."""
        # The two moments at which all ranks are known to be at the end of an epoch: before the epoch-end hooks, which
        # may read what was logged, and after them, since they may log.
        self._after("epoch_end_reached", self.combine)
        self._before("on_epoch_end", self.combine)

    def detach(self) -> None:
        """Leave the Trainer as it was."""
        for name in ("epoch_end_reached", "on_epoch_end"):
            self._connector.__dict__.pop(name, None)

    def combine(self) -> None:
        """Combine what was logged and not combined yet. Collective over the group."""
        results = self._trainer._results
        if results is None:
            return
        self._announce()
        for _, item in results.valid_items():
            # torchmetrics objects combine themselves when they are computed, and keep the result. Done here, on all
            # ranks, because later the first rank alone may ask (a progress bar), and would wait for the others.
            if not item.is_tensor and item.meta.on_epoch:
                item.compute()
        shares = {key: _share(item) for key, item in results.valid_items() if _wants_combining(item)}
        gathered: list[dict[str, _Share]] = [{} for _ in range(self.group.size())]
        dist.all_gather_object(gathered, shares, group=self.group)
        combined: dict[str, list[_Share]] = {}
        for rank_shares in gathered:
            for key, share in rank_shares.items():
                combined.setdefault(key, []).append(share)
        for key, parts in combined.items():
            self._set(results, key, parts)

    def _set(self, results: _ResultCollection, key: str, parts: list[_Share]) -> None:
        item = results.get(key)
        if item is None:
            meta = parts[0][0]
            meta.sync = _Sync(fn=_Sync.no_op)
            item = results[key] = _ResultMetric(meta, is_tensor=True).to(self._trainer.strategy.root_device)
            item._update_count = 1
        item.has_reset = False
        value = torch.tensor(_merge(item.meta, parts), dtype=item.value.dtype, device=item.value.device)
        item._computed = item._pardist_combined = value

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


def _wants_combining(item: _ResultMetric) -> bool:
    meta = item.meta
    if not item.is_tensor or not meta.on_epoch or meta.sync.rank_zero_only or meta.sync.group is not None:
        return False
    # Logging again clears the computed value, so this tells whether it is the combined one.
    computed = getattr(item, "_computed", None)
    return computed is None or computed is not getattr(item, "_pardist_combined", None)


def _share(item: _ResultMetric) -> _Share:
    # Python floats are float64: nothing is lost on the way.
    weight = float(item.cumulated_batch_size) if item.meta.is_mean_reduction else 1.0
    return dataclasses.replace(item.meta, _sync=None), float(item.value), weight


def _merge(meta: _Metadata, parts: list[_Share]) -> float:
    values = [value for _, value, _ in parts]
    if meta.is_mean_reduction:
        total = sum(weight for _, _, weight in parts)
        return sum(values) / total if total else float("nan")
    if meta.is_max_reduction:
        return max(values)
    if meta.is_min_reduction:
        return min(values)
    return sum(values)
