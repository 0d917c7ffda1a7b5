"""Sample batches: the first batch of each of the Trainer's loaders, read without affecting training.

Tensor and pipeline parallelism run a step before the Trainer's loops fetch their first batch. The dataloader hook is
called once, and the Trainer receives the same loaders when it requests them. A loader that samples indices is not
iterated: a copy of its sampler gives the items to read. For any other loader the first batch is consumed and put back
in front of the rest.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.rank_zero import rank_zero_debug
from torch.utils.data import DataLoader, IterableDataset

from lightning_pardist.compat.lightning_functions import Stateful, seed_workers
from lightning_pardist.compat.lightning_loops import (
    DataLoaderSource,
    batch_to_device,
    before_batch_transfer,
    combine_mode,
    combine_spec,
    data_fetcher,
    data_source,
    request_dataloader,
)
from lightning_pardist.compat.pytree import tree_unflatten
from lightning_pardist.engines.pipeline.microbatch import fresh_copy
from lightning_pardist.trainer.module_snapshot import ModuleSnapshot
from lightning_pardist.trainer.resumable_loaders import rng_state, set_rng_state

_STAGES = {
    TrainerFn.FITTING: RunningStage.TRAINING,
    TrainerFn.VALIDATING: RunningStage.VALIDATING,
    TrainerFn.TESTING: RunningStage.TESTING,
    TrainerFn.PREDICTING: RunningStage.PREDICTING,
}


#: Sentinel for the end of an iterator.
_END = object()


class NoSampleError(ValueError):
    """Raised if a loader has no batch; the message names it."""


class SampleBatches:
    """First batch of each loader of a run, read once and put back. Not collective.

    Args:
        trainer: The Trainer. The strategy passes every loader that the Trainer sets up to :meth:`replay_consumed`.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._batches: dict[RunningStage, list[Any]] = {}
        self._sources: list[DataLoaderSource] = []
        self._drawn: dict[RunningStage, _DrawRecord] = {}
        #: Training loaders that were not iterated: their first iterator is created by the Trainer.
        self._untouched: list[DataLoader[Any]] = []
        #: First batches of the loaders that the Trainer sets up next, in the same order.
        self._coming: deque[_ConsumedBatch | None] = deque()
        self._in_trial = False

    def first(self) -> Any:
        """Return the batch of the Trainer's first step, on this rank's device.

        Raises:
            NoSampleError: If there is no data.
        """
        batches = self.of(_STAGES[self._trainer.state.fn or TrainerFn.FITTING])
        found = next((batch for batch in batches if batch is not None), None)
        if found is None:
            raise NoSampleError("no data loader is defined")
        return found

    def of(self, stage: RunningStage) -> list[Any]:
        """Return the first batch of each loader of a stage, on this rank's device, as passed to the step function.

        Args:
            stage: The stage whose loaders are read.

        Returns:
            One batch for training; one per loader for evaluation, None for a loader without any. Empty if the stage has
            no loader with a batch.

        Raises:
            NoSampleError: If a loader has no batch.
        """
        if stage not in self._batches:
            state = self._trainer.state
            before, state.stage = state.stage, stage
            try:
                with undisturbed_random():
                    if self._follows_training(stage):
                        self._replay_training_draws()
                    self._batches[stage] = self._read_first_batches(stage)
            finally:
                state.stage = before
        # A step may modify its batch in place.
        return [fresh_copy(batch) for batch in self._batches[stage]]

    def replay_consumed(self, loader: Any) -> Any:
        """Return a loader that the Trainer is about to use, with its consumed first batch in front again."""
        taken = self._coming.popleft() if self._coming else None
        if taken is None:
            return loader
        return (_StatefulReplayedLoader if isinstance(loader, Stateful) else _ReplayedLoader)(loader, taken)

    def detach(self) -> None:
        """Restore the Trainer."""
        for source in self._sources:
            source.__dict__.pop("dataloader", None)
        self._sources, self._batches = [], {}
        self._coming.clear()

    @contextmanager
    def in_trial_run(self) -> Iterator[None]:
        """Context in which the Trainer may set up loaders for a trial run, without using up the stored loaders."""
        self._in_trial = True
        try:
            yield
        finally:
            self._in_trial = False

    def _follows_training(self, stage: RunningStage) -> bool:
        """Return whether the Trainer sets up a stage's loaders after those of training have drawn random numbers."""
        trainer = self._trainer
        checked_first = trainer.num_sanity_val_steps and not trainer.fast_dev_run  # type: ignore[attr-defined]
        return (
            trainer.state.fn == TrainerFn.FITTING
            and stage == RunningStage.VALIDATING
            and not checked_first
            and RunningStage.TRAINING in self._drawn
        )

    def _replay_training_draws(self) -> None:
        """Draw the random numbers of the training loaders' setup, including the base seed that each iterator draws."""
        self._drawn[RunningStage.TRAINING].repeat()
        for loader in self._untouched:
            if loader.generator is None:
                torch.empty((), dtype=torch.int64).random_()

    def _read_first_batches(self, stage: RunningStage) -> list[Any]:
        if stage == RunningStage.TRAINING and data_fetcher(self._trainer.fit_loop) is not None:
            # Set up already, for example by estimated_stepping_batches in the module's setup hook.
            return self._on_device([(0, _peeked(data_fetcher(self._trainer.fit_loop)))])
        source = _source(self._trainer, stage)
        if source.instance is None or not source.is_defined():
            return []
        drawn = self._drawn[stage] = _DrawRecord()
        loaders = request_dataloader(source)
        drawn.end()
        if loaders is None:
            self._serve_next_request(source, None, [], drawn)
            return []
        mode = "max_size_cycle" if stage == RunningStage.TRAINING else "sequential"
        combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, mode)  # type: ignore[arg-type]
        if stage != RunningStage.TRAINING and all(sized_len(loader) == 0 for loader in combined.flattened):
            # Lightning skips the loop.
            self._serve_next_request(source, loaders, [None] * len(combined.flattened), drawn)
            return []
        try:
            found = [self._first_if_any(loader, stage) for loader in combined.flattened]
        except NoSampleError as problem:
            raise NoSampleError(f"{source.name}: {problem}") from problem
        if stage == RunningStage.TRAINING:
            pairs = zip(combined.flattened, found, strict=True)
            self._untouched = [one for one, (_, taken) in pairs if taken is None and isinstance(one, DataLoader)]
        self._serve_next_request(source, loaders, [taken for _, taken in found], drawn)
        firsts = [batch for batch, _ in found]
        if combine_mode(combined) == "sequential":
            # A loader without a batch has no step; None keeps the indices of the others.
            batches = list(enumerate(firsts))
        else:
            batches = [(0, tree_unflatten(firsts, combine_spec(combined)))]
        return self._on_device(batches)

    def _on_device(self, batches: Sequence[tuple[int, Any]]) -> list[Any]:
        with self._without_side_effects(getattr(self._trainer, "datamodule", None)):
            return [on_device(self._trainer, fresh_copy(batch), index) for index, batch in batches]

    def _serve_next_request(
        self, source: DataLoaderSource, loaders: Any, taken: Sequence[_ConsumedBatch | None], drawn: _DrawRecord
    ) -> None:
        """Make the Trainer's next request to a source return these loaders, as if they were created at that time."""

        def dataloader() -> Any:
            if not self._in_trial:
                del source.__dict__["dataloader"]
            drawn.repeat()
            self._coming = deque(taken)
            return loaders

        source.__dict__["dataloader"] = dataloader
        self._sources.append(source)

    def _first_if_any(self, loader: Any, stage: RunningStage) -> tuple[Any, _ConsumedBatch | None]:
        """Return the first batch; None for an empty evaluation loader, which Lightning's loop skips."""
        if stage != RunningStage.TRAINING and sized_len(loader) == 0:
            return None, None
        return self._first_of(loader)

    def _first_of(self, loader: Any) -> tuple[Any, _ConsumedBatch | None]:
        if isinstance(loader, (list, tuple)):
            return _first(loader), None
        seed_workers(loader, (self._trainer.distributed_sampler_kwargs or {}).get("rank", 0))
        with undisturbed_random():
            if (indices := _first_indices(loader)) is not None:
                # A worker process reads a copy of the dataset.
                with self._without_side_effects(*([] if loader.num_workers else [loader.dataset, loader.collate_fn])):
                    return _first(_loader_of(loader, indices)), None
        drawn = _DrawRecord()
        batches = iter(loader)
        first = _first(batches)
        drawn.end()
        return first, _ConsumedBatch(first, batches, drawn)

    @contextmanager
    def _without_side_effects(self, *data: object) -> Iterator[None]:
        snapshot = ModuleSnapshot(self._trainer.lightning_module, [each for each in data if each is not None])
        try:
            yield
        finally:
            snapshot.restore()


