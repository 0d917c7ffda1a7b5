"""The axis of asynchronous parameter servers: workers that go on without waiting for each other's gradients."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import RunningStage
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pardist.axes.base import ParallelAxis
from lightning_pardist.axes.refusals import refuse_callbacks, refuse_renormalized
from lightning_pardist.compat.lightning_loops import layer_sync
from lightning_pardist.engines.ddp.buffers import average_tensors, tensors_of_nobody
from lightning_pardist.engines.servers import ServedUpdates, Worker
from lightning_pardist.engines.servers.update_log import next_run
from lightning_pardist.mesh import Degree
from lightning_pardist.settings import positive

#: A server waits for its workers' requests for as long as they live; a worker's own waits have the user's bound.
_WHILE_THEY_LIVE = timedelta(days=30)
#: A worker that fails takes so long to tell its servers.
_LAST_WORDS_S = 1.0


class ParameterServerAxis(ParallelAxis):
    """Every rank works with samples of its own, and some or all of them serve shares of the parameters beside that.

    A worker's gradients are an update of their own: they go to the servers, which step their optimizers, and new values
    come back (Li et al., OSDI 2014). A worker waits for others only where it would come too far ahead of the slowest
    (stale synchronous parallel, Ho et al., NIPS 2013).

    Validation, checkpoints and the end of training are meetings: all updates have been made, parameters are those of
    the servers on all ranks, and floating-point buffers and parameters of no optimizer are averaged.

    The arguments are those of :class:`~lightning_pardist.ParameterServerStrategy`.

    Raises:
        ValueError: If a setting is out of range; during a run, if something needs all workers in every step, or writes
            to parameters without the servers' knowledge.
    """

    name = "parameter_server"
    mesh_axes = ("outer_parallel",)
    order = 60
    in_lockstep = False

    def __init__(
        self,
        *,
        max_staleness: int | None,
        num_servers: int | None = None,
        update_log: str | os.PathLike[str] | None = None,
    ) -> None:
        if max_staleness is not None:
            max_staleness = int(positive("max_staleness", max_staleness, "Use updates, 0 for the synchronous form."))
        if num_servers is not None:
            num_servers = int(positive("num_servers", num_servers, "Use the ranks that serve, None for all."))
        self.max_staleness, self.num_servers = max_staleness, num_servers
        self.update_log = update_log
        self._log_to: Path | None = None
        self._worker: Worker | None = None
        self._updates: list[ServedUpdates] = []
        #: Whether a sample has counted since the last step, and whether one was made since the last batch began.
        self._has_gradients, self._has_stepped = True, True

    @override
    def degrees(self, num_nodes: int, ranks_per_node: int) -> dict[str, Degree]:
        return {"outer_parallel": "auto"}

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
            f"writes averages into the parameters, which servers of {name} would not know of, or makes them of values"
            " that differ between workers. Remove the callback, or use pardist_ps.",
        )
        refuse_renormalized(trainer.lightning_module, name, fix="leave rows as they come, or use pardist_ps")
        if layer_sync(trainer.strategy) is not None:  # type: ignore[arg-type]
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
        servers = self.num_servers or self.context.dims.world_size
        group = self.context.batch_group
        self._updates = [
            ServedUpdates(optimizer, group=group, num_servers=servers, setting=self.context.update_scope)
            for optimizer in optimizers
        ]
        if self.update_log is not None:
            self._log_to = self.context.broadcast(next_run(self.update_log))

    # --- steps --------------------------------------------------------------------------------------------------

    @override
    def start_training(self) -> None:
        distributed = self.context.distributed
        first = 2 * distributed.run
        self._worker = Worker(
            self._updates,
            group=distributed.meshes.messages(_WHILE_THEY_LIVE),
            tags=(first, first + 1),
            max_staleness=self.max_staleness,
            timeout_s=distributed.timeout_s,
            log_to=self._log_to,
            has_gradients=lambda: self._has_gradients,
        )
        self._worker.start()

    @override
    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        worker, module = self._worker, self.context.module
        if worker is None or module is None or module.trainer.state.stage != RunningStage.TRAINING:
            return step(*args, **kwargs)
        worker.go_on()
        counts = self.context.batch_counts
        is_here = counts is None or counts() is not False
        self._has_gradients = is_here or (self._has_gradients and not self._has_stepped)
        self._has_stepped = False
        output = step(*args, **kwargs)
        if worker.staleness is not None:
            module.log("staleness", float(worker.staleness), prog_bar=True, on_step=True, on_epoch=False, batch_size=1)
        return output

    @override
    def backward(self, run: Callable[[], None]) -> None:
        """Run backward, unless the batch stands in for one that this worker does not have any more."""
        counts = self.context.batch_counts
        if counts is None or counts() is not False:
            run()

    @override
    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        if self._worker is not None:
            self._has_stepped = True
            self._worker.complete(self.context.optimizers.index(optimizer))

    @override
    def synchronize(self, *, evaluation: bool = False) -> None:
        if self._worker is None or self.context.module is None:
            return
        self.context.before_collective()
        self._worker.meet()
        with torch.no_grad():
            rest = tensors_of_nobody(self.context.module, self.context.optimizers)
            average_tensors(rest, group=self.context.batch_group)

    # --- for people, and the end --------------------------------------------------------------------------------

    @override
    def describe(self) -> str:
        ranks = self.context.dims.world_size
        servers = self.num_servers or ranks
        bound = (
            "never wait for each other"
            if self.max_staleness is None
            else f"at most {self.max_staleness} updates ahead of the slowest"
        )
        who = "each of which serves a share of the parameters" if servers == ranks else f"{servers} of which serve"
        text = f"Parameter servers, asynchronous: {ranks} workers, {who}; workers {bound}"
        return text if self.update_log is None else f"{text}; order of updates in {self._log_to}"

    @override
    def release(self) -> None:
        worker, self._worker, self._updates = self._worker, None, []
        if worker is None:
            return
        if self.context.data_axis.ended_well():
            worker.stop(self.context.distributed.timeout_s)
        else:
            worker.stop(_LAST_WORDS_S, RuntimeError("its training was interrupted"))
        if histogram := worker.histogram():
            total = sum(histogram.values())
            shares = ", ".join(f"{stale}: {count / total:.1%}" for stale, count in sorted(histogram.items()))
            rank_zero_info(f"Staleness of {total} updates of the first server, in updates by others: {shares}.")


def _refuse_shared(optimizers: Sequence[Optimizer], name: str) -> None:
    """Refuse a parameter of two optimizers: servers would have two values of it.

    Raises:
        ValueError: If there is one.
    """
    lists = [{param for group in one.param_groups for param in group["params"]} for one in optimizers]
    for index, (one, params) in enumerate(zip(optimizers, lists, strict=True)):
        for other, others in zip(optimizers[:index], lists, strict=False):
            if shared := params & others:
                raise ValueError(
                    f"{len(shared)} parameters are in {type(other).__name__} and in {type(one).__name__} alike, and"
                    f" servers of {name} have them for one optimizer each. Put each into one optimizer, or use"
                    " pardist_ps."
                )
