"""A sample batch of each of the Trainer's loaders, taken without moving anything that training will use.

Tensor and pipeline parallelism run a step before the Trainer's loops fetch their first batch. The loader hook is called
once more for that, its data set is read in the loader's way, by a worker if it has any, and copies of samplers and
streams are used up in place of the user's own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from torch.utils._pytree import tree_unflatten
from torch.utils.data import DataLoader, IterableDataset

_STAGES = {
    TrainerFn.FITTING: RunningStage.TRAINING,
    TrainerFn.VALIDATING: RunningStage.VALIDATING,
    TrainerFn.TESTING: RunningStage.TESTING,
    TrainerFn.PREDICTING: RunningStage.PREDICTING,
}


class NoSampleError(ValueError):
    """A batch could not be had without changing what training will see; the message says why."""


def first_batch(trainer: pl.Trainer) -> Any:
    """A batch as the Trainer's first step will see it, on this rank's device.

    Raises:
        NoSampleError: If there is no data, or a stream can be read only once.
    """
    batches = sample_batches(trainer, _STAGES[trainer.state.fn or TrainerFn.FITTING])
    if not batches:
        raise NoSampleError("no data loader is defined")
    return batches[0]


def sample_batches(trainer: pl.Trainer, stage: RunningStage) -> list[Any]:
    """The first batch of each loader of a stage, on this rank's device, as the step function will get it.

    Args:
        trainer: Whose loaders.
        stage: Which of them.

    Returns:
        One batch for training; one a loader for evaluation. Empty if the stage has no loader.

    Raises:
        NoSampleError: If a loader has no batch, or a stream can be read only once.
    """
    source = _source(trainer, stage)
    if source.instance is None or not source.is_defined():
        return []
    with _undisturbed_random():
        loaders = source.dataloader()
        mode = "max_size_cycle" if stage == RunningStage.TRAINING else "sequential"
        combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, mode)  # type: ignore[arg-type]
        try:
            firsts = [_first_of_loader(loader) for loader in combined.flattened]
        except NoSampleError as problem:
            raise NoSampleError(f"{source.name}: {problem}") from problem
        if combined._mode == "sequential":
            batches = list(enumerate(firsts))
        else:
            batches = [(0, tree_unflatten(firsts, combined._spec))]
        return [on_device(trainer, batch, index) for index, batch in batches]


def on_device(trainer: pl.Trainer, batch: Any, dataloader_idx: int = 0) -> Any:
    """A batch in the Trainer's precision and on its device, as the module's transfer hooks have it."""
    module = trainer.lightning_module
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
    return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=dataloader_idx)


@contextmanager
def _undisturbed_random() -> Iterator[None]:
    states = _collect_rng_states(include_cuda=torch.cuda.is_available())
    try:
        yield
    finally:
        _set_rng_states(states)


def _source(trainer: pl.Trainer, stage: RunningStage) -> _DataLoaderSource:
    if stage == RunningStage.TRAINING:
        return trainer.fit_loop._data_source
    if stage in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING):
        fitting = trainer.state.fn == TrainerFn.FITTING
        return (trainer.fit_loop.epoch_loop.val_loop if fitting else trainer.validate_loop)._data_source
    return trainer.test_loop._data_source if stage == RunningStage.TESTING else trainer.predict_loop._data_source


def _first_of_loader(loader: Any) -> Any:
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return _first_of(_stream_copy(loader))
    dataset = loader.dataset
    sampling: dict[str, Any] = {"batch_size": loader.batch_size}
    if not isinstance(dataset, IterableDataset):
        # Samplers may count what they have given out. The data set, which they may refer to, is read and not written.
        whole = loader.batch_sampler is None
        drawn = _first_of(_copy(loader.sampler if whole else loader.batch_sampler, sharing=dataset))
        sampling = {"sampler": [drawn], "batch_size": None} if whole else {"batch_sampler": [list(drawn)]}
    elif not loader.num_workers:
        # Workers are processes of their own, with copies of the data set; in this process it is copied here.
        dataset = _stream_copy(dataset)
    workers = min(1, loader.num_workers)
    return _first_of(
        DataLoader(
            dataset,
            **sampling,
            collate_fn=loader.collate_fn,
            num_workers=workers,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context if workers else None,
            timeout=loader.timeout if workers else 0,
        )
    )


def _copy(value: Any, *, sharing: Any) -> Any:
    try:
        return copy.deepcopy(value, {id(sharing): sharing})
    except Exception:
        return value


def _stream_copy(stream: Any) -> Any:
    """A copy to read from. What cannot be copied is read itself, if it begins anew for everybody who asks.

    Raises:
        NoSampleError: If it does not.
    """
    dataset = getattr(stream, "dataset", None)
    try:
        return copy.deepcopy(stream, {} if isinstance(dataset, IterableDataset) else {id(dataset): dataset})
    except Exception as error:
        if iter(stream) is not iter(stream):
            return stream
        raise NoSampleError(
            f"{type(stream).__name__} can be read only once ({type(error).__name__}: {error})"
        ) from error


def _first_of(batches: Any) -> Any:
    for batch in batches:
        return batch
    raise NoSampleError("there is no batch")
