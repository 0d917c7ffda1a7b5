"""Trainer runs on ranks that do not train: ``fit`` serves parameters, evaluations wait for the other ranks' results.

Such a rank builds module and optimizers as all others do, and runs the hooks around a run (``setup``,
``configure_model``, ``on_fit_start``, ``on_fit_end``, ``teardown``), but no hooks of a loop, since it has no batches.
Afterwards it holds the weights, progress counts, logged values and checkpoint paths of the ranks that train, so that
the script can continue in the same way on all ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_pardist.axes.base import RunContext
from lightning_pardist.compat.lightning_loops import logger_connector
from lightning_pardist.compat.process_groups import PrefixStore, Store
from lightning_pardist.engines.servers.plain_values import is_plain, pack_plain, unpack_plain
from lightning_pardist.runtime.process_group import job_store
from lightning_pardist.trainer.patch_stack import Patch, PatchStack

_POLL_S = 0.1


class IsolatedRanks:
    """Replaces the Trainer's loops on ranks that do not train, and passes results to them through the store.

    Args:
        trainer: Trainer of this rank.
        context: Context of its strategy; the process group exists.
    """

    def __init__(self, trainer: pl.Trainer, context: RunContext) -> None:
        self._trainer, self._context = trainer, context
        self._attached = PatchStack()
        self._saves = 0

    @property
    def _store(self) -> Store:
        return PrefixStore(f"pardist/apart/{self._context.distributed.run}", job_store())

    def attach(self) -> None:
        """Replace the loops on ranks that do not train; on others, publish evaluation results. Not collective."""
        trainer, is_isolated = self._trainer, self._context.distributed.is_isolated
        for loop in (trainer.validate_loop, trainer.test_loop):
            run = self._await_results if is_isolated else self._and_tell(loop.run)
            self._attached.attach(Patch(loop, "run", run))
        if is_isolated:
            self._attached.attach(Patch(trainer.fit_loop, "run", self._serve))
            self._attached.attach(Patch(trainer, "num_sanity_val_steps", 0))
            self._attached.attach(Patch(trainer.predict_loop, "run", lambda: None))

    def detach(self) -> None:
        """Restore the Trainer's loops. Not collective."""
        self._attached.detach()

    def wait_for_first_rank(self, what: str) -> None:
        """Wait until the first rank has reached the same point, on ranks that do not train and in other worlds.

        Args:
            what: Name of the point; each is passed once per run.

        Raises:
            RuntimeError: If the first rank has ended, or does not get there within the timeout. Ranks that do not train
                apply the timeout only after the run.
        """
        distributed = self._context.distributed
        if not (distributed.is_isolated or distributed.is_follower):
            if distributed.is_first:
                self._store.set(what, "")
            return
        store, began = self._store, time.monotonic()
        while not _is_there(store, what):
            # During a run, which may be long, the watchdog ends a serving rank if the ranks it waits for are lost.
            if (
                self._trainer.state.stopped or distributed.is_follower
            ) and time.monotonic() - began > distributed.timeout_s:
                raise RuntimeError(
                    f"Rank {distributed.global_rank} has waited {distributed.timeout_s:g} s for the first rank"
                    f" ({what}). All ranks have to make the same calls of the Trainer."
                )
            time.sleep(_POLL_S)

    def saved(self, finish: Callable[[], None]) -> None:
        """Make ranks that do not train wait, after a run, until a checkpoint of the other ranks is written.

        Args:
            finish: Waits for background writes.
        """
        if self._trainer.state.stopped:
            self._saves += 1
            finish()
            self.wait_for_first_rank(f"saved {self._saves}")

    def share_paths(self, *, well: bool) -> None:
        """After a fit, copy the first worker's checkpoint paths to workers in other worlds. Not collective.

        Args:
            well: Whether this rank's fit has ended well, so that it needs the paths.
        """
        distributed = self._context.distributed
        if distributed.worlds == 1:
            return
        if distributed.is_first:
            paths = pack_plain([_paths(callback) for callback in self._trainer.checkpoint_callbacks])
            self._store.set("paths", bytes(paths.numpy()).hex())
        elif well and distributed.is_follower:
            self.wait_for_first_rank("paths")
            packed = torch.frombuffer(bytearray.fromhex(self._store.get("paths").decode()), dtype=torch.uint8)
            _take_paths(self._trainer, unpack_plain(packed))

    def _serve(self) -> None:
        found = [axis.serve() for axis in self._context.axes if axis.num_isolated_ranks]
        for outcome in found:
            if outcome is not None:
                take_outcome(self._trainer, outcome)

    def _and_tell(self, run: Callable[[], Any]) -> Callable[[], Any]:
        def run_and_tell() -> Any:
            results = run()
            if self._context.distributed.is_first:
                self._store.set("results", json.dumps(results, default=float))
                self.wait_for_first_rank("evaluated")
                self._await_readers()
            return results

        return run_and_tell

    def _await_results(self) -> Any:
        self.wait_for_first_rank("evaluated")
        results = self._store.get("results")
        self._store.add("read", 1)
        return json.loads(results)

    def _await_readers(self) -> None:
        """Wait until the results are read, since the store lives in the first rank's process, which may end next."""
        distributed, began = self._context.distributed, time.monotonic()
        while self._store.add("read", 0) < distributed.num_isolated:
            if time.monotonic() - began > distributed.timeout_s:
                raise RuntimeError(
                    f"The first rank has waited {distributed.timeout_s:g} s for the serving ranks to read the results"
                    " of an evaluation. All ranks have to make the same calls of the Trainer."
                )
            time.sleep(_POLL_S)


