"""Parameter-server axis: asynchronous or synchronous workers, and optional dedicated server ranks."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, Timer, WeightAveraging
from lightning.pytorch.trainer.states import RunningStage
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pardist.axes.base import ParallelAxis
from lightning_pardist.axes.refusals import refuse_callbacks, refuse_renormalized
from lightning_pardist.compat.lightning_loops import layer_sync, logged_in_validation, saves_by_time
from lightning_pardist.engines.ddp.buffers import average_tensors, tensors_without_optimizer
from lightning_pardist.engines.servers import Roles, ServedUpdates, Worker, serve
from lightning_pardist.engines.servers.server import ANY_MEETING, MeetingKey, Purpose
from lightning_pardist.engines.servers.update_log import next_run
from lightning_pardist.mesh import Degree, ParallelDims
from lightning_pardist.settings import positive
from lightning_pardist.trainer.isolated_ranks import outcome_of
from lightning_pardist.trainer.layer_sync import converts
from lightning_pardist.trainer.shared_epochs import SharedEpochs
from lightning_pardist.trainer.uneven_inputs import discarding_side_effects

#: Effect of the loss of a worker: end the job, report it, or share its batches among the other workers.
LostWorkers = Literal["end", "report", "share"]
#: Timeout of the message group: servers wait for requests while workers live; workers' waits use ``timeout_s``.
_WHILE_THEY_LIVE = timedelta(days=30)
#: Time limit in seconds for a failed worker to report its failure to the servers.
_LAST_WORDS_S = 1.0


class ParameterServerAxis(ParallelAxis):
    """Workers train on different samples; servers, which may be the same ranks, update shards of the parameters.

    With ``dedicated_servers`` the last ranks of the job are servers only and not part of the device mesh.

    Asynchronous: each worker's gradients are a separate update. The worker sends them to the servers, which step their
    optimizers and send back new parameter values (Li et al., OSDI 2014). A worker waits for others only if it would
    get more than ``max_staleness`` updates ahead of the slowest (stale synchronous parallel, Ho et al., NIPS 2013).

    Workers synchronize before validation and checkpoints and at the end of training: all updates are applied, all ranks
    receive the servers' parameters, and floating-point buffers and parameters without optimizer are averaged.

    Synchronous, with dedicated servers: the data axis averages gradients over workers. One worker per shard sends the
    averages to the server, and all workers receive the new values.

    The arguments are those of :class:`~lightning_pardist.ParameterServerStrategy`.

    Raises:
        ValueError: If a setting is out of range; during a run, if a feature needs all workers in every step, or writes
            to parameters without updating the servers.
    """

    name = "parameter_server"
    mesh_axes = ("outer_parallel",)
    order = 60

    def __init__(
        self,
        *,
        max_staleness: int | None,
        num_servers: int | None = None,
        dedicated_servers: int = 0,
        update_log: str | os.PathLike[str] | None = None,
        lost_workers: LostWorkers = "end",
    ) -> None:
        if max_staleness:
            max_staleness = int(positive("max_staleness", max_staleness, "Use 0 (synchronous) or a number of updates."))
        if num_servers is not None:
            num_servers = int(positive("num_servers", num_servers, "Set how many ranks serve, or None for all."))
        self.max_staleness, self.num_servers = max_staleness, num_servers
        self.num_isolated_ranks = self.dedicated_servers = dedicated_servers
        self.in_lockstep = max_staleness == 0
        self.isolated_workers, self._shares = lost_workers != "end", lost_workers == "share"
        self.update_log = update_log
        self._log_to: Path | None = None
        self._worker: Worker | None = None
        self._updates: list[ServedUpdates] = []
        #: Whether dedicated servers wait for this worker to train or to report its end.
        self._is_awaited = False
        #: Whether a batch has counted since the last optimizer step; whether an optimizer has stepped since the last
        #: batch began.
        self._has_gradients, self._has_stepped = True, True
        #: Number of this worker's synchronizations by purpose and epoch, if workers are separate worlds; whether
        #: training has ended.
        self._met: Counter[tuple[Purpose, int]] = Counter()
        self._is_ending = False
        #: Workers that were lost by the latest synchronization, with the epoch and batch that each had reached.
        self._gone: Mapping[int, tuple[int, int]] = {}
        #: With ``lost_workers="share"``, assigns the batches of lost workers to the remaining ones.
        self._shared: SharedEpochs | None = None

    @override
    def degrees(self, num_nodes: int, ranks_per_node: int) -> dict[str, Degree]:
        ranks = num_nodes * ranks_per_node
        if self.dedicated_servers >= ranks:
            raise ValueError(
                f"dedicated_servers={self.dedicated_servers} leaves no worker among {ranks} ranks. Use fewer, or start"
                f" {self.dedicated_servers + 1} ranks or more (devices x num_nodes)."
            )
        return {} if self.in_lockstep else {"outer_parallel": "auto"}

    @property
    @override
    def data_share(self) -> tuple[int, int]:
        distributed = self.context.distributed
        return (0, 1) if distributed.worlds == 1 else (distributed.global_rank % distributed.worlds, distributed.worlds)

    @override
    def is_used(self, dims: ParallelDims) -> bool:
        return self.dedicated_servers > 0 or super().is_used(dims)

    @property
    def _roles(self) -> Roles:
        """Worker and server ranks. Collective over the job, the first time."""
        distributed, ranks = self.context.distributed, self.context.dims.world_size
        if not self.dedicated_servers:
            return Roles.colocated(ranks, self.num_servers or ranks)
        workers = distributed.messages(_WHILE_THEY_LIVE).size() - self.dedicated_servers
        return Roles.dedicated(workers, self.dedicated_servers, may_be_lost=self.isolated_workers)

    @override
    def check(self, trainer: pl.Trainer) -> None:
        name, ranks = self.context.name, self.context.dims.world_size
        if self.num_servers is not None and self.num_servers > ranks:
            raise ValueError(
                f"num_servers={self.num_servers} is more than there are ranks ({ranks}). Use at most as many."
            )
        refuse_callbacks(
            trainer,
            (StochasticWeightAveraging, WeightAveraging),
            f"either writes averages into the parameters without the servers of {name}, or averages values that"
            " differ between workers. Remove the callback, or use pardist_ps without dedicated_servers.",
        )
        refuse_renormalized(
            trainer.lightning_module, name, fix="leave the rows unscaled, or use pardist_ps without dedicated_servers"
        )
        if self.isolated_workers:
            _refuse_times(trainer, name)
        if self.in_lockstep:
            return
        if converts(layer_sync(trainer.strategy), trainer.lightning_module):  # type: ignore[arg-type]
            raise ValueError(
                f"sync_batchnorm=True needs all workers in each forward, and workers of {name} do not wait for each"
                " other. Leave it out, or use pardist_ps."
            )
        if getattr(self.context.precision, "scaler", None) is not None:
            raise ValueError(
                f"precision='16-mixed' decides over all ranks in each step whether gradients overflowed, and workers of"
                f" {name} do not wait for each other. Use 'bf16-mixed', or pardist_ps."
            )

    @override
    def after_optimizers(self, trainer: pl.Trainer, optimizers: Sequence[Optimizer]) -> None:
        _refuse_shared(optimizers, self.context.name)
        rank, roles = self.context.distributed.global_rank, self._roles
        self._is_awaited = self.dedicated_servers > 0 and not self.context.distributed.is_isolated
        ways: dict[str, Any] = {"group": self.context.batch_group, "setting": self.context.update_scope}
        self._updates = [ServedUpdates(optimizer, roles=roles, rank=rank, **ways) for optimizer in optimizers]
        if self.update_log is not None and not self.context.distributed.is_isolated:
            self._log_to = self.context.broadcast(next_run(self.update_log))
        if self._shares and not self.context.distributed.is_isolated:
            self._share_epochs(trainer)

    def _share_epochs(self, trainer: pl.Trainer) -> None:
        distributed = self.context.distributed
        self._shared = SharedEpochs(
            trainer,
            self.context.name,
            workers=range(distributed.worlds),
            rank=distributed.global_rank,
            meet=self._sync_epoch_shares,
        )
        self._shared.attach()
        self.context.batch_counts = partial(getattr, self._shared, "counts", None)

    # --- steps --------------------------------------------------------------------------------------------------

    @override
    def start_training(self) -> None:
        if self._worker is not None:
            raise RuntimeError(
                "Training started a second time in one fit, as with LearningRateFinder or BatchSizeFinder, but the"
                f" servers of {self.context.name} continue from the first. Run the search under pardist_ddp, and set"
                " the value that it found."
            )
        self._worker = Worker(
            self._updates,
            **self._server_arguments(),
            log_to=self._log_to,
            has_gradients=lambda: self._has_gradients,
            position=self._position,
            rest=self._rest if self.isolated_workers else tuple,
        )
        self._met.clear()
        self._is_ending, self._gone = False, {}
        self._worker.start()

    @override
    def end_training(self) -> None:
        self._is_ending = True

    def _position(self) -> tuple[int, int, int]:
        """Return the epoch, this worker's batches done after the current one, and their total (0 if unbounded)."""
        if self.context.module is None:
            return 0, 0, 0
        trainer = self.context.module.trainer
        batches = trainer.num_training_batches
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return trainer.current_epoch, done, int(batches) if math.isfinite(batches) else 0

    def _rest(self) -> list[Tensor]:
        """Return buffers and parameters that no optimizer updates."""
        module = self.context.module
        return [] if module is None else tensors_without_optimizer(module, self.context.optimizers)

    def _server_arguments(self) -> dict[str, Any]:
        distributed = self.context.distributed
        first = 2 * distributed.run
        return {
            "group": distributed.messages(_WHILE_THEY_LIVE),
            "roles": self._roles,
            "tags": (first, first + 1),
            "max_staleness": self.max_staleness,
            "timeout_s": distributed.timeout_s,
        }

    @override
    def serve(self) -> dict[str, Any] | None:
        updates, self._updates = self._updates, []
        watchdog = self.context.distributed.watchdog
        heard: dict[str, Any] = {}
        if watchdog is not None:
            heard = {"gone": lambda: dict(watchdog.lost), "mark_lost": watchdog.mark_lost}
        outcome: dict[str, Any] | None = serve(updates, **self._server_arguments(), **heard, is_shared=self._shares)
        if self.isolated_workers:
            self.context.distributed.publish_served()
        return outcome

    @override
    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        worker, module = self._worker, self.context.module
        if worker is None or module is None or module.trainer.state.stage != RunningStage.TRAINING:
            return step(*args, **kwargs)
        worker.resume_updates()
        if self.in_lockstep:
            return step(*args, **kwargs)
        counts = self.context.batch_counts
        is_here = counts is None or counts() is not False
        self._has_gradients = is_here or (self._has_gradients and not self._has_stepped)
        self._has_stepped = False
        with nullcontext() if self._shared is None or self._shared.counts else discarding_side_effects(module):
            output = step(*args, **kwargs)
        if worker.staleness is not None:
            module.log("staleness", float(worker.staleness), prog_bar=True, on_step=True, on_epoch=False, batch_size=1)
        return output

    @override
    def backward(self, run: Callable[[], None]) -> None:
        """Run backward, unless the batch is a filler that does not count because this worker has no batches left."""
        counts = self.context.batch_counts
        if self.in_lockstep or counts is None or counts() is not False:
            run()

    @override
    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        if self._worker is not None:
            self._has_stepped = True
            self._worker.complete(self.context.optimizers.index(optimizer))

    @override
    def synchronize(self, *, evaluation: bool = False) -> None:
        self._meet(Purpose.EVALUATION if evaluation else Purpose.CHECKPOINT)

    def _sync_epoch_shares(self) -> Mapping[int, tuple[int, int]]:
        """Synchronize the remaining workers after an epoch's batches; return the lost ones. Collective over them."""
        self._meet(Purpose.SHARE)
        return self._gone

    def _meet(self, purpose: Purpose) -> None:
        if self._worker is None or self.context.module is None:
            return
        self.context.before_collective()
        if self.isolated_workers:
            _refuse_own_monitors(self.context.module.trainer, self.context.name)
        self._worker.meet(self._place(purpose), with_state=purpose == Purpose.CHECKPOINT)
        self._gone = dict(self._worker.gone)
        if self.in_lockstep or self.isolated_workers:
            return
        with torch.no_grad():
            average_tensors(self._rest(), group=self.context.batch_group)

    def _place(self, purpose: Purpose) -> MeetingKey:
        """Return the key of the next synchronization, by which servers match workers that are separate worlds."""
        if not self.isolated_workers or self.context.module is None:
            return ANY_MEETING
        if self._is_ending:
            return MeetingKey(Purpose.END)
        epoch = self.context.module.current_epoch
        self._met[purpose, epoch] += 1
        return MeetingKey(purpose, epoch, self._met[purpose, epoch])

    @override
    def show_state(self) -> None:
        if self._worker is not None and not self._worker.shows_state:
            self.synchronize()

    # --- checkpoints --------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._shared is None else self._shared.state(self._gone)

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._shared is not None:
            self._shared.load_state(state)

    @override
    def adjust_saved_loops(self, loops: dict[str, Any]) -> None:
        if self._shared is not None:
            self._shared.adjust_saved_loops(loops, self._gone)

    # --- description and teardown -------------------------------------------------------------------------------

    @override
    def describe(self) -> str:
        ranks = self.context.dims.world_size * self.context.distributed.worlds
        if self.dedicated_servers:
            who = f"{self.dedicated_servers} more ranks only serve"
        elif self.num_servers in (None, ranks):
            who = "each of which serves a share of the parameters"
        else:
            who = f"{self.num_servers} of which serve"
        if self.in_lockstep:
            return f"Parameter servers: {ranks} workers, which average their gradients; {who}"
        bound = (
            "never wait for each other"
            if self.max_staleness is None
            else f"at most {self.max_staleness} updates ahead of the slowest"
        )
        text = f"Parameter servers, asynchronous: {ranks} workers, {who}; workers {bound}"
        if self.isolated_workers:
            text += "; one that is gone is left out, unless it is the first"
            text += ", and its share of the data goes to the others" if self._shares else ""
        return text if self.update_log is None else f"{text}; order of updates in {self._log_to}"

    @override
    def release(self) -> None:
        if self._is_awaited and self._worker is None and self.context.data_axis.ended_normally():
            # Without batches training has not started, but the servers wait for it.
            self.start_training()
        worker, self._worker, self._updates, self._is_awaited = self._worker, None, [], False
        if self._shared is not None:
            self._shared.detach()
        if worker is None:
            return
        module, stopping = self.context.module, self.context.stopping
        if module is not None and (stopping is not None or self.context.data_axis.ended_normally()):
            trainer = module.trainer
            if self.context.distributed.is_first:
                worker.send_outcome(lambda: outcome_of(trainer, stopping))
            worker.stop(self.context.distributed.timeout_s)
            if self.isolated_workers and self.context.distributed.is_first:
                # While others train, the first rank's process must stay alive to detect lost workers.
                self.context.distributed.wait_for_servers()
        else:
            worker.stop(_LAST_WORDS_S, RuntimeError("its training was interrupted"))
        if (histogram := worker.histogram()) and not self.in_lockstep:
            total = sum(histogram.values())
            shares = ", ".join(f"{stale}: {count / total:.1%}" for stale, count in sorted(histogram.items()))
            rank_zero_info(
                f"Staleness of {total} updates of the first server, as the number of updates by others in between:"
                f" {shares}."
            )


