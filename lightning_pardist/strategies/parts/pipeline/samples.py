"""A sample batch of each of the Trainer's loaders, taken without moving anything that training will use.

A pipeline records a run of every step function before the module is taken apart, which is before the Trainer's loops
fetch their first batch. The loader is asked for anew, its samples are collated in this process (no workers start), and
generators, samplers and the random state are put back.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import numpy
import torch
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from torch.utils._pytree import tree_unflatten
from torch.utils.data import DataLoader, IterableDataset


class NoSampleError(ValueError):
    """A loader gives no batch to record a run of a step with."""


def sample_batches(trainer: pl.Trainer, stage: RunningStage) -> list[Any]:
    """The first batch of each loader of a stage, on this rank's device, as the step function will get it.

    Args:
        trainer: Whose loaders.
        stage: Which of them.

    Returns:
        One batch for training; one a loader for evaluation. Empty if the stage has no loader.

    Raises:
        NoSampleError: If a loader has no batch.
    """
    source = _source(trainer, stage)
    if source.instance is None or not source.is_defined():
        return []
    with undisturbed_random():
        loaders = source.dataloader()
        mode = "max_size_cycle" if stage == RunningStage.TRAINING else "sequential"
        combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, mode)  # type: ignore[arg-type]
        firsts = [_first(loader, source.name) for loader in combined.flattened]
        if combined._mode == "sequential":
            batches = list(enumerate(firsts))
        else:
            batches = [(0, tree_unflatten(firsts, combined._spec))]
        return [_transferred(trainer, batch, index) for index, batch in batches]


@contextmanager
def undisturbed_random() -> Iterator[None]:
    """Put the random states of torch, numpy and Python back afterwards."""
    python, numbers = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numbers)


def _source(trainer: pl.Trainer, stage: RunningStage) -> _DataLoaderSource:
    if stage == RunningStage.TRAINING:
        return trainer.fit_loop._data_source
    if stage in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING):
        fitting = trainer.state.fn == TrainerFn.FITTING
        return (trainer.fit_loop.epoch_loop.val_loop if fitting else trainer.validate_loop)._data_source
    return trainer.test_loop._data_source if stage == RunningStage.TESTING else trainer.predict_loop._data_source


def _first(loader: Any, name: str) -> Any:
    try:
        if not isinstance(loader, DataLoader):
            return next(iter(loader))
        return _first_of_loader(loader)
    except StopIteration:
        raise NoSampleError(
            f"{name} gives no batch, and a pipeline needs one to record a run of the step with. Give it one sample at"
            " least, or turn that loop off (limit_val_batches=0)."
        ) from None


def _first_of_loader(loader: DataLoader[Any]) -> Any:
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        samples = iter(dataset)
        if samples is dataset:
            raise NoSampleError(
                f"{type(dataset).__name__} is its own iterator, so that the batch a pipeline records its run with would"
                " be lost. Let __iter__ return a new iterator."
            )
        if loader.batch_size is None:
            return loader.collate_fn(next(samples))
        taken = [sample for sample, _ in zip(samples, range(loader.batch_size), strict=False)]
        if not taken:
            raise StopIteration
        return loader.collate_fn(taken)
    generators = {id(g): g for g in _generators(loader)}
    states = [(generator, generator.get_state()) for generator in generators.values()]
    try:
        if loader.batch_sampler is None:
            return loader.collate_fn(dataset[next(iter(_own_copy(loader.sampler)))])
        indices = list(next(iter(_own_copy(loader.batch_sampler))))
        fetch_all = getattr(dataset, "__getitems__", None)
        return loader.collate_fn(fetch_all(indices) if callable(fetch_all) else [dataset[i] for i in indices])
    finally:
        for generator, state in states:
            generator.set_state(state)


def _own_copy(sampler: Any) -> Any:
    """Samplers may count what they have given out; generators cannot be copied and are put back instead."""
    generators = {id(g): g for g in (getattr(sampler, "generator", None),) if g is not None}
    try:
        return copy.deepcopy(sampler, dict(generators))
    except Exception:
        return sampler


def _generators(loader: DataLoader[Any]) -> Iterator[torch.Generator]:
    sampler = loader.batch_sampler
    for owner in (loader, loader.sampler, sampler, getattr(sampler, "sampler", None)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            yield generator


def _transferred(trainer: pl.Trainer, batch: Any, dataloader_idx: int) -> Any:
    module = trainer.lightning_module
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
    return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=dataloader_idx)
