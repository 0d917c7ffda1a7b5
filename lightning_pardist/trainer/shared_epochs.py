"""Epochs in which the remaining workers train on the unfinished batches of workers that were lost.

The Trainer's loop ends an epoch with the last batch of its loader. Here the workers synchronise after that batch, so
that all have the same record of which workers are lost and how far each had come. The unfinished batches of the lost
workers are dealt to the remaining ones, whose loops continue with them; then they synchronise again, until no further
worker is lost. The next epoch is divided over the remaining workers.

[Note: the end of an epoch] An optimizer step is made with the last batch of a loader, whatever has been accumulated,
before it is known whether more batches follow. What runs after that step (epoch-wise schedulers, validation) depends on
it, so the workers synchronise between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset
from typing_extensions import override

from lightning_pardist.compat.lightning_functions import Stateful
from lightning_pardist.compat.lightning_loops import (
    SHOULD_ACCUMULATE,
    DataFetcher,
    IteratorFetcher,
    PrefetchFetcher,
    combined_loader,
    method,
    set_train_fetcher,
    train_fetcher,
)
from lightning_pardist.compat.loaders import index_sampler
from lightning_pardist.engines.servers.batch_assignment import Batch, BatchAssignment
from lightning_pardist.trainer.patch_stack import Patch, PatchStack
from lightning_pardist.trainer.resumable_loaders import Order

#: Lost workers, each with (epoch, number of batches of that epoch that it has trained on).
Gone = Mapping[int, tuple[int, int]]


class SharingFetcher(PrefetchFetcher):
    """Data fetcher that can continue after the last batch of an epoch.

    Args:
        inner: The Trainer's fetcher, whose loader is used.

    Attributes:
        is_filler: Whether the latest batch is a placeholder because this worker has none for the step.
    """

    def __init__(self, inner: DataFetcher) -> None:
        super().__init__(getattr(inner, "prefetch_batches", 0))
        self.__dict__.update({name: value for name, value in inner.__dict__.items() if name != "prefetch_batches"})
        self._forget()

    def _forget(self) -> None:
        self.is_filler = False
        self._latest: Any = None
        #: Batches still to load, and batches still to train on; None while all batches of the loader count.
        self._to_load: int | None = None
        self._to_count = 0

    @override
    def __iter__(self) -> SharingFetcher:
        super().__iter__()
        self._forget()
        return self

    def extend(self, turns: int, *, loaded: int, counted: int) -> None:
        """Extend the epoch by more batches.

        Args:
            turns: Number of additional batches.
            loaded: Number of them that are read from a new iterator of the loader; afterwards the last one is repeated.
            counted: Number of them that are trained on; the others are fillers.
        """
        if loaded:
            self.iterator = iter(self.combined_loader)
        self._to_load, self._to_count = loaded, counted
        self.end_at(max(self.fetched, self.length or 0) + turns)

    def end_at(self, length: int) -> None:
        """Set the number of batches of the epoch."""
        self.length = length
        self.done = self.fetched >= length

    @override
    def __next__(self) -> Any:
        if self.length is not None and self.fetched >= self.length:
            self.done = True
            raise StopIteration
        if self._to_load is None:
            self._latest = super().__next__()
            return self._latest
        self.is_filler, self._to_count = self._to_count <= 0, self._to_count - 1
        if self._to_load > 0:
            self._to_load -= 1
            self._latest = super().__next__()
        else:
            self.fetched += 1
            self.done = self.length is not None and self.fetched >= self.length
        return self._latest


class SharedEpochs:
    """Extends the Trainer's epochs, while attached, by the unfinished batches of lost workers.

    Args:
        trainer: Trainer that runs ``fit``; its loaders are not created yet, or will be set up again.
        name: Name of the strategy, for messages.
        workers: Ranks of all workers.
        rank: Rank of this worker.
        meet: Waits for all remaining workers and returns the lost ones. Collective over the remaining workers.
    """

    def __init__(
        self, trainer: pl.Trainer, name: str, *, workers: Sequence[int], rank: int, meet: Callable[[], Gone]
    ) -> None:
        self._trainer, self._name = trainer, name
        self._workers, self._rank, self._meet = tuple(workers), rank, meet
        self._attached = PatchStack()
        self._fetcher: SharingFetcher | None = None
        self._loader: DataLoader[Any] | None = None
        self._assignment: BatchAssignment | None = None
        self._epoch = -1
        #: Batches of this epoch that were done when the run began; batches of an epoch in which no worker is lost.
        self._least = self._whole = 0
        #: Batch counts at which an optimizer step was made because the batch seemed to be the epoch's last.
        self._ends: set[int] = set()
        self._resumed_from: Mapping[str, Any] | None = None

    def attach(self) -> None:
        """Patch the loops. Not collective."""
        loop = self._trainer.fit_loop
        epoch_loop = loop.epoch_loop
        progress = epoch_loop.batch_progress
        processed = progress.increment_processed
        setup_data, begin, accumulates = loop.setup_data, loop.on_advance_start, method(epoch_loop, SHOULD_ACCUMULATE)

        def set_up() -> None:
            setup_data()
            self._adopt()

        def on_advance_start() -> None:
            if self._assignment is not None and self._epoch != self._trainer.current_epoch:
                self._begin(self._assignment.here)
            begin()

        def increment_processed() -> None:
            processed()
            if self._is_epoch_done and not (0 <= self._trainer.max_steps <= self._trainer.global_step):
                self._redistribute_batches()

        def should_accumulate() -> bool:
            return epoch_loop.batch_progress.current.ready not in self._ends and bool(accumulates())

        self._attached.attach(Patch(loop, "setup_data", set_up))
        self._attached.attach(Patch(loop, "on_advance_start", on_advance_start))
        self._attached.attach(Patch(progress, "increment_processed", increment_processed))
        self._attached.attach(Patch(epoch_loop, SHOULD_ACCUMULATE, should_accumulate))

    def detach(self) -> None:
        """Restore the loops. Not collective."""
        self._attached.detach()

    @property
    def counts(self) -> bool:
        """Whether this worker trains on the batch of the current step."""
        return self._fetcher is None or not self._fetcher.is_filler

    @property
    def _done(self) -> int:
        """Number of batches of this epoch that this worker has processed, from the loop's progress."""
        current: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
        return int(current.processed)

    # --- an epoch -------------------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Install the fetcher for the loaders that were just set up."""
        trainer, fetcher = self._trainer, train_fetcher(self._trainer)
        if fetcher is None or isinstance(fetcher, SharingFetcher):
            return
        self._loader = self._only_loader(fetcher)
        self._fetcher = SharingFetcher(fetcher)
        set_train_fetcher(trainer, self._fetcher)
        is_first = self._assignment is None
        # New loaders are divided over all workers.
        self._whole = int(trainer.fit_loop.max_batches)
        self._begin(self._workers if self._assignment is None else self._assignment.here)
        if is_first and trainer.fit_loop.restarting:
            self._least = int(trainer.fit_loop.epoch_loop.batch_progress.current.completed)
            self._resume_from(self._resumed_from)

    def _begin(self, workers: Sequence[int]) -> None:
        """Divide the current epoch over ``workers``."""
        loop, loader, order = self._trainer.fit_loop, self._loader, self._order
        if loader is None or order is None or self._fetcher is None:
            return
        self._least, self._epoch = 0, self._trainer.current_epoch
        order.instead = None
        is_whole = len(workers) == len(self._workers)
        order.divide(None if is_whole else self._batches(workers.index(self._rank), len(workers)))
        batches, limit = len(loader), self._trainer.limit_train_batches
        batches = min(batches, limit) if isinstance(limit, int) else max(1, int(batches * limit))
        combined_loader(loop).limits = [batches]
        self._set_num_batches(batches)
        if self._fetcher.fetched == 0:
            self._fetcher.end_at(batches)
        self._ends.clear()
        self._assignment = BatchAssignment(workers, self._share_of, own=batches)

    def _set_num_batches(self, batches: int) -> None:
        """Set the Trainer's number of batches of the epoch, and the validation interval derived from it."""
        trainer = self._trainer
        trainer.fit_loop.max_batches = batches
        if isinstance(trainer.val_check_interval, float) and isinstance(trainer.val_check_batch, int):
            trainer.val_check_batch = max(1, int(batches * trainer.val_check_interval))

    def _batches(self, number: int, of: int, size: int | None = None) -> BatchSampler:
        """Return share ``number`` of ``of`` of this epoch's batches, in the order of the loader's own sampler."""
        batches = self._order.own
        own = batches.sampler
        sampler: DistributedSampler[Any] = DistributedSampler(
            own.dataset, num_replicas=of, rank=number, shuffle=own.shuffle, seed=own.seed, drop_last=own.drop_last
        )
        sampler.set_epoch(self._epoch)
        return BatchSampler(sampler, size or batches.batch_size, batches.drop_last)

    def _share_of(self, number: int, of: int, *, size: int | None = None) -> list[Batch]:
        return list(self._batches(number, of, size))

    @property
    def _order(self) -> Any:
        return None if self._loader is None else index_sampler(self._loader)

    # --- batches of lost workers ----------------------------------------------------------------------------------

    def _redistribute_batches(self) -> None:
        """Synchronise the lost workers and deal their unfinished batches. Collective over the remaining workers."""
        dealt, gone = self._assignment, self._meet()
        if dealt is None or self._fetcher is None:
            return
        behind = self._done_by_lost(gone)
        new = [worker for worker in dealt.here if worker in behind]
        before = len(dealt.taken_over_by(self._rank))
        left = dealt.count_left(behind, self._done)
        turns = dealt.reassign(behind)
        if not new:
            return
        who, others = f"worker{'s' * (len(new) > 1)} {', '.join(map(str, new))}", len(dealt.here)
        text = f"Epochs after epoch {self._epoch} are divided among {others} workers, without {who}."
        if left:
            text += (
                f" The {left} batches left of its share of this epoch go to these workers, in {turns} more steps each."
            )
        rank_zero_info(text)
        if not turns:
            return
        self._ends.add(self._done)
        self._yield_batches(dealt.taken_over_by(self._rank)[before:])
        self._set_num_batches(self._done + turns)
        self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = False
        bar = self._trainer.progress_bar_callback
        if isinstance(bar, TQDMProgressBar) and bar.is_enabled:
            bar.train_progress_bar.total = self._done + turns

    def _done_by_lost(self, gone: Gone) -> dict[int, int]:
        """Return how many batches of this epoch each lost worker has trained on."""
        return {worker: max(done if epoch == self._epoch else 0, self._least) for worker, (epoch, done) in gone.items()}

    def _yield_batches(self, turns: Sequence[Batch | None], otherwise: Batch | None = None) -> None:
        """Make the loader yield this worker's batches; if it has none, ``otherwise`` as a filler."""
        batches = [batch for batch in turns if batch is not None]
        counted = len(batches)
        if not batches and otherwise is not None:
            batches = [otherwise]
        if self._fetcher is not None:
            self._order.instead = batches
            self._fetcher.extend(len(turns), loaded=len(batches), counted=counted)

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def state(self, gone: Gone) -> dict[str, Any]:
        """Return the state from which a run resumes within this epoch; empty if batch counts suffice. Not collective.

        Args:
            gone: Lost workers at the latest synchronisation.
        """
        dealt, behind = self._assignment, self._done_by_lost(gone)
        if dealt is None or self._is_epoch_done or not self._is_uneven(dealt, behind):
            return {}
        return {"epoch": self._epoch, "batch_size": self._order.batch_size, "dealt": dealt.state(behind, self._done)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Set the state to resume from when the loaders are set up. Not collective."""
        self._resumed_from = state or None

    def adjust_saved_loops(self, loops: dict[str, Any], gone: Gone) -> None:
        """Rewrite a checkpoint's batch counts to those of an epoch in which no worker is lost. Not collective.

        A finished epoch counts the usual number of batches; an unfinished one is counted from its end, by the steps
        that all workers would need for the batches that are left.

        Args:
            loops: State of the Trainer's loops; changed in place.
            gone: Lost workers at the latest synchronisation.
        """
        dealt, behind = self._assignment, self._done_by_lost(gone)
        counts = loops.get("fit_loop", {}).get("epoch_loop.batch_progress", {}).get("current")
        if dealt is None or counts is None or not self._is_uneven(dealt, behind):
            return
        done = self._whole
        if not self._is_epoch_done:
            turns = -(-dealt.count_left(behind, self._done) // len(self._workers))
            done = max(1, min(self._whole - turns, self._whole - 1))
        further = done - counts["ready"]
        counts.update({name: count + further for name, count in counts.items()})

    def _is_uneven(self, dealt: BatchAssignment, behind: Mapping[int, int]) -> bool:
        return not dealt.is_plain or dealt.workers != self._workers or any(worker in behind for worker in dealt.here)

    @property
    def _is_epoch_done(self) -> bool:
        return self._done >= self._trainer.fit_loop.max_batches

    def _resume_from(self, state: Mapping[str, Any] | None) -> None:
        """Resume within an epoch that other workers have begun."""
        self._resumed_from = None
        if state is None or state["epoch"] != self._epoch:
            return
        share_of = partial(self._share_of, size=state["batch_size"])
        self._assignment = BatchAssignment.from_remaining(
            self._workers, share_of, state=state["dealt"], begun=self._least
        )
        turns = self._assignment.taken_over_by(self._rank)
        if self._fetcher is not None:
            self._fetcher.end_at(self._least)
            self._yield_batches(turns, otherwise=next(iter(self._assignment.taken_over_by(self._workers[0])), None))
        self._set_num_batches(self._least + len(turns))

    # --- checks ---------------------------------------------------------------------------------------------------

    def _only_loader(self, fetcher: DataFetcher) -> DataLoader[Any]:
        """Return the training loader, if every worker's batches can be computed from it.

        Raises:
            ValueError: If there is no such loader.
        """
        loaders = combined_loader(self._trainer.fit_loop).flattened
        found = (
            self._unshareable_reason(loaders[0]) if len(loaders) == 1 else f"there are {len(loaders)} training loaders"
        )
        if isinstance(fetcher, IteratorFetcher):
            found = "training_step takes batches from dataloader_iter by itself"
        if found is None:
            only: DataLoader[Any] = loaders[0]
            return only
        raise ValueError(
            f"lost_workers='share' of {self._name} distributes the batches of a lost worker among the others, which"
            f" have to be able to compute them, but {found}. Train with one DataLoader of a map-style dataset that has"
            " batch_size and the sampler that the Trainer inserts (shuffle=True or False), or a DistributedSampler by"
            " trainer.distributed_sampler_kwargs; or set lost_workers='report'."
        )

    def _unshareable_reason(self, loader: Any) -> str | None:
        """Return why other workers' batches cannot be computed from a loader; None if they can."""
        if not isinstance(loader, DataLoader) or isinstance(loader, Stateful):
            return f"the training loader is a {type(loader).__name__}, which has an order of its own"
        if isinstance(loader.dataset, IterableDataset):
            return f"{type(loader.dataset).__name__} is an iterable dataset, whose samples have no numbers"
        order = index_sampler(loader)
        if not isinstance(order, Order):
            return f"the training loader is in the order of a {type(order).__name__}"
        batches = order.own
        if loader.batch_sampler is None:
            return "the training loader has no batch_size"
        if type(batches) is not BatchSampler:
            return f"the training loader's batches are those of a {type(batches).__name__}"
        sampler: Any = batches.sampler
        if type(sampler) is not DistributedSampler:
            return f"the training loader's samples are in the order of a {type(sampler).__name__}"
        place, workers = self._workers.index(self._rank), len(self._workers)
        if (sampler.rank, sampler.num_replicas) != (place, workers):
            return (
                f"the training loader's DistributedSampler is for rank {sampler.rank} of {sampler.num_replicas},"
                f" instead of rank {place} of {workers}"
            )
        return None
