"""The Trainer's connectors and loops, of which Lightning has no public name, and methods that are replaced on them."""

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

#: Methods that are replaced for a run, by :func:`replace`.
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
    """Let ``trainer.predict`` return predictions also where Lightning sees that ranks are started by fork or spawn.

    Args:
        trainer: Of this rank; its loop keeps doing so.
        if_asked: Whether ``return_predictions=True`` is taken as well; Lightning refuses it.
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
    """A method by one of the names above."""
    found: Callable[..., Any] = getattr(of, name)
    return found


def replace(of: Any, name: str, value: Callable[..., Any]) -> None:
    """Let one object have another function for a method; its class stays as it is."""
    of.__dict__[name] = value


def restore(of: Any, *names: str) -> None:
    """Give an object the methods of its class back."""
    for name in names:
        of.__dict__.pop(name, None)


# --- the Trainer ----------------------------------------------------------------------------------------------------


def trainer_of(module: pl.LightningModule) -> pl.Trainer | None:
    """The module's Trainer, if it has one."""
    return module._trainer


def data_connector(trainer: pl.Trainer) -> Any:
    """What puts samplers into loaders."""
    return trainer._data_connector


def logger_connector(trainer: pl.Trainer) -> Any:
    """What collects logged values."""
    return trainer._logger_connector


def train_fetcher(trainer: pl.Trainer) -> Any:
    """What takes batches out of the training loaders, once they are made."""
    return trainer.fit_loop._data_fetcher


def set_train_fetcher(trainer: pl.Trainer, fetcher: _DataFetcher) -> None:
    """Let another one do that."""
    trainer.fit_loop._data_fetcher = fetcher


def signal_connector(trainer: pl.Trainer) -> Any:
    """What handles signals."""
    return trainer._signal_connector


def checkpoint_connector(trainer: pl.Trainer) -> Any:
    """What loads and saves checkpoints."""
    return trainer._checkpoint_connector


def precision_flag(trainer: pl.Trainer) -> Any:
    """What the Trainer was given as its precision."""
    return trainer._accelerator_connector._precision_flag


def register_signal(connector: Any, number: Any, handler: Any) -> None:
    """Handle a signal, in the main thread."""
    connector._register_signal(number, handler)


def logged(trainer: pl.Trainer) -> _ResultCollection | None:
    """What was logged in the loop that runs."""
    return trainer._results


def logged_in_validation(trainer: pl.Trainer) -> set[str]:
    """Names, as monitors use them, of what was logged in the validations of a fit."""
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
    """Whether a callback saves a checkpoint whenever so much time has passed."""
    return isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None


def wants_sync(should: bool, reduce: Callable[..., Any]) -> _Sync:
    """How a logged value is reduced.

    Args:
        should: Whether with ``sync_dist=True``.
        reduce: The strategy's.
    """
    return _Sync(fn=reduce, _should=should)


# --- loops ----------------------------------------------------------------------------------------------------------


def active_loop(trainer: pl.Trainer) -> Any:
    """The loop that runs."""
    return trainer._active_loop


def combined_loader(loop: Any) -> Any:
    """The loop's loaders in one, with the samplers that it put in; None before it made them."""
    return loop._combined_loader


def drop_loaders(fit_loop: Any) -> None:
    """Let the loop ask for its loaders anew."""
    if fit_loop._data_fetcher is not None:
        fit_loop._data_fetcher.teardown()
    fit_loop._data_fetcher = fit_loop._combined_loader = None


def load_loader_states(fit_loop: Any, states: Any) -> None:
    """Give the loaders, when they are made, states of their own."""
    fit_loop._combined_loader_states_to_load = states


def loader_states(combined: Any) -> list[Any]:
    """States that loaders keep of their own."""
    states: list[Any] = combined._state_dicts()
    return states


def combine_mode(combined: Any) -> str:
    """``"sequential"``, ``"min_size"``, ``"max_size"`` or ``"max_size_cycle"``."""
    mode: str = combined._mode
    return mode


