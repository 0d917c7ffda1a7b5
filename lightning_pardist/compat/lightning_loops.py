"""The Trainer's connectors and loops, which have no public names in Lightning, and replacement of their methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.training_epoch_loop import RestartStage
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource, _request_dataloader
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torch.optim import Optimizer

from lightning_pardist.compat.contract import Private

_TRAINER = "lightning.pytorch.Trainer"
_FIT = "lightning.pytorch.loops.fit_loop._FitLoop"
_EPOCH = "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop"
_EVALUATION = "lightning.pytorch.loops.evaluation_loop._EvaluationLoop"
_PREDICTION = "lightning.pytorch.loops.prediction_loop._PredictionLoop"
_COMBINED = "lightning.pytorch.utilities.CombinedLoader"
_DATA = "lightning.pytorch.trainer.connectors.data_connector"
_LOGGED = "lightning.pytorch.trainer.connectors.logger_connector.result"
_SIGNALS = "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector"
_ACCELERATOR = "lightning.pytorch.trainer.connectors.accelerator_connector._AcceleratorConnector"

_FETCHERS = "lightning.pytorch.loops.fetchers"

_EVEN = "equally many training steps on all ranks"
_RESUME = "going on in the middle of an epoch"
_EXACT = "evaluation of every sample once"
_LOGS = "logged values over all ranks"
_SAMPLE = "a sample batch, taken before the loops run"
_STOP = "checkpoints when a job is stopped by a signal"
_HOOK = "look for the place in Lightning's loops that calls it, or for a hook"
_BETTER = "look for a public property"
NAMES = (
    Private(f"{_TRAINER}._data_connector", _EXACT, _HOOK),
    Private(f"{_TRAINER}._logger_connector", _LOGS, _HOOK),
    Private(f"{_TRAINER}._signal_connector", _STOP, _HOOK),
    Private(f"{_TRAINER}._checkpoint_connector", "jobs that continue by themselves", "pass ckpt_path"),
    Private(f"{_TRAINER}._accelerator_connector", "precision of a DeepSpeed config", "trainer.precision"),
    Private(f"{_TRAINER}._results", _LOGS, _HOOK),
    Private(f"{_TRAINER}._active_loop", _EXACT, _HOOK),
    Private(f"{_TRAINER}._teardown", "the end of a run that has failed", "strategy.teardown()"),
    Private(f"{_ACCELERATOR}._precision_flag", "precision of a DeepSpeed config", "trainer.precision"),
    Private(f"{_SIGNALS}._register_signal", _STOP, "signal.signal"),
    Private(f"{_SIGNALS}._sigterm_notifier_fn", _STOP, _HOOK),
    Private(f"{_DATA}._DataConnector._prepare_dataloader", _EXACT, _HOOK),
    Private(f"{_DATA}._DataConnector._requires_distributed_sampler", _EXACT, _HOOK),
    Private(f"{_DATA}._DataLoaderSource", _SAMPLE, "call the loader hooks of module and data module"),
    Private(f"{_DATA}._request_dataloader", _SAMPLE, "source.dataloader()"),
    Private("lightning.pytorch.callbacks.ModelCheckpoint._train_time_interval",
            "refusing callbacks that decide by the time of one worker", _BETTER),
    Private(f"{_PREDICTION}._return_predictions", "predictions of ranks by fork or spawn",
            "a BasePredictionWriter callback", on_instances=True),
    Private(f"{_EVALUATION}._data_fetcher", "evaluation batches of a pipeline in flight", "eval_batches_in_flight=1"),
    Private(f"{_FIT}._combined_loader", _RESUME, "trainer.train_dataloader"),
    Private(f"{_FIT}._combined_loader_states_to_load", _RESUME, _HOOK),
    Private(f"{_FIT}._data_fetcher", _RESUME, _HOOK),
    Private(f"{_FETCHERS}._DataFetcher", _EVEN, _HOOK),
    Private(f"{_FETCHERS}._DataLoaderIterDataFetcher", _EVEN, _HOOK),
    Private(f"{_FETCHERS}._PrefetchDataFetcher", _EVEN, _HOOK),
    Private(f"{_FIT}._data_source", _SAMPLE, "call the loader hooks of module and data module"),
    Private(f"{_FIT}._loaded_from_state_dict", _RESUME, _BETTER),
    Private("lightning.pytorch.loops.loop._Loop", _RESUME, _BETTER),
    Private(f"{_EPOCH}._batches_that_stepped", _RESUME, _BETTER),
    Private(f"{_EPOCH}._restart_stage", _RESUME, _BETTER),
    Private(f"{_EPOCH}._should_accumulate", _RESUME, "count batches"),
    Private(f"{_EPOCH}._get_monitor_value", "schedulers that step by a logged value", _HOOK),
    Private(f"{_EPOCH}._broadcast_sigterm_tensor", _STOP, _HOOK),
    Private(f"{_EVALUATION}._combined_loader", _EXACT, "trainer.val_dataloaders"),
    Private(f"{_EVALUATION}._data_source", _SAMPLE, "call the loader hooks of module and data module"),
    Private(f"{_EVALUATION}._evaluation_step", _EXACT, _HOOK),
    Private(f"{_EVALUATION}._is_sequential", _EXACT, _BETTER),
    Private(f"{_EVALUATION}._results", "refusing callbacks that decide by one worker's numbers", _BETTER),
    Private(f"{_COMBINED}._mode", _EXACT, _BETTER),
    Private(f"{_COMBINED}._spec", _EXACT, "flatten combined.iterables"),
    Private(f"{_COMBINED}._state_dicts", _RESUME, "ask each of combined.flattened"),
    Private(f"{_LOGGED}._Metadata", _LOGS, _HOOK),
    Private(f"{_LOGGED}._ResultCollection", _LOGS, _HOOK),
    Private(f"{_LOGGED}._ResultMetric", _LOGS, _HOOK),
    Private(f"{_LOGGED}._Sync", _LOGS, _HOOK),
    Private(f"{_LOGGED}._Sync._should", _LOGS, _HOOK),
    Private(f"{_LOGGED}._Metadata._sync", _LOGS, _HOOK),
    Private("lightning.pytorch.trainer.call._call_strategy_hook", _SAMPLE, "strategy.batch_to_device"),
    Private("lightning.pytorch.LightningModule._on_before_batch_transfer", _SAMPLE, "call the module's hooks"),
    Private("lightning.pytorch.LightningModule._trainer", "modules without a Trainer", "module.trainer, which raises"),
    Private("lightning.pytorch.LightningModule._current_fx_name", "self.log in a trial run", "do not log there"),
    Private("lightning.pytorch.LightningModule._fabric", "copying a module without its run", "leave it out"),
    Private("lightning.pytorch.LightningModule._device_mesh", "self.device_mesh in configure_model", _BETTER),
    Private("lightning.pytorch.LightningModule._compiler_ctx", "refusing a module that is compiled as a whole",
            "isinstance(module, OptimizedModule)", on_instances=True),
    Private("lightning.pytorch.core.optimizer.LightningOptimizer._strategy", "self.optimizers() in a trial run",
            _BETTER),
    Private("lightning.pytorch.strategies.Strategy._lightning_optimizers", "zero_grad of whole gradients", _BETTER),
    Private("lightning.pytorch.strategies.ParallelStrategy._layer_sync", "sync_batchnorm on any device",
            "trainer's argument"),
)  # fmt: skip

#: Methods that :func:`replace` replaces for a run.
PREPARE_DATALOADER = "_prepare_dataloader"
REQUIRES_DISTRIBUTED_SAMPLER = "_requires_distributed_sampler"
EVALUATION_STEP = "_evaluation_step"
GET_MONITOR_VALUE = "_get_monitor_value"
SIGTERM_NOTIFIER = "_sigterm_notifier_fn"
BROADCAST_SIGTERM = "_broadcast_sigterm_tensor"
SHOULD_ACCUMULATE = "_should_accumulate"

DataFetcher = _DataFetcher
IteratorFetcher = _DataLoaderIterDataFetcher
PrefetchFetcher = _PrefetchDataFetcher
DataLoaderSource = _DataLoaderSource
LogMetadata = _Metadata
LoggedMetric = _ResultMetric
LoggedMetrics = _ResultCollection


def return_predictions(trainer: pl.Trainer, *, if_asked: bool) -> None:
    """Make ``trainer.predict`` return predictions even if Lightning sees that ranks are started by fork or spawn.

    Args:
        trainer: This rank's Trainer; the change of its loop is permanent.
        if_asked: Whether ``return_predictions=True`` is accepted as well; Lightning refuses it.
    """
    kind: Any = type(trainer.predict_loop)

    class Returning(kind):  # type: ignore[misc]
        def _set(self, value: bool | None) -> None:
            if value is None or (value and if_asked):
                self._return_predictions = True
            else:
                kind.return_predictions.fset(self, value)

        return_predictions = kind.return_predictions.setter(_set)

    trainer.predict_loop.__class__ = Returning


def method(of: Any, name: str) -> Callable[..., Any]:
    """Return a method by one of the names above."""
    found: Callable[..., Any] = getattr(of, name)
    return found


def replace(of: Any, name: str, value: Callable[..., Any]) -> None:
    """Replace a method on one object; its class stays as it is."""
    of.__dict__[name] = value


def restore(of: Any, *names: str) -> None:
    """Restore the methods of an object's class."""
    for name in names:
        of.__dict__.pop(name, None)


