"""Going on exactly where a run was saved: the same samples next, with the same random numbers."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from lightning_pardist.engines.checkpoint.exchange import Exchange
from lightning_pardist.engines.checkpoint.states import ABOUT

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
        self._orders: list[_Order] = []

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
        own = {
            "rng": rng_state(self.strategy.root_device),
            "orders": [order.started for order in self._orders],
            "loaders": _loader_states(trainer),
        }
        ranks = exchange.gather(own)
        layout = [getattr(self.strategy.dims, axis) for axis in _AXES]
        if not ranks:
            return {}
        accumulated = trainer.accumulate_grad_batches
        return {
            "layout": layout,
            "global_batch": self._global_batch(trainer),
            "accumulated": accumulated,
            "ranks": ranks,
        }

    # --- loading ------------------------------------------------------------------------------------------------

    def take(self, checkpoint: Mapping[str, Any]) -> None:
        """Note what a checkpoint says of its ranks. Not collective."""
        self._saved = dict(checkpoint.get(ABOUT, {}))

    def settle(self, trainer: pl.Trainer) -> None:
        """Set the restored counters to what a run that was never interrupted has there. Not collective.

        Lightning takes an epoch that ``max_steps`` cut short for a finished one, and one that ended with its last batch
        for unfinished if the run is counted in steps: its next batch is of the wrong epoch, or one that was seen.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return
        fit_loop = trainer.fit_loop
        epochs, batches = fit_loop.epoch_progress, fit_loop.epoch_loop.batch_progress
        current: Any = epochs.current
        total: Any = epochs.total
        batch: Any = batches.current
        # Saved by a callback at the end of a batch: the batch is done, its counter comes later.
        if batch.completed == batch.processed - 1 and batch.ready == batch.processed:
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
        elif whole and not finished and current.processed == current.ready - 1:
            epochs.increment_processed()
            epochs.increment_completed()
            finished = True
        if finished and whole:
            if current.completed == current.processed - 1:
                epochs.increment_completed()
            _Loop.restarting.fset(fit_loop, False)  # type: ignore[attr-defined]
        states = self._own("loaders")
        if states:
            fit_loop._combined_loader_states_to_load = states
        if fit_loop._combined_loader is not None:
            self._start_loaders_anew(trainer)

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
        if isinstance(loader, _Stateful) or not isinstance(loader, DataLoader):
            return loader
        restored = trainer.fit_loop._loaded_from_state_dict
        done = self._batches_done(trainer, loader) if trainer.fit_loop.restarting else 0
        if restored:
            # Workers begin before Lightning tells samplers the epoch.
            _set_sampler_epoch(loader, trainer.current_epoch)
        rng = self._own("rng") if restored else None
        if not done and rng:
            set_rng_state(rng)
        if isinstance(loader.dataset, IterableDataset):
            return _Skipping(loader, done, rng) if done else loader
        index = len(self._orders)
        started = (self._own("orders") or [])[index : index + 1]
        order = _Order(loader, done, started[0] if started else None, rng)
        order.attach()
        self._orders.append(order)
        if done:
            warnings.filterwarnings("ignore", message=r".*dataloader is not resumable.*")
        return loader

    def forget(self) -> None:
        """The run is over: loaders get their own samplers back."""
        for order in self._orders:
            order.detach()
        self._orders, self._saved = [], {}

    def _own(self, what: str) -> Any:
        """This rank's part of a state, if ranks are laid out now as they were then."""
        layout = [getattr(self.strategy.dims, axis) for axis in _AXES]
        if self._saved.get("layout") != layout:
            return None
        return self._saved["ranks"][self.strategy.global_rank].get(what)

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


class _Order:
    """A loader's sampler that begins once behind the indices of batches that were trained on.

    Attributes:
        started: The random state with which the order of this epoch was drawn.
    """

    def __init__(self, loader: DataLoader[Any], skip: int, started: Any, rng: Any) -> None:
        self._loader = loader
        self._sampler = loader._index_sampler
        self._generators = [
            generator
            for owner in (loader, loader.sampler)
            if isinstance(generator := getattr(owner, "generator", None), torch.Generator)
        ]
        self._skip = skip
        self._resumed_from = started
        self._rng = rng
        self.started: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def attach(self) -> None:
        """Take the sampler's place."""
        # DataLoader refuses a new sampler by assignment; its iterators look these up each time.
        self._loader.__dict__["batch_sampler" if self._loader._auto_collation else "sampler"] = self

    def detach(self) -> None:
        """Give the sampler its place back."""
        self._loader.__dict__["batch_sampler" if self._loader._auto_collation else "sampler"] = self._sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        if skip and self._resumed_from:
            set_rng_state(self._resumed_from["rng"])
            for generator, state in zip(self._generators, self._resumed_from["generators"], strict=False):
                generator.set_state(state)
        generators = [generator.get_state() for generator in self._generators]
        self.started = {"rng": rng_state(torch.device("cpu")), "generators": generators}
        indices = iter(self._sampler)
        for _ in islice(indices, skip % max(len(self._sampler), 1) if skip else 0):
            pass
        if skip and self._rng:
            set_rng_state(self._rng)
        yield from indices


class _Skipping:
    """A loader of an iterable dataset, whose first batches have to be loaded to be skipped."""

    def __init__(self, loader: DataLoader[Any], skip: int, rng: Any) -> None:
        self._loader = loader
        self._skip = skip
        self._rng = rng

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        batches = iter(self._loader)
        for _ in islice(batches, skip):
            pass
        if skip and self._rng:
            set_rng_state(self._rng)
        yield from batches


_AXES = ("pipeline_parallel", "data_replicate", "data_shard", "tensor_parallel")


def rng_state(device: torch.device) -> dict[str, Any]:
    """The states of this process' random number generators, as tensors and plain values.

    Args:
        device: Whose generator is included, if it has one of its own.
    """
    version, words, cached = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": (version, list(words), cached)}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    try:
        import numpy as np
    except ImportError:
        return state
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)
    state["numpy"] = {
        "name": str(numpy_state["bit_generator"]),
        "keys": torch.from_numpy(numpy_state["state"]["key"].astype("int64")),
        "position": int(numpy_state["state"]["pos"]),
        "has_gauss": int(numpy_state["has_gauss"]),
        "gauss": float(numpy_state["gauss"]),
    }
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """The inverse of :func:`rng_state`, for what both machines have."""
    torch.set_rng_state(state["torch"])
    version, words, cached = state["python"]
    random.setstate((version, tuple(words), cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        import numpy as np

        saved = state["numpy"]
        keys = saved["keys"].numpy().astype("uint32")
        np.random.set_state((saved["name"], keys, saved["position"], saved["has_gauss"], saved["gauss"]))


def _loader_states(trainer: pl.Trainer) -> list[Any]:
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else combined._state_dicts()


def _batch_size(loader: Any, replicas: int) -> int | None:
    size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None) or getattr(loader, "batch_size", None)
    return size * replicas if isinstance(size, int) else None