def _refuse_times(trainer: pl.Trainer, name: str) -> None:
    """Refuse callbacks that act on wall-clock time, which workers in separate worlds would do at different steps.

    Raises:
        ValueError: If the Trainer has such a callback.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        what = "train_time_interval" if saves_by_time(callback) else ""
        if isinstance(callback, Timer) and callback.time_remaining() is not None:
            what = "duration (Trainer(max_time=...) sets it)"
        if what:
            raise ValueError(
                f"{type(callback).__name__} with a {what} acts by wall-clock time, which each worker of {name} with"
                " lost_workers measures by itself: workers would act at different steps. Count steps or epochs"
                " (every_n_train_steps, max_steps), or set lost_workers='end'."
            )


def _refuse_own_monitors(trainer: pl.Trainer, name: str) -> None:
    """Refuse callbacks that monitor a value logged in training, which differs between workers in separate worlds.

    Raises:
        RuntimeError: If the Trainer has such a callback, and the value has been logged.
    """
    known = logged_in_validation(trainer)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and monitor in trainer.callback_metrics and monitor not in known:
            raise RuntimeError(
                f"{type(callback).__name__}(monitor={monitor!r}) decides by a value that is logged in training,"
                f" which differs between the workers of {name} with lost_workers. Monitor a value that validation"
                " logs, or set lost_workers='end'."
            )


def _refuse_shared(optimizers: Sequence[Optimizer], name: str) -> None:
    """Refuse parameters that belong to two optimizers: servers would hold two values of each.

    Raises:
        ValueError: If there is such a parameter.
    """
    lists = [{param for group in one.param_groups for param in group["params"]} for one in optimizers]
    for index, (one, params) in enumerate(zip(optimizers, lists, strict=True)):
        for other, others in zip(optimizers[:index], lists, strict=False):
            if shared := params & others:
                raise ValueError(
                    f"{len(shared)} parameters are in both {type(other).__name__} and {type(one).__name__}, but"
                    f" servers of {name} keep each parameter for one optimizer only. Put each into one optimizer, or"
                    " use pardist_ps."
                )