# --- the Trainer ----------------------------------------------------------------------------------------------------


def trainer_of(module: pl.LightningModule) -> pl.Trainer | None:
    """Return the module's Trainer, or None."""
    return module._trainer


def data_connector(trainer: pl.Trainer) -> Any:
    """Return the Trainer's data connector, which puts samplers into loaders."""
    return trainer._data_connector


def logger_connector(trainer: pl.Trainer) -> Any:
    """Return the Trainer's logger connector, which collects logged values."""
    return trainer._logger_connector


def train_fetcher(trainer: pl.Trainer) -> Any:
    """Return the fetcher of training batches; None before the loaders are created."""
    return trainer.fit_loop._data_fetcher


def set_train_fetcher(trainer: pl.Trainer, fetcher: _DataFetcher) -> None:
    """Replace the fetcher of training batches."""
    trainer.fit_loop._data_fetcher = fetcher


def signal_connector(trainer: pl.Trainer) -> Any:
    """Return the Trainer's signal connector."""
    return trainer._signal_connector


def checkpoint_connector(trainer: pl.Trainer) -> Any:
    """Return the Trainer's checkpoint connector, which loads and saves checkpoints."""
    return trainer._checkpoint_connector


def precision_flag(trainer: pl.Trainer) -> Any:
    """Return the precision that was passed to the Trainer."""
    return trainer._accelerator_connector._precision_flag


