"""Saves and loads a strategy's checkpoints, full or sharded, blocking or in the background."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

import lightning
import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from lightning_pardist._version import __version__
from lightning_pardist.axes.base import RunContext
from lightning_pardist.checkpoint.atomic import local_path, recover
from lightning_pardist.checkpoint.chunks import Shards
from lightning_pardist.checkpoint.coordination import (
    Coordinator,
    SingleCoordinator,
    StoreCoordinator,
    together,
    world_coordinator,
)
from lightning_pardist.checkpoint.folder import FolderReader, FolderSave
from lightning_pardist.checkpoint.gather import assemble, merged_small
from lightning_pardist.checkpoint.manifest import is_folder, verify_files
from lightning_pardist.checkpoint.nested import map_tensors
from lightning_pardist.checkpoint.tensors import (
    ABOUT,
    DIVERGED,
    FolderState,
    StoredTensors,
    module_shards,
)
from lightning_pardist.compat.lightning_functions import PATH, WrappingCheckpointIO
from lightning_pardist.compat.lightning_loops import tear_down, trainer_of
from lightning_pardist.local_tensors import is_dense
from lightning_pardist.runtime.failed_runs import SaveRefusal
from lightning_pardist.runtime.process_group import job_store
from lightning_pardist.settings import one_of
from lightning_pardist.trainer.checkpoint_io import PardistCheckpointIO
from lightning_pardist.trainer.loader_state import LoaderState
from lightning_pardist.trainer.state_dicts import ShardedOptimizerState, StateDicts

Form = Literal["full", "sharded"]


@dataclass(frozen=True)
class SaveReport:
    """Cost of one save.

    Attributes:
        path: Path of the checkpoint.
        stall_s: Seconds for which training was blocked.
        write_s: Seconds from the start of the save until the checkpoint was complete.
    """

    path: str
    stall_s: float
    write_s: float


class Checkpoints:
    """Saves, loads and removes a strategy's checkpoints.

    Args:
        context: Context of the strategy.
        states: Creates and loads the module's and the optimizers' state dicts.
        loader_state: Creates the state of data loaders and random numbers.
        io: Plugin that writes and reads single files; the strategies' default if None.
        form: ``"full"`` for Lightning's single file, written by the first rank; ``"sharded"`` for a folder that all
            ranks write in parallel.
        async_save: Whether training continues while a checkpoint is written.

    Attributes:
        reports: Costs of the run's saves.

    Raises:
        ValueError: If ``form`` is unknown.
    """

    def __init__(
        self,
        context: RunContext,
        states: StateDicts,
        loader_state: LoaderState,
        *,
        io: CheckpointIO | None,
        form: Form,
        async_save: bool,
    ) -> None:
        one_of("checkpoint", form, get_args(Form))
        self.context = context
        self.states = states
        self.loader_state = loader_state
        self._io = io
        self.form = form
        self.async_save = async_save
        self.reports: list[SaveReport] = []
        self._began: float | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self._number = 0
        self._closed = True

    @property
    def io(self) -> CheckpointIO:
        """Plugin that writes and reads single files."""
        self._io = _with_default(self._io)
        return self._io

    @io.setter
    def io(self, io: CheckpointIO | None) -> None:
        self._io = io

    @property
    def form(self) -> Form:
        """Form of the checkpoints, ``"full"`` or ``"sharded"``."""
        return "sharded" if self.context.sharded_checkpoints else "full"

    @form.setter
    def form(self, form: Form) -> None:
        self.context.sharded_checkpoints = form == "sharded"

    @property
    def _in_background(self) -> bool:
        """Whether saves run in the background: not after the run, when nothing would wait for them."""
        return self.async_save and not self._closed

    def check(self, trainer: pl.Trainer) -> None:
        """Check the checkpoint settings against the Trainer's plugins and callbacks. Not collective.

        Raises:
            ValueError: If they conflict; the message gives the setting, the conflict and the fix.
        """
        self._closed, self.reports = False, []
        io = self.io
        if self.context.sharded_checkpoints and not isinstance(io, PardistCheckpointIO):
            raise ValueError(
                f'checkpoint="sharded" writes its own folder, but the Trainer was given a {type(io).__name__}. Remove'
                ' the plugin (async_save=True takes the place of AsyncCheckpointIO), or set checkpoint="full".'
            )
        if self.async_save and isinstance(io, WrappingCheckpointIO):
            raise ValueError(
                f"async_save=True and {type(io).__name__} would both save in the background. Remove one of them."
            )
        for callback in trainer.checkpoint_callbacks:
            if self.async_save and isinstance(callback, ModelCheckpoint) and callback.save_last == "link":
                raise ValueError(
                    'ModelCheckpoint(save_last="link") would link to a checkpoint that async_save=True has not'
                    " written yet. Set save_last=True."
                )

    # --- saving -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start timing a checkpoint before it is assembled, and wait for earlier saves.

        After a failure that is not the same on all ranks, the failure is raised again instead of saving.

        Raises:
            RuntimeError: If a run has failed before, so that nothing can be saved any more.
        """
        trainer = None if self.context.module is None else trainer_of(self.context.module)
        refusal = self.context.distributed.save_refusal("" if trainer is None else _progress(trainer))
        if refusal is not None:
            _refuse_to_save(trainer, refusal)
        self._began = time.perf_counter()
        self.finish()

    def save(self, checkpoint: dict[str, Any], path: PATH, storage_options: Any | None) -> None:
        """Write a checkpoint, or start writing it in the background. Collective over the world.

        Raises:
            OSError: On the rank whose filesystem failed; a previous checkpoint is left intact.
            RuntimeError: On the other ranks, with its rank and reason. Failures of an earlier background save are
                raised as well.
        """
        began = time.perf_counter() if self._began is None else self._began
        self._began = None
        self.finish()
        self.context.before_collective()
        whole = self.states.pop_full_module_state()
        done = ("optimizer_states", "state_dict") if self.context.sharded_checkpoints else ("optimizer_states",)
        # Callbacks add values derived from the module, such as averaged weights, or replace its state dict by them.
        # Ranks may add different values.
        added = {key: value for key, value in checkpoint.items() if key not in done and value is not whole}
        for axis in (self.context.data_axis, *self.context.model_axes):
            added = axis.whole_values(added)
        # A new dict, since hooks may have kept a reference to the Trainer's.
        checkpoint = {**checkpoint, **added}
        for axis in self.context.axes:
            axis.adjust_saved_loops(checkpoint.get("loops", {}))
        if state := self.loader_state.state(world_coordinator()):
            checkpoint[ABOUT] = {**state, "about": self._about(checkpoint)}
        diverged: dict[str, Shards] = {}
        if "optimizer_states" in checkpoint and (parts := self.states.diverged()) is not None:
            diverged, rests = parts
            islands = _merged_islands(world_coordinator().gather((self.context.island, rests)))
            if ABOUT in checkpoint:
                checkpoint[ABOUT]["islands"] = islands
            if not self.context.sharded_checkpoints:
                whole_tensors = assemble(diverged, world_coordinator())
                if ABOUT in checkpoint:
                    checkpoint[ABOUT]["tensors"] = whole_tensors
        if self.context.sharded_checkpoints:
            run = self._sharded_job(checkpoint, path, storage_options, diverged)
        else:
            run = self._full_job(checkpoint, path, storage_options)
        if not self._in_background:
            run(world_coordinator())
            now = time.perf_counter() - began
            self.reports.append(SaveReport(os.fspath(path), now, now))
            return
        exchange = self._background_exchange()

        def in_background() -> None:
            run(exchange)
            self.reports.append(SaveReport(os.fspath(path), stall, time.perf_counter() - began))

        stall = time.perf_counter() - began
        self._submit(in_background)

    def remove(self, path: PATH) -> None:
        """Remove a checkpoint on the first rank, in the background after pending saves if there are any."""
        if not self.context.distributed.is_first:
            return
        if not self._pending:
            self.io.remove_checkpoint(path)
            return
        earlier = list(self._pending)

        def in_background() -> None:
            # Keep a checkpoint whose successor could not be written.
            if all(future.exception() is None for future in earlier):
                self.io.remove_checkpoint(path)

        self._submit(in_background)

    def finish(self) -> None:
        """Wait until all background operations are complete. Not collective.

        Raises:
            BaseException: The failure of a background operation.
        """
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def close(self, *, well: bool) -> None:
        """Complete pending saves at the end of the run, and log their cost. Not collective.

        Args:
            well: Whether the run ended well, so that a failed save is raised; otherwise it is only warned about.
        """
        try:
            self.finish()
        except Exception as error:
            if well:
                raise
            rank_zero_warn(f"The last checkpoint was not written: {error}")
        finally:
            self._closed = True
            if self._executor is not None:
                self._executor.shutdown(wait=True)
                self._executor = None
        if self.async_save and self.reports:
            rank_zero_info(self.describe())

    def describe(self) -> str:
        """Return the cost of the saves so far, in one line."""
        stall = statistics.median(report.stall_s for report in self.reports)
        write = statistics.median(report.write_s for report in self.reports)
        return (
            f"{len(self.reports)} checkpoint(s) written in the background: training waited {stall:.3f} s for each"
            f" (median), writing took {write:.3f} s."
        )

    def _submit(self, job: Callable[[], None]) -> None:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pardist-checkpoint")
        self._pending.append(self._executor.submit(job))

    def _full_job(self, checkpoint: dict[str, Any], path: PATH, storage_options: Any) -> Callable[[Coordinator], None]:
        io = self.io
        if self._in_background and self.context.distributed.is_first:
            checkpoint = map_tensors(_Staging(), checkpoint)

        def run(exchange: Coordinator) -> None:
            def write() -> None:
                if exchange.rank == 0:
                    with nullcontext() if self._in_background else _metrics_of_one_process(self.context.module):
                        io.save_checkpoint(checkpoint, path, storage_options=storage_options)

            together(exchange, f"Saving {path}", write)

        return run

    def _sharded_job(
        self, checkpoint: dict[str, Any], path: PATH, storage_options: Any, further: Mapping[str, Shards]
    ) -> Callable[[Coordinator], None]:
        if storage_options is not None:
            raise TypeError(f'storage_options={storage_options!r} is not supported by checkpoint="sharded".')
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        tensors, aliases, extra = module_shards(checkpoint["state_dict"])
        for state in checkpoint.get("optimizer_states", ()):
            tensors.update(state.tensors)
        tensors.update(further)
        save = FolderSave(tensors, os.fspath(path), aliases=aliases, about=self._about(checkpoint))
        exchange = world_coordinator()
        if "optimizer_states" in checkpoint:
            small = exchange.gather([state["small"] for state in checkpoint["optimizer_states"]])
            rest["optimizer_states"] = [
                {**state, "small": merged_small([of_rank[index] for of_rank in small])}
                for index, state in enumerate(checkpoint["optimizer_states"])
            ]
        rest["state_dict"] = {}
        if exchange.rank:
            # Sparse buffers are equal on all ranks, and may be large.
            extra = {name: value for name, value in extra.items() if not isinstance(value, Tensor)}
        for of_rank in reversed(exchange.gather(extra)):
            rest["state_dict"].update(of_rank)
        save.plan(exchange)
        if self._in_background:
            save.stage()
            rest = map_tensors(_Staging(), rest)
        return lambda exchange: save.write(exchange, rest)

    def _about(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        context = self.context
        return {
            "strategy": context.name,
            "axes": [axis.name for axis in context.axes],
            "degrees": context.dims.describe(),
            "world_size": context.dims.world_size,
            "global_step": checkpoint.get("global_step"),
            "epoch": checkpoint.get("epoch"),
            "saved": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "versions": {
                "lightning_pardist": __version__,
                "lightning": lightning.__version__,
                # A plain string: weights_only loading rejects torch's version class.
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
        }

    def _background_exchange(self) -> Coordinator:
        self._number += 1
        ranks = self.context.distributed
        if ranks.world_size == 1:
            return SingleCoordinator()
        return StoreCoordinator(
            job_store(),
            name=f"{ranks.run}/{self._number}",
            rank=ranks.global_rank,
            world_size=ranks.world_size,
            timeout_s=ranks.timeout_s,
        )

    # --- loading ------------------------------------------------------------------------------------------------

    def load(self, path: PATH, weights_only: bool | None) -> dict[str, Any]:
        """Verify and read a checkpoint of either form, with tensors loaded on demand. Collective over the world.

        Raises:
            FileNotFoundError: If there is no checkpoint.
            DamagedCheckpointError: If a part of it is missing, truncated or altered; nothing has been loaded then.
            pickle.UnpicklingError: If it holds objects that need code to be built; the message names the classes and
                two ways out.
        """
        self.finish()
        exchange = world_coordinator()
        self.context.before_collective()
        what = f"Loading {os.fspath(path)}"

        def find() -> bool:
            if exchange.rank:
                return False
            if (plain := local_path(path)) is not None:
                recover(plain)
            return is_folder(path)

        as_folder = exchange.broadcast(together(exchange, what, find))
        if not as_folder:
            return self._load_file(path, weights_only, exchange)
        reader: FolderReader = together(exchange, what, lambda: FolderReader(path))
        shares = {"share": exchange.rank, "shares": exchange.world_size}
        together(exchange, what, lambda: verify_files(path, reader.manifest, **shares))
        checkpoint: dict[str, Any] = together(exchange, what, lambda: reader.trainer_state(weights_only=weights_only))
        checkpoint["state_dict"] = FolderState(reader, checkpoint["state_dict"])
        if "optimizer_states" in checkpoint:
            checkpoint["optimizer_states"] = [
                ShardedOptimizerState(state, reader=reader) for state in checkpoint["optimizer_states"]
            ]
        if ABOUT in checkpoint:
            checkpoint[ABOUT]["tensors"] = StoredTensors(reader, DIVERGED)
        return checkpoint

    def _load_file(self, path: PATH, weights_only: bool | None, exchange: Coordinator) -> dict[str, Any]:
        io = self.io
        inner = io.checkpoint_io if isinstance(io, WrappingCheckpointIO) else io
        what = f"Loading {os.fspath(path)}"
        checkpoint: dict[str, Any]
        if not isinstance(inner, PardistCheckpointIO):
            checkpoint = together(exchange, what, lambda: io.load_checkpoint(path, weights_only=weights_only))
            return checkpoint
        # Every byte is read once per node, which also brings the file into the node's page cache for all its ranks.
        together(exchange, what, lambda: inner.verify(path) if self.context.distributed.local_rank == 0 else None)
        checkpoint = together(exchange, what, lambda: inner.read(path, weights_only=weights_only))
        large = ("state_dict", "optimizer_states")
        about = dict(checkpoint.get(ABOUT, {}))
        tensors = about.pop("tensors", {})
        # The rest may live as long as the run, and must not keep the file mapped.
        rest = {key: value for key, value in checkpoint.items() if key not in large} | ({ABOUT: about} if about else {})
        rest = map_tensors(torch.clone, rest)
        if about:
            rest[ABOUT]["tensors"] = tensors
        return {key: rest.get(key, value) for key, value in checkpoint.items()}


def _progress(trainer: pl.Trainer) -> str:
    """Return the progress of a run, in numbers that are equal on all ranks."""
    loop = trainer.fit_loop.epoch_loop
    batches, validation = loop.batch_progress.current.ready, loop.val_loop.batch_progress.current.ready
    return f"epoch {trainer.current_epoch}, batch {batches}, step {trainer.global_step}, validation batch {validation}"


def _refuse_to_save(trainer: pl.Trainer | None, refusal: SaveRefusal) -> NoReturn:
    sentence = (
        f"No checkpoint is saved after the failure of the run: {refusal.why}. Save while training"
        " (ModelCheckpoint(every_n_train_steps=...)), or stop jobs by SIGTERM, which saves."
    )
    failure = sys.exc_info()[1]
    if failure is None:
        raise RuntimeError(sentence)
    if refusal.is_first:
        warnings.warn(sentence, stacklevel=2)
    if trainer is not None:
        tear_down(trainer)
    if isinstance(failure, KeyboardInterrupt):
        # Lightning exits with this status as well.
        raise SystemExit(1)
    raise failure


def _with_default(io: CheckpointIO | None) -> CheckpointIO:
    """Return the checkpoint plugin; the strategies' default replaces None, and None or Lightning's in a wrapper."""
    if io is None:
        return PardistCheckpointIO()
    if isinstance(io, WrappingCheckpointIO) and type(io.checkpoint_io) in (type(None), TorchCheckpointIO):
        io.checkpoint_io = PardistCheckpointIO()
    return io


def _merged_islands(of_ranks: Sequence[tuple[int, list[dict[str, Any]]]]) -> dict[int, list[dict[str, Any]]]:
    """Merge, for every model but the first, the non-tensor optimizer states of its ranks."""
    by_island: dict[int, list[list[dict[str, Any]]]] = {}
    for island, rests in of_ranks:
        if island:
            by_island.setdefault(island, []).append(rests)
    return {
        island: [
            {**known[0], "small": merged_small(one["small"] for one in known)} for known in zip(*ranks, strict=True)
        ]
        for island, ranks in by_island.items()
    }


class _Staging:
    """Copies tensors to host memory, with one copy for tensors that are the same view of a storage."""

    def __init__(self) -> None:
        self._copies: dict[Any, Tensor] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        stored = tensor.numel() and is_dense(tensor)
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if stored else id(tensor)
        if key not in self._copies:
            self._copies[key] = tensor.detach().to("cpu", copy=True)
        return self._copies[key]


@contextmanager
def _metrics_of_one_process(module: pl.LightningModule | None) -> Iterator[None]:
    """Detach metrics from the ranks of the run, which a user's ``CheckpointIO`` cannot pickle with them."""
    metrics = [] if module is None else [each for each in module.modules() if isinstance(each, Metric)]
    before = [(each, each.process_group, each.dist_sync_fn) for each in metrics]
    for each in metrics:
        each.process_group = each.dist_sync_fn = None
    try:
        yield
    finally:
        for each, group, sync in before:
            each.process_group, each.dist_sync_fn = group, sync