class _DrawRecord:
    """Record of the random numbers that an early operation drew, to replay them when the operation is due."""

    def __init__(self) -> None:
        self._before = rng_state()
        self._after = self._before

    def end(self) -> None:
        """Record the generator states after the operation."""
        self._after = rng_state()

    def repeat(self) -> None:
        """Advance the generators by the recorded draws, if they are in the state from before the operation."""
        if _are_equal(rng_state(), self._before):
            set_rng_state(self._after)


@dataclass
class _ConsumedBatch:
    """First batch of a loader, the iterator over the rest, and the random numbers that reading it drew."""

    batch: Any
    rest: Iterator[Any]
    drawn: _DrawRecord


class _ReplayedLoader:
    """Loader wrapper whose first iteration begins with the batch that was consumed already.

    Args:
        loader: The wrapped loader.
        taken: The consumed batch, and the iterator that it came from.
    """

    def __init__(self, loader: Any, taken: _ConsumedBatch) -> None:
        self.__dict__.update(_loader=loader, _taken=taken)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader) if self._taken is None else self._continued()

    def _continued(self) -> Iterator[Any]:
        # Some iterators are created and never read: the batch goes to the first that is read.
        taken = self._taken
        self.__dict__["_taken"] = None
        if taken is None:
            yield from self._loader
            return
        taken.drawn.repeat()
        yield taken.batch
        yield from taken.rest