def register_signal(connector: Any, number: Any, handler: Any) -> None:
    """Register a signal handler, in the main thread."""
    connector._register_signal(number, handler)


def logged(trainer: pl.Trainer) -> _ResultCollection | None:
    """Return the values logged in the running loop."""
    return trainer._results


def logged_in_validation(trainer: pl.Trainer) -> set[str]:
    """Return the names, as monitors use them, of values logged in the validations of a fit."""
    metas = [metric.meta for metric in trainer.fit_loop.epoch_loop.val_loop._results.values()]
    suffixes = [
        ""
        if meta.dataloader_idx is None or not meta.add_dataloader_idx
        else _ResultCollection.DATALOADER_SUFFIX.format(meta.dataloader_idx)
        for meta in metas
    ]
    names = [(meta.name, meta.forked_name(on_step=False)) for meta in metas]
    return {name + suffix for both, suffix in zip(names, suffixes, strict=True) for name in both}


def saves_by_time(callback: pl.Callback) -> bool:
    """Return whether a callback saves checkpoints at time intervals."""
    return isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None


def wants_sync(should: bool, reduce: Callable[..., Any]) -> _Sync:
    """Return how a logged value is reduced.

    Args:
        should: Whether it is logged with ``sync_dist=True``.
        reduce: The strategy's reduction.
    """
    return _Sync(fn=reduce, _should=should)


# --- loops ----------------------------------------------------------------------------------------------------------


def active_loop(trainer: pl.Trainer) -> Any:
    """Return the running loop."""
    return trainer._active_loop


def combined_loader(loop: Any) -> Any:
    """Return the loop's combined loader, with the samplers that it put in; None before it is created."""
    return loop._combined_loader


def drop_loaders(fit_loop: Any) -> None:
    """Drop the loop's loaders, so that it requests them again."""
    if fit_loop._data_fetcher is not None:
        fit_loop._data_fetcher.teardown()
    fit_loop._data_fetcher = fit_loop._combined_loader = None


def load_loader_states(fit_loop: Any, states: Any) -> None:
    """Set the loaders' states, which are loaded when the loaders are created."""
    fit_loop._combined_loader_states_to_load = states


