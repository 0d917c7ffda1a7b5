"""Number and split of a training batch's micro-batches; determined during planning, equal on all ranks."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from lightning_pardist.axes.pipeline.pipeline_settings import PipelineSettings
from lightning_pardist.engines.pipeline import BatchCut, MicroBatch, UnevenBatchError
from lightning_pardist.engines.pipeline.cut import parts_of
from lightning_pardist.engines.pipeline.schedule import closest_schedule

#: Default maximum of micro-batches per pipeline rank: with 4, the bubble is at most a fifth of a step.
_A_RANK = 4


@dataclass(frozen=True)
class Microbatching:
    """How training batches are split into micro-batches.

    Attributes:
        settings: Settings of the pipeline.
        num_ranks: Number of pipeline ranks.
        whole: Names of tensors that are passed unsplit to every micro-batch, found by a trial.
        least: Minimum number of samples of a micro-batch, unless the batch has fewer.
        why: What goes wrong with smaller micro-batches, in a few words.
    """

    settings: PipelineSettings
    num_ranks: int
    whole: frozenset[str] = frozenset()
    least: int = 1
    why: str = ""

    @property
    def cut(self) -> BatchCut:
        """Where samples are in a batch, and which tensors are not split."""
        return BatchCut(self.settings.batch_dim, self.whole)

    @property
    def max_count(self) -> int:
        """Maximum number of micro-batches."""
        if self.settings.schedule == "mp":
            return 1
        return self.settings.num_microbatches or _A_RANK * self.num_ranks

    @property
    def is_automatic(self) -> bool:
        """Whether the number of micro-batches is chosen automatically."""
        return self.settings.schedule != "mp" and self.settings.num_microbatches is None

    @property
    def is_whole(self) -> bool:
        """Whether every batch is one micro-batch, since smaller ones would change its results."""
        return self.least == sys.maxsize

    def keep_whole(self, why: str) -> Microbatching:
        """Return a copy with one micro-batch per batch of any size; ``why`` says what smaller ones do."""
        return replace(self, least=sys.maxsize, why=why)

    def count(self, batch: Any) -> int:
        """Return the number of micro-batches of a batch.

        Raises:
            UnevenBatchError: If its tensors have different sizes along the batch dim.
        """
        if self.max_count == 1 or self.settings.split_batch is not None:
            return self.max_count
        size = self.cut.size_of(batch) or 1
        count = min(self.max_count, size)
        if self.is_automatic:
            count = efficient_count(size, self.num_ranks, most=min(self.max_count, max(size // self.least, 1)))
        settings = self.settings
        return supported_count(settings.schedule, self.num_ranks, count, settings.chunks_per_rank)

    def split(self, batch: Any, num_microbatches: int) -> list[MicroBatch]:
        """Split a batch.

        Args:
            batch: The batch to split.
            num_microbatches: Maximum number of parts.

        Raises:
            UnevenBatchError: If its tensors have different sizes along the batch dim.
            ValueError: If it cannot be split, or the user's ``split_batch`` does not split it.
        """
        function = self.settings.split_batch
        if function is None or num_microbatches == 1:
            return self.cut.split(batch, num_microbatches)
        return parts_of(function, batch, num_microbatches, self.cut)

    def alternatives(self, batch: Any) -> Iterator[Microbatching]:
        """Yield copies with increasing micro-batch sizes, or only self if the size may not be changed."""
        tried = set()
        if not self.is_automatic or self.is_whole or self.settings.split_batch is not None:
            yield self
            return
        for least in range(1, (self.cut.size_of(batch) or 1) + 1):
            other = replace(self, least=least)
            if (count := other.count(batch)) not in tried:
                tried.add(count)
                yield other

    def candidate_splits(self, batch: Any) -> list[Microbatching]:
        """Return candidate splits of a batch whose tensors differ in size, most common size first.

        Each candidate must be verified. Empty if the tensors do not differ.
        """
        try:
            self.count(batch)
        except UnevenBatchError as error:
            lengths = list(error.lengths.values())
            ordered = sorted(set(lengths), key=lambda length: (-lengths.count(length), length))
            others = [frozenset(n for n, other in error.lengths.items() if other != length) for length in ordered]
            return [replace(self, whole=whole) for whole in others]
        return []

    def describe(self, batch: Any) -> str:
        """Describe the split of a batch, for the log."""
        parts = self.split(batch, self.count(batch))
        sizes = sorted({part.size for part in parts})
        each = " or ".join(map(str, sizes)) + (" sample" if sizes == [1] else " samples")
        text = f"{len(parts)} micro-batches of {each}" if len(parts) > 1 else "1 micro-batch, the whole batch"
        return f"{text}{self._reason_text(len(parts))}{self._tensors(batch)}"

    def _reason_text(self, used: int) -> str:
        settings = self.settings
        if settings.schedule == "mp":
            return ""
        if settings.num_microbatches is not None:
            more = used != settings.num_microbatches
            return f" (num_microbatches={settings.num_microbatches}, the batch makes no more)" if more else ""
        if settings.split_batch is not None:
            return " (by split_batch)"
        reason = f" (default: what makes a step shortest, up to {self.max_count}"
        return f"{reason}; smaller ones {self.why})" if self.least > 1 else f"{reason})"

    def _tensors(self, batch: Any) -> str:
        if self.settings.split_batch is not None or self.max_count == 1:
            return ""
        found = self.cut.describe(batch)
        cut: dict[int, list[str]] = {}
        for each in found:
            if each.dim is not None:
                cut.setdefault(each.dim, []).append(each.name or "the batch")
        whole = [f"{each.name} {list(each.shape)}" for each in found if each.dim is None]
        parts = [f"{_listed(names)} along dim {dim}" for dim, names in cut.items()]
        text = f"; cut: {', '.join(parts)}" if parts else ""
        return f"{text}; whole in each: {_listed(whole)}" if whole else text


@functools.cache
def supported_count(schedule: str, num_ranks: int, count: int, chunks_per_rank: int) -> int:
    """Return the number of micro-batches, at most ``count``, that a schedule supports."""
    return closest_schedule(schedule, num_ranks, count, chunks_per_rank=chunks_per_rank).num_microbatches


def efficient_count(size: int, num_ranks: int, *, most: int) -> int:
    """Return the number of micro-batches with the shortest step.

    Few micro-batches enlarge the bubble, and with uneven ones all ranks wait for the largest. With ``m`` micro-batches
    and ``p`` ranks, a step takes as long as ``m + p - 1`` micro-batches of the largest size.

    Args:
        size: Number of samples of the batch.
        num_ranks: Number of pipeline ranks.
        most: Maximum number of micro-batches, 1 or more.
    """

    def time(count: int) -> tuple[int, int]:
        return (count + num_ranks - 1) * math.ceil(size / count), -count

    return min(range(1, min(most, size) + 1), key=time)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
