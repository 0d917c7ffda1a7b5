"""Training on ranks that have different numbers of batches: streams, buckets by length, shards of unequal size.

The Trainer's loop ends an epoch with its own loader, so a rank that finishes early leaves the others waiting in their
next collective. Here all ranks make the same number of steps: either as many as the longest loader has batches, where
a rank that has run out takes part with its last batch at weight zero, or as many as the shortest. Ranks that work on
the same batches must have equally many; otherwise an error is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torchmetrics import Metric
from typing_extensions import override

from lightning_pardist.compat.lightning_loops import (
    DataFetcher,
    IteratorFetcher,
    PrefetchFetcher,
    set_train_fetcher,
    train_fetcher,
)
from lightning_pardist.engines.common.sync_batchnorm import synchronized_statistics
from lightning_pardist.local_tensors import is_dense
from lightning_pardist.trainer.module_snapshot import ModuleSnapshot, write_back
from lightning_pardist.trainer.patch_stack import Patch, PatchStack

#: ``"join"`` uses every batch of every rank, ``"drop"`` only as many per rank as all ranks have.
UnevenInputs = Literal["join", "drop"]
_APART = "Ranks that share their batches have different numbers of batches"
_ALIKE = (
    "Give the ranks of a tensor, pipeline or context group the same batches: distribute samples by"
    " trainer.distributed_sampler_kwargs (rank, num_replicas) instead of global_rank and world_size."
)


class EvenFetcher(PrefetchFetcher):
    """Data fetcher that yields equally many batches per epoch on every rank. Collective if a loader has no length.

    Args:
        inner: The Trainer's fetcher, whose loaders are used.
        steps: Batches per epoch, if the loaders have a length.
        agree: Maps whether this rank has another batch to whether any rank (or all of them) has one. Collective.
    """

    def __init__(self, inner: DataFetcher, steps: int | None, agree: Callable[[bool], bool]) -> None:
        super().__init__(getattr(inner, "prefetch_batches", 0))
        self.__dict__.update({name: value for name, value in inner.__dict__.items() if name != "prefetch_batches"})
        self.is_filler: bool = False
        self._steps = steps
        self._agree = agree
        self._latest: Any = None
        self._settle(inner.done)

    @override
    def __iter__(self) -> EvenFetcher:
        super().__iter__()
        self.is_filler = False
        self._latest = None
        self._settle(self.length is None and not self.batches)
        return self

    @override
    def __next__(self) -> Any:
        if self.done:
            raise StopIteration
        try:
            self._latest = super().__next__()
            self.is_filler = False
            is_through: bool = self.done
        except StopIteration:
            is_through = self.is_filler = True
            self.fetched += 1
        if self._latest is None:
            raise ValueError(
                "A rank has no batch in an epoch in which other ranks have some. Give each rank at least one batch, or"
                " set uneven_inputs='drop'."
            )
        self._settle(is_through)
        return self._latest

    def _settle(self, is_through: bool) -> None:
        """Set whether the epoch is over, which depends on all ranks if the number of steps is not known."""
        self.done = self.fetched >= self._steps if self._steps is not None else not self._agree(not is_through)


@contextmanager
def discarding_side_effects(module: nn.Module) -> Generator[None, None, None]:
    """Context for a step whose batch does not count: metrics and buffers are restored afterwards.

    Synchronized batch norms track the statistics of the batches that count, as on the other ranks.
    """
    metrics = [ModuleSnapshot(each) for each in module.modules() if isinstance(each, Metric)]
    kept = {id(buffer) for buffer in synchronized_statistics(module)}
    changing = (buffer for buffer in module.buffers() if id(buffer) not in kept and is_dense(buffer))
    buffers = [(buffer, buffer.detach().clone()) for buffer in changing]
    yield
    for metric in metrics:
        metric.restore()
    with torch.no_grad():
        for buffer, values in buffers:
            write_back(buffer, values)


class EvenSteps:
    """Gives the Trainer's epochs, while attached, equally many steps on all ranks.

    Args:
        trainer: Trainer that runs ``fit``; its loaders are not created yet.
        mode: How ranks with fewer batches than others are handled.
        group: All ranks that take part in a step.
        place: Index of this rank's share of the samples, and the number of shares.
        before: Called before each collective.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        mode: UnevenInputs,
        *,
        group: dist.ProcessGroup,
        place: tuple[int, int],
        before: Callable[[], None],
    ) -> None:
        self._trainer = trainer
        self._mode = mode
        self._group = group
        self._place, self._places = place
        self._before = before
        self._attached = PatchStack()

    def attach(self) -> None:
        """Patch the fit loop. Not collective."""
        loop = self._trainer.fit_loop
        original = loop.setup_data

        def setup_data() -> None:
            original()
            self._make_even()

        self._attached.attach(Patch(loop, "setup_data", setup_data))

    def detach(self) -> None:
        """Restore the fit loop. Not collective."""
        self._attached.detach()

    @property
    def counts(self) -> bool | None:
        """Whether this rank's batch counts in the current step; None if the batches of all ranks always count."""
        fetcher = train_fetcher(self._trainer)
        return not fetcher.is_filler if isinstance(fetcher, EvenFetcher) else None

    @contextmanager
    def discarding_side_effects(self) -> Generator[None, None, None]:
        """Context for a step: if this rank's batch does not count, metrics and buffers are restored afterwards."""
        with nullcontext() if self.counts is not False else discarding_side_effects(self._trainer.lightning_module):
            yield

    def _make_even(self) -> None:
        loop: Any = self._trainer.fit_loop
        inner = train_fetcher(self._trainer)
        if inner is None or isinstance(inner, (EvenFetcher, IteratorFetcher)):
            return
        own = float(loop.max_batches)
        most, least = self._extremes(own)
        if apart := [(low, high) for low, high in zip(least, most, strict=True) if low != high]:
            raise ValueError(f"{_APART}: {apart[0][0]:.0f} and {apart[0][1]:.0f} in an epoch. {_ALIKE}")
        longest, shortest = max(most), min(least)
        if longest == shortest and longest != float("inf"):
            return
        if shortest == 0 and self._mode == "join":
            raise ValueError(
                f"One rank's training loader has no batch and another's has {longest:.0f}. Give each rank at least one"
                " batch, or set uneven_inputs='drop'."
            )
        steps = None
        if longest != float("inf"):
            steps = int(longest if self._mode == "join" else shortest)
            rank_zero_info(
                f"Ranks have {shortest:.0f} to {longest:.0f} batches: an epoch has {steps} steps"
                f" (uneven_inputs={self._mode!r})."
            )
            loop.max_batches = steps
            interval = self._trainer.val_check_interval
            if isinstance(interval, float) and isinstance(self._trainer.val_check_batch, int):
                self._trainer.val_check_batch = max(1, int(steps * interval))
        set_train_fetcher(self._trainer, EvenFetcher(inner, steps, self._agree))

    def _agree(self, has_more: bool) -> bool:
        most, least = self._extremes(float(has_more))
        if most != least:
            raise ValueError(f"{_APART}: the loader of one has ended, and another's has a batch left. {_ALIKE}")
        return any(most) if self._mode == "join" else all(most)

    def _extremes(self, own: float) -> tuple[list[float], list[float]]:
        """Return the largest and the smallest value among the ranks of each share of the samples. Collective."""
        # In host memory, to avoid a device synchronisation.
        extremes = torch.full((2, self._places), -torch.inf, dtype=torch.float64)
        extremes[:, self._place] = torch.tensor([own, -own], dtype=torch.float64)
        self._before()
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._group)
        # In a plan, one rank stands for all, and the entries of the others stay empty.
        most, least = extremes[:, (extremes > -torch.inf).any(0)].tolist()
        return most, [-each for each in least]
