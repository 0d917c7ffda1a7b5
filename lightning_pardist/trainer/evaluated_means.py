"""Keep means that evaluation logs batch by batch, with what they divide by on this rank.

Lightning weighs a batch's mean by its samples. The mean of a batch that is divided over ranks is that of a single
process only if each rank's part counts by what it averages: tokens that are not padding, samples times class weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_pardist.compat.lightning_loops import logged
from lightning_pardist.compat.patches import original_function, original_reductions
from lightning_pardist.engines.common.mean_counts import MeanCounts, MeanPart
from lightning_pardist.local_tensors import whole_number
from lightning_pardist.trainer.patch_stack import OwnMethod, Patch, PatchStack

#: Batches of a value whose numbers stay on the device; reading them synchronises.
_UNREAD = 256


#: Value, number of items, whether that is a size, number added to it, divisor and name, as in :class:`MeanPart`.
_Part = tuple[float, float | None, bool, float, float | None, tuple[str, int]]

_UNNAMED = ("", 0)


@dataclass(frozen=True)
class BatchMean:
    """A rank's mean of one batch, or sum of means.

    Attributes:
        samples: Samples of the batch on this rank, its weight in Lightning's mean over batches.
        parts: Summands of the value.
    """

    samples: float
    parts: tuple[_Part, ...]

    @property
    def value(self) -> float:
        """The value that was logged."""
        return sum(value for value, *_ in self.parts)

    @property
    def is_counted(self) -> bool:
        """Whether the count of a part is known."""
        return any(count is not None for _, count, *_ in self.parts)


@dataclass
class _Batches:
    """Means of one value in an evaluation; of batches that are not read yet, as tensors.

    Attributes:
        read: Means by number of the batch.
        unread: Number of the batch, samples before and after it, and the attributes of each part, in a row.
        is_usable: Whether each batch has one mean.
    """

    read: dict[int, BatchMean] = field(default_factory=dict)
    unread: list[tuple[int, Any, Any, list[Any]]] = field(default_factory=list)
    is_usable: bool = True

    def add(self, batch: int, before: Any, after: Any, parts: Iterable[MeanPart]) -> None:
        if batch in self.read or any(batch == other for other, *_ in self.unread):
            self.is_usable = False
        self.unread.append((batch, before, after, [each for part in parts for each in part[:6]]))
        if len(self.unread) >= _UNREAD:
            self.read_all()

    def read_all(self) -> None:
        entries = [(batch, [before, after, *parts]) for batch, before, after, parts in self.unread]
        numbers = [number for _, entry in entries for number in entry if isinstance(number, Tensor)]
        floats = iter(
            torch.stack([each.to(numbers[0].device, torch.float64) for each in numbers]).tolist() if numbers else []
        )
        for batch, entry in entries:
            before, after, *parts = (next(floats) if isinstance(each, Tensor) else each for each in entry)
            found = list(zip(*(parts[place::6] for place in range(6)), strict=True))
            self.read[batch] = BatchMean(after - before, tuple(_of_samples(found, after - before)))
        self.unread.clear()


def _of_samples(parts: list[_Part], samples: float) -> list[_Part]:
    """Return parts of which those that are the losses of single samples have no count, as their mean has none.

    These are as many means by one function as there are samples, or several times as many, and not all of them average
    over as many rows.
    """
    rows: dict[str, list[int]] = {}
    for *_, (name, size) in parts:
        rows.setdefault(name, []).append(size)
    # Two means of a batch of two samples are more likely two losses.
    single = {name for name, sizes in rows.items() if name and samples > 2 and len(sizes) % samples == 0}
    single -= {name for name in single if all(size == samples for size in rows[name])}
    return [(part[0], None, False, 0.0, None, _UNNAMED) if part[-1][0] in single else part for part in parts]


class EvaluatedMeans:
    """Records the means that a module logs in evaluation steps.

    Args:
        trainer: Trainer that evaluates.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._counts = MeanCounts(sums=True)
        self._attached = PatchStack()
        #: Batches so far by data loader, and values by the key under which the Trainer keeps them.
        self._steps: Counter[int | None] = Counter()
        self._values: dict[str, _Batches] = {}

    def attach(self) -> None:
        """Patch the module's ``log``. Not collective."""
        module = self._trainer.lightning_module
        self._attached.attach(Patch(module, "log", OwnMethod(module, "log", self._noting(module.log))))

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
        if not any(each.is_counted for each in means.values()) or sum(each.samples for each in means.values()) != total:
            return None
        return dict(means)

    def _noting(self, log: Callable[..., None]) -> Callable[..., None]:
        # Not a bound method: deep copies of the module (weight averaging) would copy the Trainer with it.
        @wraps(log)
        def noting(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            value = whole_number(value)
            args = tuple(map(original_function, args))
            kwargs = {key: original_function(each) for key, each in kwargs.items()}
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
        parts = self._counts.parts_of(value)
        if parts is None:
            parts = (MeanPart(value.detach().reshape(()).clone() if isinstance(value, Tensor) else value, None),)
        self._values.setdefault(key, _Batches()).add(batch, 0.0 if before is None else before, after, parts)


def mean_of_ranks(ranks: list[dict[int, BatchMean]]) -> float:
    """Return the mean over an evaluation whose batches are divided over ranks.

    Args:
        ranks: Each rank's means by number of the batch.

    Returns:
        The mean over batches, weighted by samples, of the sums of their parts' means over ranks, weighted by counts.
    """
    total = weight = 0.0
    for batch in sorted(set().union(*ranks)):
        means = [each[batch] for each in ranks if batch in each]
        samples = [mean.samples for mean in means]
        alike = len({len(mean.parts) for mean in means}) == 1
        parts = (
            zip(*(mean.parts for mean in means), strict=True)
            if alike
            else [[(mean.value, None, False, 0.0, None, _UNNAMED) for mean in means]]
        )
        total += sum(samples) * sum(_mean_of_parts(list(part), samples) for part in parts)
        weight += sum(samples)
    return total / weight if weight else float("nan")


def _mean_of_parts(parts: Sequence[_Part], samples: Sequence[float]) -> float:
    """Return the mean of one part over ranks, weighted by counts, or by samples if a count is unknown.

    A size that all ranks share although they have different numbers of samples counts something else, such as classes.
    """
    counts = [count for _, count, *_ in parts]
    is_shared = len(set(counts)) == 1 and all(part[2] for part in parts)
    is_counted = None not in counts and not is_shared
    weights = [count or 0.0 for count in counts] if is_counted else samples
    divisors = [
        divisor if is_counted and divisor is not None else weight
        for (*_, divisor, _), weight in zip(parts, weights, strict=True)
    ]
    # A mean over nothing is NaN and counts for nothing.
    total = sum(divisor * value for divisor, (value, *_) in zip(divisors, parts, strict=True) if divisor)
    added = max((part[3] for part in parts), key=abs) if is_counted else 0.0
    divisor = sum(weights) + added
    for own, weight in zip(divisors, weights, strict=True):
        # What clamps the divisor of a rank clamps that of all; a difference by rounding is none by a clamp.
        if own - weight - added > 1e-6 * abs(own):
            divisor = max(divisor, own)
    return total / divisor if divisor else float("nan")
