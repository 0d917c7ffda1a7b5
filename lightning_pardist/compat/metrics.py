"""torchmetrics' ``Metric``: private state between update and compute."""

from __future__ import annotations

from typing import Any

from torchmetrics import Metric, MetricCollection

from lightning_pardist.compat.contract import Private

_KEPT = "metrics that are updated on one rank and are to look updated on others"
NAMES = (
    Private("torchmetrics.Metric._computed", "logged values that are computed over all ranks, once",
            "reset() and update() the metric"),
    Private("torchmetrics.Metric._forward_cache", _KEPT, "call the metric once more"),
    Private("torchmetrics.Metric._update_count", _KEPT, "call the metric once more"),
    Private("torchmetrics.MetricCollection._groups_checked", "metrics of a collection that share one state",
            "compute_groups, once update() has run"),
)  # fmt: skip


def computed_of(metric: Metric) -> Any:
    """Return the value that was computed last; None after an update."""
    return getattr(metric, "_computed", None)


def set_computed(metric: Metric, value: Any) -> None:
    """Make ``compute()`` return this value until the next update."""
    metric._computed = value


def forward_cache_of(metric: Metric) -> Any:
    """Return what the last call of the metric returned."""
    return metric._forward_cache


def set_forward_cache(metric: Metric, value: Any) -> None:
    """Set the value that the metric stores as the result of its last call."""
    metric._forward_cache = value


def set_update_count(metric: Metric, count: int) -> None:
    """Set the metric's number of updates."""
    metric._update_count = count


def groups_of(collection: MetricCollection) -> list[list[str]]:
    """Return the names of metrics that share one state; empty before the groups are determined."""
    return list(collection.compute_groups.values()) if collection._groups_checked else []
