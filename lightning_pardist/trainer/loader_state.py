"""Loader state in checkpoints, from which a run resumes with the next samples and their random numbers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from lightning_pardist.axes.base import RunContext
from lightning_pardist.checkpoint.coordination import Coordinator
from lightning_pardist.checkpoint.tensors import ABOUT
from lightning_pardist.compat.lightning_functions import Stateful, set_sampler_epoch
from lightning_pardist.compat.lightning_loops import (
    combined_loader,
    count_stepped_batch,
    drop_loaders,
    load_loader_states,
    loader_states,
    restart_at_batch_end,
    set_restarting,
    trainer_of,
    was_restored,
)
from lightning_pardist.mesh import ParallelDims
from lightning_pardist.trainer.patch_stack import Patch
from lightning_pardist.trainer.resumable_loaders import Order, Skipping, rng_state, set_rng_state


class LoaderState:
    """Saves and restores the state of loaders, samplers and random generators, besides the Trainer's counters.

    Lightning counts the batches of an epoch, but a resumed run starts its loader from the first batch. Here the indices
    of batches that were trained on are skipped without loading them: with a ``DistributedSampler``, global batch ``b``
    is the same set of samples at any number of ranks, as long as the global batch size is the same. Stateful loaders
    (``torchdata``) are restored from their own state, each rank from its own.

    Args:
        context: Context of the strategy.
    """

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self._saved: dict[str, Any] = {}
        self._orders: list[Order] = []
        #: Number of loaders that were prepared, and of batches in the checkpoint, before a change of batch sizes.
        self._prepared = 0
        self._saved_batches: int | None = None
        self._first_advance: Patch | None = None
        #: State for a save after the run: that of the samplers at its end.
        self._at_end: dict[str, Any] | None = None
        #: Whether batches are being trained on; a checkpoint is then loaded for its weights only.
        self.training = False

    # --- saving -------------------------------------------------------------------------------------------------

    def state(self, exchange: Coordinator) -> dict[str, Any]:
        """Return the state to save. Collective over the exchange.

        Returns:
            The states of all ranks on the first rank, an empty dict elsewhere.
        """
        module = self.context.module
        trainer = None if module is None else trainer_of(module)
        if trainer is None:
            return {}
        ranks = exchange.gather(self._current_state(trainer) if self._at_end is None else self._at_end)
        if not ranks:
            return {}
        return {
            "layout": self.context.dims.layout,
            "global_batch": self._global_batch(trainer),
            "accumulated": trainer.accumulate_grad_batches,
            "ranks": ranks,
        }

    def _current_state(self, trainer: pl.Trainer) -> dict[str, Any]:
        return {
            "rng": rng_state(self.context.device),
            "orders": [order.started for order in self._orders],
            "loaders": _loader_states(trainer),
            "axes": {axis.name: state for axis in self.context.axes if (state := axis.state_dict())},
        }

    # --- loading ------------------------------------------------------------------------------------------------

    def take(self, checkpoint: dict[str, Any]) -> None:
        """Take the per-rank state out of a checkpoint, which leaves a plain Lightning checkpoint. Not collective."""
        saved = dict(checkpoint.pop(ABOUT, {}))
        if not self.training:
            self._saved = saved

    def settle(self, trainer: pl.Trainer) -> None:
        """Set the restored counters to those of an uninterrupted run at this point. Not collective.

        Lightning treats an epoch that ``max_steps`` cut short as finished, and an epoch that ended with its last batch
        as unfinished if the run is counted in steps: the next batch is of the wrong epoch, or was seen already. With
        the corrected counters, a run also resumes within the validation at the end of an epoch, and after it.
        """
        if trainer.state.fn != TrainerFn.FITTING or self.training:
            return
        fit_loop = trainer.fit_loop
        epochs, batches = fit_loop.epoch_progress, fit_loop.epoch_loop.batch_progress
        current: Any = epochs.current
        total: Any = epochs.total
        batch: Any = batches.current
        # Saved by a callback at the end of a batch: the batch is done, but not counted as completed yet.
        at_batch_end = batch.completed == batch.processed - 1 and batch.ready == batch.processed
        if at_batch_end:
            batches.increment_completed()
            count_stepped_batch(fit_loop.epoch_loop)
        finished = current.ready == current.started == current.processed and current.ready > 0
        whole = batches.is_last_batch and batch.completed == batch.ready
        if finished and current.completed == current.processed and not whole and batch.ready > 0:
            for progress in (current, total):
                progress.processed -= 1
                progress.completed -= 1
            # The flag was set when the counters were loaded, from their earlier values.
            set_restarting(fit_loop, True)
        elif at_batch_end and whole and current.processed == current.ready - 1:
            epochs.increment_processed()
            epochs.increment_completed()
            finished = True
        elif whole and current.processed == current.ready - 1:
            self._first_advance = Patch(fit_loop.epoch_loop, "advance", partial(self._end_epoch, fit_loop.epoch_loop))
            self._first_advance.attach()
        elif at_batch_end:
            run = partial(self._resume_after_batch, fit_loop.epoch_loop)
            self._first_advance = Patch(fit_loop.epoch_loop, "advance", run)
            self._first_advance.attach()
        if finished and whole:
            if current.completed == current.processed - 1:
                epochs.increment_completed()
            set_restarting(fit_loop, False)
        states = self._own("loaders")
        if states:
            load_loader_states(fit_loop, states)
        if combined_loader(fit_loop) is not None:
            self._reset_loaders(trainer)

    def _resume_after_batch(self, epoch_loop: Any, data_fetcher: Any) -> None:
        """Replacement for the first ``advance``: a counted batch would be taken as saved after its validation."""
        self._forget_first_advance()
        restart_at_batch_end(epoch_loop)
        epoch_loop.advance(data_fetcher)

    def _end_epoch(self, epoch_loop: Any, data_fetcher: Any) -> None:
        """Replacement for the first ``advance`` if the epoch has no batches left, only its end."""
        self._forget_first_advance()
        # Requesting a batch brings samplers and random numbers to the state of the save.
        with suppress(StopIteration):
            next(data_fetcher)
        epoch_loop.advance(data_fetcher)

    def _forget_first_advance(self) -> None:
        if self._first_advance is not None:
            self._first_advance.detach()
            self._first_advance = None

    def _reset_loaders(self, trainer: pl.Trainer) -> None:
        """Drop loaders that were set up before counters were restored, as by ``estimated_stepping_batches``."""
        drop_loaders(trainer.fit_loop)
        for order in self._orders:
            order.detach()
        self._orders, self._prepared, self._saved_batches = [], 0, None

    def prepare(self, trainer: pl.Trainer, loader: Any, whole: Any) -> Any:
        """Make a training loader resume after the batches of this epoch that were trained on. Not collective.

        Args:
            trainer: Trainer in ``fit``, with restored counters.
            loader: The loader, with its final sampler.
            whole: The same loader, with the batch that was consumed for planning in front.
        """
        self._at_end = None
        position, self._prepared = self._prepared, self._prepared + 1
        restored = was_restored(trainer.fit_loop)
        rng = self._own("rng") if restored else None
        if restored:
            self._load_axes()
        if isinstance(loader, Stateful):
            return Skipping(whole, 0, rng) if rng else whole
        if not isinstance(loader, DataLoader):
            return whole
        done = self._batches_done(trainer, loader, position) if trainer.fit_loop.restarting else 0
        if restored:
            # Workers start before Lightning sets the samplers' epoch.
            set_sampler_epoch(loader, trainer.current_epoch)
        if not done and rng:
            set_rng_state(rng)
        if isinstance(loader.dataset, IterableDataset):
            return Skipping(whole, done, rng) if done else whole
        index = len(self._orders)
        # Custom samplers draw the same order on all ranks, at any number of ranks.
        started = self._of_samples().get("orders", [])[index : index + 1]
        order = Order(loader, done, started[0] if started else None, rng)
        order.attach()
        self._orders.append(order)
        if done:
            warnings.filterwarnings("ignore", message=r".*dataloader is not resumable.*")
        return whole

    def forget(self) -> None:
        """Restore the loaders' samplers after the run, and keep the state for saves after it."""
        module = self.context.module
        trainer = None if module is None else trainer_of(module)
        if (
            trainer is not None
            and trainer.state.fn == TrainerFn.FITTING
            and combined_loader(trainer.fit_loop) is not None
        ):
            self._at_end = self._current_state(trainer)
        self._forget_first_advance()
        for order in self._orders:
            order.detach()
        self._orders, self._saved, self.training = [], {}, False
        self._prepared, self._saved_batches = 0, None

    def _own(self, what: str) -> Any:
        """Return this rank's part of a saved state, from a rank with the same samples; None if the shares changed."""
        saved = self._saved_dims
        if saved is None or saved.batch_size != self.context.dims.batch_size or self.context.distributed.is_follower:
            return None
        return self._of_samples().get(what)

    def _of_samples(self) -> Mapping[str, Any]:
        """Return the state that this rank saved; if the layout changed, that of the first rank with its samples."""
        saved, dims = self._saved_dims, self.context.dims
        # Of parallel worlds, only the first one saves.
        rank = self.context.distributed.global_rank % dims.world_size
        if saved is None:
            return {}
        if saved != dims:
            rank = saved.first_rank_of(dims.batch_rank(rank) % saved.batch_size)
        found: Mapping[str, Any] = self._saved["ranks"][rank]
        return found

    @property
    def _saved_dims(self) -> ParallelDims | None:
        layout = self._saved.get("layout")
        return None if layout is None else ParallelDims.from_layout(layout)

    def _load_axes(self) -> None:
        """Load every axis' state from a rank with the same samples, if the number of shares is unchanged.

        Of parallel worlds only the first one saves, for all of them at any number.
        """
        alike = any(axis.isolated_workers for axis in self.context.axes)
        states = dict((self._of_samples().get("axes") if alike else self._own("axes")) or {})
        if (position := self._own("pipeline")) is not None:
            # Key of checkpoints before 0.1.0.
            states["pipeline"] = {"random_position": position}
        for axis in self.context.axes:
            if axis.name in states:
                axis.load_state_dict(states[axis.name])

    def _global_batch(self, trainer: pl.Trainer) -> list[int | None]:
        combined = combined_loader(trainer.fit_loop)
        loaders = [] if combined is None else combined.flattened
        return [_batch_size(loader, self.context.replicas) for loader in loaders]

    def _batches_done(self, trainer: pl.Trainer, loader: DataLoader[Any], position: int) -> int:
        """Return how many batches of a loader were trained on; the first loader of known size sets the counters.

        Args:
            trainer: Trainer with restored counters.
            loader: The loader.
            position: Its position among the Trainer's loaders.
        """
        current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        before = next(iter(self._saved.get("global_batch", [])[position : position + 1]), None)
        now = _batch_size(loader, self.context.replicas)
        is_first = self._saved_batches is None
        done = int(current.completed) if self._saved_batches is None else self._saved_batches
        if not done or before is None or now is None:
            return done
        self._saved_batches = done
        if before == now:
            return done
        samples = done * before
        same_step = before * self._saved.get("accumulated", 1) == now * trainer.accumulate_grad_batches
        if samples % now or not same_step:
            rank_zero_warn(
                f"The checkpoint was saved in the middle of an epoch with a global batch of {before} samples, now it is"
                f" {now}: the run resumes at sample {samples // now * now} of the epoch, and {samples % now} samples"
                " are repeated."
            )
        if is_first:
            for name in ("ready", "started", "processed", "completed"):
                setattr(current, name, samples // now)
        return int(samples // now)


def _loader_states(trainer: pl.Trainer) -> list[Any]:
    combined = combined_loader(trainer.fit_loop)
    return [] if combined is None else loader_states(combined)


def _batch_size(loader: Any, replicas: int) -> int | None:
    size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None) or getattr(loader, "batch_size", None)
    return size * replicas if isinstance(size, int) else None