def loader_states(combined: Any) -> list[Any]:
    """Return the state dicts of the loaders that have their own."""
    states: list[Any] = combined._state_dicts()
    return states


def combine_mode(combined: Any) -> str:
    """Return ``"sequential"``, ``"min_size"``, ``"max_size"`` or ``"max_size_cycle"``."""
    mode: str = combined._mode
    return mode


def combine_spec(combined: Any) -> Any:
    """Return the pytree spec of the nested loaders."""
    return combined._spec


def request_dataloader(source: _DataLoaderSource) -> Any:
    """Return the loaders of a source, created so that the Trainer can recreate them with another sampler."""
    return _request_dataloader(source)


def data_fetcher(loop: Any) -> Any:
    """Return the loop's data fetcher; None before its loaders are set up."""
    return loop._data_fetcher


def set_data_fetcher(loop: Any, fetcher: Any) -> None:
    """Replace the data fetcher of a loop that is about to run."""
    loop._data_fetcher = fetcher


def data_source(loop: Any) -> _DataLoaderSource:
    """Return the source from which a loop requests its loaders."""
    source: _DataLoaderSource = loop._data_source
    return source


def is_sequential(loop: Any) -> bool:
    """Return whether an evaluation loop runs one loader after the other."""
    return bool(loop._is_sequential)


def was_restored(fit_loop: Any) -> bool:
    """Return whether the loop resumes from a checkpoint."""
    return bool(fit_loop._loaded_from_state_dict)


def set_restarting(fit_loop: Any, value: bool) -> None:
    """Set whether the loop starts within an epoch; the loop's own property infers it when counters are loaded."""
    _Loop.restarting.fset(fit_loop, value)  # type: ignore[attr-defined]


def restart_at_batch_end(epoch_loop: Any) -> None:
    """Mark the run as saved after a training batch and before the validation that is due there."""
    epoch_loop._restart_stage = RestartStage.RESTARTED_ON_TRAIN_BATCH_END


def count_stepped_batch(epoch_loop: Any) -> None:
    """Count the batch that has ended among those with an optimizer step, if it had one."""
    epoch_loop._batches_that_stepped += not epoch_loop._should_accumulate()


# --- modules and optimizers -----------------------------------------------------------------------------------------


def before_batch_transfer(module: pl.LightningModule, batch: Any, dataloader_idx: int) -> Any:
    """Run the module's hook before a batch is moved to the device, in its profiler's context."""
    return module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)


def batch_to_device(trainer: pl.Trainer, batch: Any, dataloader_idx: int) -> Any:
    """Move a batch to the strategy's device, with the module's hooks."""
    return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=dataloader_idx)


def tear_down(trainer: pl.Trainer) -> None:
    """End a run as the Trainer does after a failure, before it drops its references to what failed."""
    trainer._teardown()


def current_hook(module: pl.LightningModule) -> str | None:
    """Return the name of the hook from which ``self.log`` assumes to be called."""
    return module._current_fx_name


def set_current_hook(module: pl.LightningModule, name: str | None) -> None:
    """Set the name of the hook from which ``self.log`` assumes to be called."""
    module._current_fx_name = name


def run_references(module: pl.LightningModule) -> tuple[Any, ...]:
    """Return the objects of its run that a module refers to."""
    return module._trainer, module._device_mesh, module._fabric


def set_device_mesh(module: pl.LightningModule, mesh: Any) -> None:
    """Set ``self.device_mesh``, for ``configure_model``."""
    module._device_mesh = mesh


def is_compiled(module: pl.LightningModule) -> bool:
    """Return whether ``torch.compile`` was applied to the module as a whole."""
    return getattr(module, "_compiler_ctx", None) is not None


def set_strategy(optimizer: LightningOptimizer, strategy: Any) -> None:
    """Set the strategy that takes an optimizer's steps."""
    optimizer._strategy = strategy


def lightning_optimizers(strategy: pl.strategies.Strategy) -> list[LightningOptimizer]:
    """Return the optimizers that ``self.optimizers()`` returns."""
    return strategy._lightning_optimizers


def plain_optimizer(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    """Return the user's own optimizer."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def layer_sync(strategy: pl.strategies.ParallelStrategy) -> Any:
    """Return the layer synchronization of ``Trainer(sync_batchnorm=True)``; None without it."""
    return strategy._layer_sync
