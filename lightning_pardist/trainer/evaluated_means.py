"""Keep means that evaluation logs batch by batch, with what they divide by on this rank.

Lightning weighs a batch's mean by its samples. The mean of a batch that is divided over ranks is that of a single
process only if each rank's part counts by what it averages: tokens that are not padding, samples times class weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_pardist.compat.lightning_loops import logged
from lightning_pardist.compat.patches import original_reductions
from lightning_pardist.engines.common.mean_counts import MeanCounts
from lightning_pardist.trainer.patch_stack import Patch, PatchStack

#: Batches of a value whose numbers stay on the device; reading them synchronises.
_UNREAD = 256


@dataclass(frozen=True)
class BatchMean:
    """A rank's mean of one batch.

    Attributes:
        value: The mean.
        samples: Samples of the batch on this rank, its weight in Lightning's mean over batches.
        count: What the mean divides by; None if unknown.
    """

    value: float
    samples: float
    count: float | None


@dataclass
class _Batches:
    """Means of one value in an evaluation; of batches that are not read yet, as tensors.

    Attributes:
        read: Means by number of the batch.
        unread: Number of the batch, value, samples before and after it, and count.
        is_usable: Whether each batch has one mean.
    """

    read: dict[int, BatchMean] = field(default_factory=dict)
    unread: list[tuple[int, Any, Any, Any, Any]] = field(default_factory=list)
    is_usable: bool = True

    def add(self, batch: int, value: Any, before: Any, after: Any, count: Any) -> None:
        if batch in self.read or any(batch == other for other, *_ in self.unread):
            self.is_usable = False
        self.unread.append((batch, value, before, after, count))
        if len(self.unread) >= _UNREAD:
            self.read_all()

    def read_all(self) -> None:
        numbers = [number for _, *entry in self.unread for number in entry if isinstance(number, Tensor)]
        floats = iter(
            torch.stack([each.to(numbers[0].device, torch.float64) for each in numbers]).tolist() if numbers else []
        )
        for batch, *entry in self.unread:
            value, before, after, count = (next(floats) if isinstance(each, Tensor) else each for each in entry)
            self.read[batch] = BatchMean(value, after - before, count)
        self.unread.clear()


class EvaluatedMeans:
    """Records the means that a module logs in evaluation steps.

    Args:
        trainer: Trainer that evaluates.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._counts = MeanCounts()
        self._attached = PatchStack()
        #: Batches so far by data loader, and values by the key under which the Trainer keeps them.
        self._steps: Counter[int | None] = Counter()
        self._values: dict[str, _Batches] = {}

    def attach(self) -> None:
        """Patch the module's ``log``. Not collective."""
        module = self._trainer.lightning_module
        self._attached.attach(Patch(module, "log", self._noting(module.log)))

    def detach(self) -> None:
        """Restore the module. Not collective."""
        self._attached.detach()

    def start(self) -> None:
        """Begin an evaluation."""
        self._steps.clear()
        self._values.clear()
        self._counts.forget()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of an evaluation step. Not collective."""
        results = logged(self._trainer)
        self._steps[None if results is None else results.dataloader_idx] += 1
        with self._counts.recording():
            yield

    def of(self, key: str, total: float) -> dict[int, BatchMean] | None:
        """Return the means of a logged value by number of the batch; None if no mean's count is known.

        Args:
            key: Key of the value in the Trainer's results.
            total: Number of samples that the Trainer has counted for it.
        """
        batches = self._values.get(key)
        if batches is None or not batches.is_usable:
            return None
        batches.read_all()
        means = batches.read
        if all(each.count is None for each in means.values()) or sum(each.samples for each in means.values()) != total:
            return None
        return dict(means)

    def _noting(self, log: Callable[..., None]) -> Callable[..., None]:
        # Not a bound method: deep copies of the module (weight averaging) would copy the Trainer with it.
        @wraps(log)
        def noting(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if not self._trainer.evaluating:
                log(name, value, *args, **kwargs)
                return
            before = self._samples(name)
            with original_reductions():
                log(name, value, *args, **kwargs)
            for key, samples in self._samples(name).items():
                if samples is not before.get(key):
                    self._add(key, value, before.get(key), samples)

        return noting

    @original_reductions()
    def _samples(self, name: str) -> dict[str, Tensor]:
        """Return the numbers of samples in the means that are logged under a name."""
        results = logged(self._trainer)
        return {
            key: item.cumulated_batch_size
            for key, item in ({} if results is None else results).items()
            if item.meta.name == name and item.is_tensor and item.meta.is_mean_reduction and not item.has_reset
        }

    def _add(self, key: str, value: Any, before: Tensor | None, after: Tensor) -> None:
        if before is None:
            self._values.pop(key, None)
        results = logged(self._trainer)
        batch = self._steps[None if results is None else results.dataloader_idx]
        count = self._counts.of(value)
        if isinstance(value, Tensor):
            value = value.detach().reshape(()).clone()
        self._values.setdefault(key, _Batches()).add(batch, value, 0.0 if before is None else before, after, count)


def mean_of_ranks(ranks: list[dict[int, BatchMean]]) -> float:
    """Return the mean over an evaluation whose batches are divided over ranks.

    Args:
        ranks: Each rank's means by number of the batch.

    Returns:
        The mean over batches, weighted by samples, of their means over ranks, weighted by counts.
    """
    total = weight = 0.0
    for batch in sorted(set().union(*ranks)):
        parts = [means[batch] for means in ranks if batch in means]
        samples = sum(part.samples for part in parts)
        counts = [part.count for part in parts]
        weights = [part.samples for part in parts] if None in counts else [count or 0.0 for count in counts]
        # A mean over nothing is NaN and counts for nothing.
        added = sum(number * part.value for number, part in zip(weights, parts, strict=True) if number)
        total += samples * (added / sum(weights) if sum(weights) else float("nan"))
        weight += samples
    return total / weight if weight else float("nan")