def _is_there(store: Store, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError as error:
        raise RuntimeError(
            f"The ranks that train ended while a serving rank waited for them ({key}). All ranks have to make the same"
            " calls of the Trainer."
        ) from error


def outcome_of(trainer: pl.Trainer, stopping: int | None) -> dict[str, Any]:
    """Return the state that ranks that do not train need after a fit, as plain values. Not collective.

    Args:
        trainer: Trainer of a rank that has trained.
        stopping: Exit status of the job, if a signal has ended training.
    """
    module = trainer.lightning_module
    return {
        "stopping": stopping,
        "weights": {name: value.detach() for name, value in _tensors(module).items()},
        "metrics": {name: torch.as_tensor(value) for name, value in trainer.callback_metrics.items()},
        "progress": [progress.state_dict() for progress in _progress(trainer)],
        "checkpoints": [_paths(callback) for callback in trainer.checkpoint_callbacks],
    }


def take_outcome(trainer: pl.Trainer, outcome: dict[str, Any]) -> None:
    """Load the state of :func:`outcome_of` on a rank that does not train. Not collective.

    Raises:
        SIGTERMException: If a signal has ended training; it carries the exit status of all ranks.
    """
    if outcome["stopping"] is not None:
        raise SIGTERMException(outcome["stopping"])
    own = _tensors(trainer.lightning_module)
    with torch.no_grad():
        for name, value in outcome["weights"].items():
            if name in own and own[name].shape == value.shape:
                own[name].copy_(value)
    logger_connector(trainer).callback_metrics.update(outcome["metrics"])
    for progress, state in zip(_progress(trainer), outcome["progress"], strict=True):
        progress.load_state_dict(state)
    _take_paths(trainer, outcome["checkpoints"])


def _tensors(module: pl.LightningModule) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _progress(trainer: pl.Trainer) -> list[Any]:
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    return [
        fit.epoch_progress,
        epoch.batch_progress,
        epoch.automatic_optimization.optim_progress,
        epoch.manual_optimization.optim_step_progress,
    ]


def _take_paths(trainer: pl.Trainer, of_callbacks: Sequence[dict[str, Any]]) -> None:
    for callback, paths in zip(trainer.checkpoint_callbacks, of_callbacks, strict=False):
        callback.__dict__.update(paths)


def _paths(callback: Any) -> dict[str, Any]:
    """Return a callback's checkpoint paths, which ``ckpt_path="best"`` and ``"last"`` need."""
    names = (
        "best_model_path",
        "last_model_path",
        "best_model_score",
        "dirpath",
        "best_k_models",
        "kth_best_model_path",
    )
    found = {name: callback.__dict__[name] for name in names if name in callback.__dict__}
    return {name: value for name, value in found.items() if is_plain(value)}