def combine_spec(combined: Any) -> Any:
    """How the loaders are nested."""
    return combined._spec


def request_dataloader(source: _DataLoaderSource) -> Any:
    """The loaders of a source, made so that the Trainer can make them again with another sampler."""
    return _request_dataloader(source)


def data_fetcher(loop: Any) -> Any:
    """What gives a loop its batches; None before its loaders are set up."""
    return loop._data_fetcher


def set_data_fetcher(loop: Any, fetcher: Any) -> None:
    """Let a loop that is about to run take its batches from another object."""
    loop._data_fetcher = fetcher


def data_source(loop: Any) -> _DataLoaderSource:
    """Where a loop asks for its loaders."""
    source: _DataLoaderSource = loop._data_source
    return source


def is_sequential(loop: Any) -> bool:
    """Whether an evaluation loop runs one loader after the other."""
    return bool(loop._is_sequential)


def was_restored(fit_loop: Any) -> bool:
    """Whether the loop goes on from a checkpoint."""
    return bool(fit_loop._loaded_from_state_dict)


def set_restarting(fit_loop: Any, value: bool) -> None:
    """Whether the loop begins within an epoch; the loop's own property decides it when counters are loaded."""
    _Loop.restarting.fset(fit_loop, value)  # type: ignore[attr-defined]


def restart_at_batch_end(epoch_loop: Any) -> None:
    """Let the loop know that its run was saved behind a batch and before the validation that is due there."""
    epoch_loop._restart_stage = RestartStage.RESTARTED_ON_TRAIN_BATCH_END


def count_stepped_batch(epoch_loop: Any) -> None:
    """Count the batch that has ended among those that stepped, if it did."""
    epoch_loop._batches_that_stepped += not epoch_loop._should_accumulate()


# --- modules and optimizers -----------------------------------------------------------------------------------------


def before_batch_transfer(module: pl.LightningModule, batch: Any, dataloader_idx: int) -> Any:
    """The module's hook before a batch goes to the device, in its profiler's context."""
    return module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)


def batch_to_device(trainer: pl.Trainer, batch: Any, dataloader_idx: int) -> Any:
    """A batch on the strategy's device, with the module's hooks."""
    return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=dataloader_idx)


def tear_down(trainer: pl.Trainer) -> None:
    """End a run as the Trainer does after a failure, before it lets go of what failed."""
    trainer._teardown()


def current_hook(module: pl.LightningModule) -> str | None:
    """Which hook ``self.log`` takes itself to be called from."""
    return module._current_fx_name


def set_current_hook(module: pl.LightningModule, name: str | None) -> None:
    """Let ``self.log`` take itself to be called from this hook."""
    module._current_fx_name = name


def belongings(module: pl.LightningModule) -> tuple[Any, ...]:
    """What a module refers to that is its run's and not its own."""
    return module._trainer, module._device_mesh, module._fabric


def set_device_mesh(module: pl.LightningModule, mesh: Any) -> None:
    """What ``self.device_mesh`` is in ``configure_model``."""
    module._device_mesh = mesh


def is_compiled(module: pl.LightningModule) -> bool:
    """Whether ``torch.compile`` was applied to the module as a whole."""
    return getattr(module, "_compiler_ctx", None) is not None


def set_strategy(optimizer: LightningOptimizer, strategy: Any) -> None:
    """Who takes an optimizer's steps."""
    optimizer._strategy = strategy


def lightning_optimizers(strategy: pl.strategies.Strategy) -> list[LightningOptimizer]:
    """What modules get from ``self.optimizers()``."""
    return strategy._lightning_optimizers


def plain_optimizer(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    """The user's own optimizer."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def layer_sync(strategy: pl.strategies.ParallelStrategy) -> Any:
    """What ``Trainer(sync_batchnorm=True)`` asks for; None without."""
    return strategy._layer_sync
