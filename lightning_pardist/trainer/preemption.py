"""Preemption: on a signal, all ranks stop after the same step and save a checkpoint.

[Note: agreement without waiting] A signal reaches ranks at different times, or only one of them, and saving is
collective. The handler therefore only records the signal. Before each step the first rank starts an asynchronous
broadcast of one number, which overlaps with the step and encodes whether all ranks stop before the next one. Signals
that other ranks received reach the first rank through the watchdog's store. This replaces Lightning's own broadcast, on
which every rank waits before every batch, and the one inside its signal handler. Ranks that are not in lockstep count
their steps in the store instead of using the broadcast.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_pardist.axes.base import RunContext
from lightning_pardist.collectives import barrier
from lightning_pardist.compat.lightning_loops import (
    BROADCAST_SIGTERM,
    SIGTERM_NOTIFIER,
    register_signal,
    replace,
    restore,
    signal_connector,
)
from lightning_pardist.compat.process_groups import PrefixStore
from lightning_pardist.runtime.environments.slurm import SLURMEnvironment
from lightning_pardist.runtime.process_group import job_store
from lightning_pardist.trainer.stop_agreement import StopAgreement

#: Exit status of a job that should be restarted (sysexits.h: EX_TEMPFAIL).
AGAIN_STATUS = os.EX_TEMPFAIL
_GO_ON, _STOP, _REQUEUE = 0, 1, 2
_STATUS = {_STOP: 128 + signal.SIGTERM, _REQUEUE: AGAIN_STATUS}


class PreemptionHandler:
    """Handles SIGTERM, and SLURM's signal before a time limit, at the next step boundary.

    SIGTERM, which a scheduler sends to preempt a job, ends the run with status 143. The requeue signal of a
    :class:`~lightning_pardist.SLURMEnvironment` also requeues the job, and ends it with status 75.

    Args:
        trainer: The Trainer, before ``fit`` runs.
        context: Context of its strategy; the process group exists.
        environment: Environment of the launcher that started this process.
        save: Saves a checkpoint to resume from and returns its path. Collective over the world.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        context: RunContext,
        environment: ClusterEnvironment | None,
        save: Callable[[], str],
    ) -> None:
        self._trainer = trainer
        self._context = context
        self._environment = environment
        self._save = save
        self._requested = _GO_ON
        self._answer: torch.Tensor | None = None
        self._work: Any = None
        self._stop_agreement: StopAgreement | None = None
        self._early: dict[signal.Signals, Any] = {}

    def attach(self) -> None:
        """Replace Lightning's signal handlers until the run ends. Not collective."""
        connector, loop = signal_connector(self._trainer), self._trainer.fit_loop.epoch_loop
        register, advance = connector.register_signal_handlers, loop.advance
        self._handle_until_training()
        self._context.stopping = None

        @wraps(register)
        def register_signal_handlers() -> None:
            self._restore_early()
            register()
            requeue = self._requeue_signal()
            # A custom handler of the user is kept, as in Lightning.
            if requeue is not None and signal.getsignal(requeue) in (None, signal.SIG_DFL):
                register_signal(connector, requeue, self._on_signal)

        @wraps(advance)
        def advance_unless_asked(data_fetcher: Any) -> None:
            if self._at_boundary() and (asked := self._agreed()) != _GO_ON:
                self._stop(asked)
            advance(data_fetcher)

        connector.__dict__["register_signal_handlers"] = register_signal_handlers
        replace(connector, SIGTERM_NOTIFIER, self._on_signal)
        loop.__dict__["advance"] = advance_unless_asked
        replace(loop, BROADCAST_SIGTERM, lambda: None)

    def detach(self) -> None:
        """Restore Lightning's methods. Not collective."""
        self._restore_early()
        if self._context.distributed.is_first:
            # The first rank has finished and will not publish a stop any more.
            self._wait_for_first_rank()
        restore(signal_connector(self._trainer), "register_signal_handlers", SIGTERM_NOTIFIER)
        restore(self._trainer.fit_loop.epoch_loop, "advance", BROADCAST_SIGTERM)

    # --- signals ------------------------------------------------------------------------------------------------

    def _requeue_signal(self) -> signal.Signals | None:
        environment = self._environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            return environment.requeue_signal
        return None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._requested = max(self._requested, _REQUEUE if number == self._requeue_signal() else _STOP)
        watchdog = self._context.distributed.watchdog
        if watchdog is not None:
            watchdog.send_request(self._requested)

    def _handle_until_training(self) -> None:
        """Install the handler early: the default action would kill the process while it loads data and checkpoints."""
        requeue = self._requeue_signal()
        if requeue is None:
            return
        try:
            if signal.getsignal(requeue) in (None, signal.SIG_DFL):
                self._early[requeue] = signal.signal(requeue, self._on_signal)
        except ValueError:
            # Not the main thread, which alone can set signal handlers.
            return

    def _restore_early(self) -> None:
        for number, handler in self._early.items():
            signal.signal(number, handler)
        self._early.clear()

    # --- agreement ----------------------------------------------------------------------------------------------

    def _at_boundary(self) -> bool:
        """Return whether no gradients are being accumulated, which a stop would discard."""
        loop = self._trainer.fit_loop.epoch_loop
        return loop.batch_progress.current.ready % self._trainer.accumulate_grad_batches == 0

    def _agreed(self) -> int:
        """Return the action broadcast before the last step, and start the broadcast for the next one."""
        watchdog = self._context.distributed.watchdog
        asked = max(self._requested, watchdog.highest_request if watchdog is not None else _GO_ON)
        if self._context.dims.world_size * self._context.distributed.worlds == 1:
            return asked
        if not self._context.in_lockstep:
            return self._agree_by_store(asked)
        agreed = _GO_ON
        if self._work is not None and self._answer is not None:
            self._work.wait()
            agreed = int(self._answer.item())
        device = "cpu" if "gloo" in dist.get_backend_config() else self._context.device
        self._answer = torch.tensor(asked, dtype=torch.int32, device=device)
        self._work = dist.broadcast(self._answer, src=0, async_op=True)
        return agreed

    def _agree_by_store(self, asked: int) -> int:
        distributed = self._context.distributed
        if self._stop_agreement is None:
            store = PrefixStore(f"pardist/stop/{distributed.run}", job_store())
            ranks = distributed.world_size * distributed.worlds
            self._stop_agreement = StopAgreement(store, rank=distributed.global_rank, world_size=ranks)
        lost = () if distributed.watchdog is None else distributed.watchdog.lost
        return self._stop_agreement.before_step(asked, lost=lost)

    def _wait_for_first_rank(self) -> None:
        """Wait for the first rank if there are several worlds, which have no common barrier."""
        distributed = self._context.distributed
        if self._stop_agreement is not None and distributed.worlds > 1:
            self._stop_agreement.wait_for_first_rank(distributed.timeout_s)

    def _stop(self, asked: int) -> None:
        trainer, environment = self._trainer, self._environment
        path = self._save()
        rank_zero_info(f"Stopped by a signal after step {trainer.global_step}, with a checkpoint at {path}.")
        if asked == _REQUEUE and isinstance(environment, SLURMEnvironment) and trainer.is_global_zero:
            rank_zero_info("The job goes back to the queue, and will continue from there.")
            if problem := environment.requeue():
                rank_zero_info(
                    f"But the job could not be requeued: {problem}. It ends with status {AGAIN_STATUS}, on which its"
                    " batch script can call `scontrol requeue $SLURM_JOB_ID`."
                )
        self._context.stopping = _STATUS[asked]
        # As Lightning's handler sets it (Trainer.received_sigterm), which callbacks read.
        signal_connector(trainer).received_sigterm = asked == _STOP
        # All ranks exit together, since an early exit of one could be treated as a failure by the others.
        barrier(self._context.device)
        self._wait_for_first_rank()
        raise SIGTERMException(_STATUS[asked])