class _StatefulReplayedLoader(_ReplayedLoader):
    """Variant of ``_ReplayedLoader`` for a stateful loader, whose loaded state replaces the consumed batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped loader's state."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the wrapped loader's state and drop the consumed batch."""
        self.__dict__["_taken"] = None
        self._loader.load_state_dict(state)


def on_device(trainer: pl.Trainer, batch: Any, dataloader_idx: int = 0) -> Any:
    """Return a batch converted to the Trainer's precision and moved to its device by the module's transfer hooks."""
    module = trainer.lightning_module
    batch = trainer.precision_plugin.convert_input(batch)
    batch = before_batch_transfer(module, batch, dataloader_idx)
    return batch_to_device(trainer, batch, dataloader_idx)


def _are_equal(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        # A device that is missing in one state was not used before and has drawn nothing.
        return all(_are_equal(first[key], second[key]) for key in first.keys() & second.keys())
    if isinstance(first, (tuple, list)):
        return len(first) == len(second) and all(map(_are_equal, first, second))
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    return bool((first == second).all()) if isinstance(first, np.ndarray) else bool(first == second)


@contextmanager
def undisturbed_random() -> Iterator[None]:
    """Context that restores the process' random number generators on exit."""
    states = rng_state()
    try:
        yield
    finally:
        set_rng_state(states)


def _source(trainer: pl.Trainer, stage: RunningStage) -> DataLoaderSource:
    if stage == RunningStage.TRAINING:
        return data_source(trainer.fit_loop)
    if stage in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING):
        fitting = trainer.state.fn == TrainerFn.FITTING
        return data_source(trainer.fit_loop.epoch_loop.val_loop if fitting else trainer.validate_loop)
    return data_source(trainer.test_loop if stage == RunningStage.TESTING else trainer.predict_loop)


def _first_indices(loader: Any) -> Any:
    """Return the first item of a loader's sampler, drawn from a copy; None if there is no sampler or no copy of it.

    The copy is needed since samplers may count their draws. A dataset that the sampler refers to is not copied.
    """
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return None
    if isinstance(loader.dataset, IterableDataset):
        return None
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    try:
        sampler = copy.deepcopy(sampler, {id(loader.dataset): loader.dataset})
    except Exception as error:
        # Iterators and files cannot be copied.
        rank_zero_debug(f"{type(sampler).__name__} is not copied ({error}): its first batch is taken and put back.")
        return None
    return _first(sampler)


def _loader_of(loader: DataLoader[Any], indices: Any) -> DataLoader[Any]:
    """Return a loader of these indices only, with the reading options of ``loader``."""
    one: dict[str, Any] = {"sampler": [indices], "batch_size": None}
    sampling = one if loader.batch_sampler is None else {"batch_sampler": [list(indices)]}
    workers = min(1, loader.num_workers)
    return DataLoader(
        loader.dataset,
        **sampling,
        collate_fn=loader.collate_fn,
        num_workers=workers,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context if workers else None,
        timeout=loader.timeout if workers else 0,
    )


def _peeked(fetcher: Any) -> Any:
    """Return the next batch of a loop's fetcher without consuming it."""
    if getattr(fetcher, "batches", None):
        return fetcher.batches[0][0]
    rest = fetcher.iterator
    drawn = _DrawRecord()
    try:
        item = next(rest)
    except StopIteration:
        raise NoSampleError("there is no batch") from None
    drawn.end()

    def again() -> Iterator[Any]:
        drawn.repeat()
        yield item
        # Lightning's CombinedLoader is its own iterator and restarts when iter() is called on it.
        while (following := next(rest, _END)) is not _END:
            yield following

    fetcher.iterator = again()
    return item[0]


def _first(batches: Any) -> Any:
    for batch in batches:
        return batch
    raise NoSampleError("there is no batch")
