"""Going on exactly where a run was saved: the same samples next, with the same random numbers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from lightning_pardist.engines.checkpoint.exchange import Exchange
from lightning_pardist.engines.checkpoint.states import ABOUT
from lightning_pardist.mesh import AXES
from lightning_pardist.strategies.attachments import Replaced
from lightning_pardist.strategies.sampling import Order, Skipping, rng_state, set_rng_state

if TYPE_CHECKING:
    from lightning_pardist.strategies.base import PardistStrategy


class Continuing:
    """What a checkpoint has to know beside the Trainer's counters, and how a run goes on from it.

    Lightning counts the batches of an epoch, but starts the loader of a resumed run from its first one. Here the
    indices of the batches that were trained on are skipped, without loading them: with a ``DistributedSampler`` batch
    ``b`` of all ranks together is the same set of samples at any number of ranks, as long as the global batch is.
    Loaders that keep a state of their own (``torchdata``'s) get it back, each rank its own.

    Args:
        strategy: Whose runs.
    """

    def __init__(self, strategy: PardistStrategy) -> None:
        self.strategy = strategy
        self._saved: dict[str, Any] = {}
        self._orders: list[Order] = []
        self._end_of_epoch: Replaced | None = None
        #: What a save after the run has to say: where its samplers were when it ended.
        self._at_end: dict[str, Any] | None = None

    # --- saving -------------------------------------------------------------------------------------------------

    def state(self, exchange: Exchange) -> dict[str, Any]:
        """What to save. Collective over the exchange.

        Returns:
            On the first rank the states of all ranks, elsewhere nothing.
        """
        module = self.strategy.lightning_module
        trainer = None if module is None else module._trainer
        if trainer is None:
            return {}
        ranks = exchange.gather(self._now(trainer) if self._at_end is None else self._at_end)
        if not ranks:
            return {}
        return {
            "layout": self._layout(),
            "global_batch": self._global_batch(trainer),
            "accumulated": trainer.accumulate_grad_batches,
            "ranks": ranks,
        }

    def _now(self, trainer: pl.Trainer) -> dict[str, Any]:
        return {
            "rng": rng_state(self.strategy.root_device),
            "orders": [order.started for order in self._orders],
            "loaders": _loader_states(trainer),
            "pipeline": None if self.strategy.pipeline is None else self.strategy.pipeline.random_position,
        }

    # --- loading ------------------------------------------------------------------------------------------------

    def take(self, checkpoint: dict[str, Any]) -> None:
        """Note what a checkpoint says of its ranks, and leave what Lightning's own hold. Not collective."""
        self._saved = dict(checkpoint.pop(ABOUT, {}))

    def settle(self, trainer: pl.Trainer) -> None:
        """Set the restored counters to what a run that was never interrupted has there. Not collective.

        Lightning takes an epoch that ``max_steps`` cut short for a finished one, and one that ended with its last batch
        for unfinished if the run is counted in steps: its next batch is of the wrong epoch, or one that was seen.
        It goes on in the validation at the end of an epoch, and after it.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return
        fit_loop = trainer.fit_loop
        epochs, batches = fit_loop.epoch_progress, fit_loop.epoch_loop.batch_progress
        current: Any = epochs.current
        total: Any = epochs.total
        batch: Any = batches.current
        # Saved by a callback at the end of a batch: the batch is done, its counter comes later.
        at_batch_end = batch.completed == batch.processed - 1 and batch.ready == batch.processed
        if at_batch_end:
            batches.increment_completed()
            fit_loop.epoch_loop._batches_that_stepped += not fit_loop.epoch_loop._should_accumulate()
        finished = current.ready == current.started == current.processed and current.ready > 0
        whole = batches.is_last_batch and batch.completed == batch.ready
        if finished and current.completed == current.processed and not whole and batch.ready > 0:
            for progress in (current, total):
                progress.processed -= 1
                progress.completed -= 1
            # Decided when the counters were loaded, from what they said then.
            _Loop.restarting.fset(fit_loop, True)  # type: ignore[attr-defined]
        elif at_batch_end and whole and current.processed == current.ready - 1:
            epochs.increment_processed()
            epochs.increment_completed()
            finished = True
        elif whole and current.processed == current.ready - 1:
            self._end_of_epoch = Replaced(fit_loop.epoch_loop, "advance", partial(self._end_epoch, fit_loop.epoch_loop))
            self._end_of_epoch.attach()
        if finished and whole:
            if current.completed == current.processed - 1:
                epochs.increment_completed()
            _Loop.restarting.fset(fit_loop, False)  # type: ignore[attr-defined]
        states = self._own("loaders")
        if states:
            fit_loop._combined_loader_states_to_load = states
        if fit_loop._combined_loader is not None:
            self._start_loaders_anew(trainer)

    def _end_epoch(self, epoch_loop: Any, data_fetcher: Any) -> None:
        """Stands in for ``advance`` where an epoch has no batches left, only its end."""
        self._forget_end_of_epoch()
        # Its samplers and random numbers get to where the run was saved when the loader is asked for the next batch.
        with suppress(StopIteration):
            next(data_fetcher)
        epoch_loop.advance(data_fetcher)

    def _forget_end_of_epoch(self) -> None:
        if self._end_of_epoch is not None:
            self._end_of_epoch.detach()
            self._end_of_epoch = None

    def _start_loaders_anew(self, trainer: pl.Trainer) -> None:
        """Loaders were asked for before there were counters: ``estimated_stepping_batches`` in configure_optimizers."""
        fit_loop = trainer.fit_loop
        if fit_loop._data_fetcher is not None:
            fit_loop._data_fetcher.teardown()
        fit_loop._data_fetcher = fit_loop._combined_loader = None
        for order in self._orders:
            order.detach()
        self._orders = []

    def prepare(self, trainer: pl.Trainer, loader: Any) -> Any:
        """Make a training loader go on behind the batches of this epoch that were trained on. Not collective.

        Args:
            trainer: In ``fit``, its counters restored.
            loader: With the sampler that it is going to use.
        """
        self._at_end = None
        restored = trainer.fit_loop._loaded_from_state_dict
        rng = self._own("rng") if restored else None
        if self.strategy.pipeline is not None and restored and (position := self._own("pipeline")) is not None:
            self.strategy.pipeline.random_position = position
        if isinstance(loader, _Stateful):
            return Skipping(loader, 0, rng) if rng else loader
        if not isinstance(loader, DataLoader):
            return loader
        done = self._batches_done(trainer, loader) if trainer.fit_loop.restarting else 0
        if restored:
            # Workers begin before Lightning tells samplers the epoch.
            _set_sampler_epoch(loader, trainer.current_epoch)
        if not done and rng:
            set_rng_state(rng)
        if isinstance(loader.dataset, IterableDataset):
            return Skipping(loader, done, rng) if done else loader
        index = len(self._orders)
        # Samplers of the user's own draw one order on all ranks, however many there are.
        started = self._of_samples().get("orders", [])[index : index + 1]
        order = Order(loader, done, started[0] if started else None, rng)
        order.attach()
        self._orders.append(order)
        if done:
            warnings.filterwarnings("ignore", message=r".*dataloader is not resumable.*")
        return loader

    def forget(self) -> None:
        """The run is over: loaders get their own samplers back. It may still be saved, or saved again."""
        module = self.strategy.lightning_module
        trainer = None if module is None else module._trainer
        if (
            trainer is not None
            and trainer.state.fn == TrainerFn.FITTING
            and trainer.fit_loop._combined_loader is not None
        ):
            self._at_end = self._now(trainer)
        self._forget_end_of_epoch()
        for order in self._orders:
            order.detach()
        self._orders, self._saved = [], {}

    def _own(self, what: str) -> Any:
        """This rank's part of a state, or that of a rank with the same samples; None if other ranks share them now."""
        if "layout" not in self._saved or self._saved_replicas() != self.strategy.dims.data_parallel:
            return None
        return self._of_samples().get(what)

    def _of_samples(self) -> Mapping[str, Any]:
        """What this rank saved; laid out otherwise, the first stage's first tensor rank with this rank's samples."""
        if "layout" not in self._saved:
            return {}
        *_, tensor = self._saved["layout"]
        rank = self.strategy.distributed_sampler_kwargs["rank"] % self._saved_replicas() * tensor
        if self._saved["layout"] == self._layout():
            rank = self.strategy.global_rank
        found: Mapping[str, Any] = self._saved["ranks"][rank]
        return found

    def _layout(self) -> list[int]:
        return [getattr(self.strategy.dims, axis) for axis in AXES]

    def _saved_replicas(self) -> int:
        _, replicate, shard, _ = self._saved["layout"]
        return int(replicate * shard)

    def _global_batch(self, trainer: pl.Trainer) -> list[int | None]:
        combined = trainer.fit_loop._combined_loader
        loaders = [] if combined is None else combined.flattened
        return [_batch_size(loader, self.strategy.dims.data_parallel) for loader in loaders]

    def _batches_done(self, trainer: pl.Trainer, loader: DataLoader[Any]) -> int:
        current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        done = int(current.completed)
        before = (self._saved.get("global_batch") or [None])[0]
        now = _batch_size(loader, self.strategy.dims.data_parallel)
        if not done or not self._saved or before == now or before is None or now is None:
            return done
        samples = done * before
        same_step = before * self._saved.get("accumulated", 1) == now * trainer.accumulate_grad_batches
        if samples % now or not same_step:
            rank_zero_warn(
                f"The checkpoint was saved in the middle of an epoch with a global batch of {before} samples, now it is"
                f" {now}: the run goes on at sample {samples // now * now} of the epoch; {samples % now} come twice."
            )
        for name in ("ready", "started", "processed", "completed"):
            setattr(current, name, samples // now)
        return int(samples // now)


def _loader_states(trainer: pl.Trainer) -> list[Any]:
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else combined._state_dicts()


def _batch_size(loader: Any, replicas: int) -> int | None:
    size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None) or getattr(loader, "batch_size", None)
    return size * replicas if isinstance(size, int) else None
