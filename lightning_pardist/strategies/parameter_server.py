"""Parameter-server strategy: workers send gradients to server ranks, which hold and update the parameters."""

from __future__ import annotations

import os
from typing import Any, get_args

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from typing_extensions import override

from lightning_pardist.axes.base import ParallelAxis
from lightning_pardist.axes.ddp import DDPAxis
from lightning_pardist.axes.parameter_server import LostWorkers, ParameterServerAxis
from lightning_pardist.axes.zero import ZeroAxis
from lightning_pardist.runtime.environments.find import describe
from lightning_pardist.settings import one_of
from lightning_pardist.strategies.strategy import PardistStrategy


class ParameterServerStrategy(PardistStrategy):
    """Parameter server: each rank trains on its samples and serves a share of the parameters and optimizer state.

    Synchronous (``max_staleness=0``): gradients of all workers are averaged on the rank that serves the parameters,
    which updates them and sends them to all. If every rank serves, this is ZeRO-2 and uses its engine: results equal
    those of ``pardist_ddp``, with ``2 Psi (N-1)/N`` sent per rank and step for ``Psi`` parameters on ``N`` ranks, and
    ``Psi + 3 Psi/N`` held (fp32 Adam).

    Asynchronous: each worker's gradients are applied as a separate update (Li et al., OSDI 2014), and a worker waits
    only if it would be more than ``max_staleness`` updates ahead of the slowest (stale synchronous parallel, Ho et al.,
    NIPS 2013); with None it never waits (as in Hogwild, Recht et al., NIPS 2011, but updates are atomic). Results
    differ from those of a single process with the same global batch: see ``update_log``. A worker sends and receives
    ``Psi (N-1)/N`` each per step.

    With ``dedicated_servers``, ranks other than the workers hold parameters and optimizer state. In synchronous mode
    workers average their gradients in buckets while backward runs and send the averages to the servers: results equal
    those of ``pardist_ddp``, with ``2 Psi (N-1)/N + Psi/N`` sent per worker and step for ``N`` workers.

    All ranks synchronise before validation, checkpoints and the end of training: the parameters that are evaluated and
    saved are those of the servers, with every worker's updates.

    Args:
        max_staleness: Number of updates that a worker may be ahead of the slowest; 0 for synchronous training, None for
            no limit.
        num_servers: Number of ranks, from the first, that serve parameters, which are distributed whole and evenly by
            size; all ranks if None.
        dedicated_servers: Number of ranks, from the last, that only serve. They load no data, and their ``fit`` returns
            when the workers have finished, with the same weights.
        update_log: Folder in which servers log the order of updates, one subfolder per run, from which
            :func:`~lightning_pardist.engines.servers.replay.replay` repeats the run in one process.
        lost_workers: What to do if a worker other than the first is ended by a signal or the loss of its host, or if
            the others wait for it for longer than ``timeout_s``. ``"end"`` ends the job. ``"report"`` continues without
            it and reports the batches that are not trained on; ``"share"`` distributes these batches over the
            remaining workers at the end of the epoch, and later epochs as well. Both need ``dedicated_servers``,
            asynchronous updates and a single host whose ranks the script starts, and give each worker a separate
            world; ``"share"`` needs a loader with a ``DistributedSampler``, from which every worker can derive the
            others' batches.
        bucket_size_mb: In synchronous mode, size of gradient and parameter buckets in MiB.
        **kwargs: See :class:`~lightning_pardist.strategies.strategy.PardistStrategy`.

    Raises:
        ValueError: If a setting is out of range, or does not apply to the chosen mode.
    """

    def __init__(
        self,
        *,
        max_staleness: int | None = 0,
        num_servers: int | None = None,
        dedicated_servers: int = 0,
        update_log: str | os.PathLike[str] | None = None,
        lost_workers: LostWorkers = "end",
        bucket_size_mb: float = 25.0,
        **kwargs: Any,
    ) -> None:
        if isinstance(dedicated_servers, bool) or not isinstance(dedicated_servers, int) or dedicated_servers < 0:
            raise ValueError(
                f"dedicated_servers={dedicated_servers!r} is not a number of ranks. Set the number of ranks that"
                " only serve, or 0."
            )
        if dedicated_servers and num_servers is not None:
            raise ValueError(
                f"num_servers={num_servers} is for servers that are workers as well, but"
                f" dedicated_servers={dedicated_servers} reserves ranks that only serve. Set one of them."
            )
        one_of("lost_workers", lost_workers, get_args(LostWorkers))
        if lost_workers != "end" and (max_staleness == 0 or not dedicated_servers):
            raise ValueError(
                f"lost_workers={lost_workers!r} with max_staleness={max_staleness} and"
                f" dedicated_servers={dedicated_servers}: training can continue without a worker only if no other"
                " worker waits for its updates or for the parameters that it serves. Set max_staleness to 1 or"
                " more, or None, and dedicated_servers to 1 or more."
            )
        if max_staleness == 0:
            for name, value in (("num_servers", num_servers), ("update_log", update_log)):
                if value is not None:
                    raise ValueError(
                        f"{name}={value!r} is for asynchronous servers only: with max_staleness=0 every rank serves"
                        " an equal share, and updates have a fixed order. Leave it out, or set max_staleness to 1"
                        " or more, or None."
                    )
        axes: list[ParallelAxis]
        if max_staleness == 0 and not dedicated_servers:
            axes = [ZeroAxis(zero_stage=2, bucket_size_mb=bucket_size_mb)]
        else:
            servers = ParameterServerAxis(
                max_staleness=max_staleness,
                num_servers=num_servers,
                dedicated_servers=dedicated_servers,
                update_log=update_log,
                lost_workers=lost_workers,
            )
            axes = [DDPAxis(bucket_size_mb=bucket_size_mb), servers]
        super().__init__(axes=axes, **kwargs)
        self.lost_workers = lost_workers

    @override
    def _configure_launcher(self) -> None:
        if self.lost_workers != "end":
            self._refuse_launchers()
        super()._configure_launcher()

    def _refuse_launchers(self) -> None:
        """Check that the first rank starts all others: an external launcher may end all ranks if one of them fails.

        Raises:
            ValueError: If there are several nodes, an external launcher or another start method than ``"popen"``.
        """
        environment, found = self.cluster_environment, None
        if self.num_nodes > 1:
            found = f"num_nodes={self.num_nodes}"
        elif not isinstance(environment, LightningEnvironment):
            found = f"a launcher ({'none' if environment is None else describe(environment)})"
        elif self.start_method != "popen":
            found = f"start_method={self.start_method!r}"
        if found is not None:
            raise ValueError(
                f"lost_workers={self.lost_workers!r} with {found}: all processes may be ended when one of them"
                " fails. Start the script itself on one host, with start_method='popen', or set lost_workers='end'."
            )
