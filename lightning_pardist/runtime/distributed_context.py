"""This rank's process group, watchdog and meshes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment

from lightning_pardist.collectives import world_group
from lightning_pardist.compat.default_group import DefaultGroup
from lightning_pardist.mesh import JobMeshes, ParallelDims
from lightning_pardist.runtime.environments.find import rendezvous_endpoint
from lightning_pardist.runtime.failed_runs import Failure, SaveRefusal
from lightning_pardist.runtime.job_counts import count_up, counted_apart
from lightning_pardist.runtime.launchers import children
from lightning_pardist.runtime.process_group import (
    check_backend,
    destroy_alone,
    forget_interface,
    init_process_group,
    job_store,
)
from lightning_pardist.runtime.ranks_apart import group_of, make_whole, set_apart
from lightning_pardist.runtime.watchdog import Watchdog
from lightning_pardist.settings import positive

_POLL_S = 0.05
#: What a server takes beyond ``timeout_s`` to give up who is silent, and to see who has ended.
_LAST_LOSS_S = 30.0
#: Whether a run of this process has had several worlds, of which some may be gone.
_had_worlds = False


class DistributedContext:
    """This rank among the others, from :meth:`open` at the start of a run to :meth:`close` at its end.

    Meshes and groups stay after the end, since checkpoints may be saved then.

    Args:
        process_group_backend: As torch takes it; see :class:`~lightning_pardist.strategies.strategy.PardistStrategy`.
        timeout_s: Seconds that a collective may take.
        heartbeat_timeout_s: Seconds of silence after which a rank is given up.

    Attributes:
        dims: Degrees of parallelism; set when the number of ranks is known, before :meth:`open`.
        global_rank: This rank, ``0 <= global_rank < dims.world_size``, unless it :attr:`is_apart`.
        local_rank: This rank among those of its host.
        device: Where it computes.
        run: Number of the run, equal on all ranks.
        apart: Last ranks of the job that do not train, beside those of ``dims``.
        worlds: How many worlds of ``dims`` train side by side; 1 where all ranks that train are one.
        failure: How the last run has ended on this rank; None where it has not failed.
        watchdog: Ends this rank when another one fails. None on one rank, before a run, and when this rank's part of it
            is done.

    Raises:
        ValueError: If a setting is out of range.
    """

    def __init__(
        self, *, process_group_backend: str | None = None, timeout_s: float = 1800.0, heartbeat_timeout_s: float = 50.0
    ) -> None:
        if heartbeat_timeout_s < 5:
            raise ValueError(f"heartbeat_timeout_s={heartbeat_timeout_s} is too short. Use 5 seconds or more.")
        check_backend(process_group_backend)
        self.process_group_backend = process_group_backend
        self.timeout_s = positive("timeout_s", timeout_s, "Use the seconds that a collective may take.")
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.dims = ParallelDims()
        self.global_rank = self.local_rank = 0
        self.device = torch.device("cpu")
        self.run = self.apart = 0
        self.is_apart = False
        self.worlds = 1
        self._start: dist.ProcessGroup | None = None
        self._messages: dist.ProcessGroup | None = None
        self.watchdog: Watchdog | None = None
        self.failure: Failure | None = None
        self._refusal: SaveRefusal | None = None
        self._refused_for: Failure | None = None
        self._owns_group = False
        self._meshes: JobMeshes | None = None
        #: What user code gets for the default group; None where that is the world.
        self.default_group: DefaultGroup | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Settings and place of this rank, without its connections: a Trainer may be saved as a whole."""
        return self.__dict__ | {
            "watchdog": None,
            "_meshes": None,
            "_messages": None,
            "_start": None,
            "default_group": None,
            "_owns_group": False,
        }

    @property
    def meshes(self) -> JobMeshes:
        """The job's mesh, and its views by purpose.

        Raises:
            RuntimeError: Before :meth:`open`, that is before ``configure_model``.
        """
        if self._meshes is None:
            raise RuntimeError("The device mesh exists once ranks are connected: use it in configure_model or later.")
        return self._meshes

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.dims.world_size

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of the job."""
        return self.global_rank == 0

    @property
    def is_follower(self) -> bool:
        """Whether this rank trains in a world beside the first one, which logs and writes for all."""
        return self.worlds > 1 and not self.is_apart and self.global_rank >= self.world_size

    @property
    def start_group(self) -> dist.ProcessGroup:
        """Who begins a run together: the world, or all worlds side by side, until :meth:`part`."""
        return world_group() if self._start is None else self._start

    def part(self, batches: float) -> None:
        """Everything is alike in all worlds: from now on none waits for another, nor needs it, but the first one.

        Collective over all of them.

        Args:
            batches: That this rank trains on in an epoch.

        Raises:
            RuntimeError: If worlds have different numbers of them, or it is not known.
        """
        if self._start is None:
            return
        found: list[Any] = [None] * self._start.size()
        dist.all_gather_object(found, batches, group=self._start)
        if len(set(found)) > 1 or math.isinf(batches):
            raise RuntimeError(
                f"Workers have {', '.join(f'{each:g}' for each in found)} batches in an epoch, and those that train"
                " without each other (lost_workers) stop at the same step only with as many each. Give the training"
                " loader a length that is alike on all workers (a DistributedSampler does, limit_train_batches may),"
                " or set lost_workers='end'."
            )
        dist.barrier(self._start)
        self._start = None
        if self.watchdog is not None:
            self.watchdog.tolerate(self.followers)

    @property
    def followers(self) -> range:
        """Ranks that train in worlds beside the first one."""
        return range(self.world_size, self.world_size * self.worlds) if self.worlds > 1 else range(0)

    def messages(self, timeout: timedelta) -> dist.ProcessGroup:
        """A gloo group of all ranks of the job, for messages alone. Collective over the world, the first time.

        Args:
            timeout: For which a message that nobody waits for in another way may be on its way; days, among ranks of
                which some are set apart.
        """
        return self.meshes.messages(timeout) if self._messages is None else self._messages

    def open(
        self,
        environment: ClusterEnvironment,
        *,
        global_rank: int,
        local_rank: int,
        device: torch.device,
        apart: int = 0,
        worlds: int = 1,
    ) -> None:
        """Meet the other ranks, and watch each other from then on. Collective over all ranks of the job.

        Args:
            environment: Says where ranks meet.
            global_rank: This rank.
            local_rank: This rank among those of its host.
            device: Where it computes.
            apart: Ranks of the job behind those of :attr:`dims`, each of which becomes a world of its own.
            worlds: How many worlds of :attr:`dims` come before them.

        Raises:
            RuntimeError: If a process group of other ranks exists.
            TimeoutError: If ranks do not find each other.
        """
        self.global_rank, self.local_rank, self.device = global_rank, local_rank, device
        self.worlds, self._start = worlds, None
        self.failure = self._refusal = self._refused_for = None
        trained, timeout = self.world_size * worlds, timedelta(seconds=self.timeout_s)
        job_size = trained + apart
        make_whole()
        self._owns_group = not dist.is_initialized()
        init_process_group(
            self.process_group_backend,
            rank=global_rank,
            world_size=job_size,
            meeting=rendezvous_endpoint(environment),
            device=device,
            timeout=timeout,
        )
        self.run = count_up("runs")
        # Nobody is there to be watched in a group of torch's "fake" backend.
        if job_size > 1 and dist.get_backend() != "fake":
            self.watchdog = Watchdog(
                job_store(),
                rank=global_rank,
                world_size=job_size,
                run=self.run,
                heartbeat_timeout_s=self.heartbeat_timeout_s,
                on_exit=partial(children.end, 0.0),
            )
            self.watchdog.start()
            # The process that has started others of this host is the first there.
            blame, first = self.watchdog.blame, global_rank - local_rank
            children.report_to(lambda local, text, killed: blame(first + local, text, killed=killed))
            self.watchdog.on_lost = lambda rank: children.lose(rank - first)
            self._know_worlds(self.watchdog)
        self.apart, self.is_apart = apart, global_rank >= trained
        self._messages = set_apart(apart, worlds=worlds, timeout=timeout) if apart else None
        if worlds > 1 and not self.is_apart:
            self._start = group_of(self._who_begins(), timeout=timeout)
        if self.is_apart:
            self.dims = ParallelDims()
            if worlds > 1 and self.watchdog is not None:
                self.watchdog.tolerate(self.followers)
        self._meshes, self.default_group = _meshes_for(self.dims, device.type)

    def _know_worlds(self, watchdog: Watchdog) -> None:
        """Remember that ranks may be lost, and refuse to begin a run that needs all of them without some.

        Raises:
            RuntimeError: If they are.
        """
        global _had_worlds
        if self.worlds > 1:
            _had_worlds = True
        elif _had_worlds:
            watchdog.read_losses()
            if watchdog.lost:
                raise RuntimeError(
                    f"Rank {', '.join(map(str, watchdog.lost))} has gone in an earlier run of this script, and this one"
                    " needs all ranks. Use the strategy with lost_workers again, or start a job for what comes behind"
                    f" it. {next(iter(watchdog.lost.values()))}"
                )

    def served(self) -> None:
        """A rank that serves several worlds has no worker left, and all that it has lost are known."""
        job_store().set(f"pardist/served/{self.run}/{self.global_rank}", "")

    def await_served(self) -> None:
        """Wait until those that serve have come to the end of the run; the watchdog watches over them and workers.

        Raises:
            TimeoutError: If they do not, though they give up workers that are silent for ``timeout_s``.
        """
        trained = self.world_size * self.worlds
        keys = [f"pardist/served/{self.run}/{rank}" for rank in range(trained, trained + self.apart)]
        deadline = time.monotonic() + 2 * self.timeout_s + _LAST_LOSS_S
        while not job_store().check(keys):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"Servers have not come to the end of the run within {2 * self.timeout_s + _LAST_LOSS_S:g} s behind"
                    " the first worker (twice timeout_s, and a moment)."
                )
            time.sleep(_POLL_S)

    def _who_begins(self) -> list[int]:
        """Ranks that train in this run: who was lost in an earlier one is not among them, as the first rank knows.

        All losses are known to it: it has come to the end of each run behind those that serve.
        """
        store, key, deadline = job_store(), f"pardist/begins/{self.run}", time.monotonic() + self.timeout_s
        if self.is_first:
            if self.watchdog is not None:
                self.watchdog.read_losses()
            lost = {} if self.watchdog is None else self.watchdog.lost
            store.set(key, json.dumps([rank for rank in range(self.world_size * self.worlds) if rank not in lost]))
        while not store.check([key]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"Rank 0 did not begin run {self.run} within {self.timeout_s:g} s (timeout_s).")
            time.sleep(_POLL_S)
        return list(json.loads(store.get(key)))

    def change_dims(self, dims: ParallelDims) -> None:
        """Other degrees for the ranks that have met. Collective over the world."""
        self.dims = dims
        self._meshes, self.default_group = _meshes_for(dims, self.device.type)

    def save_refusal(self, progress: str) -> SaveRefusal | None:
        """Why no checkpoint can be put together any more, as the run has failed. Not collective; all ranks call it.

        Args:
            progress: How far this rank has come.

        Returns:
            None if the run has not failed, or every rank failed at the same place and may still meet the others.
        """
        if self.failure is None:
            return None
        if self.failure.elsewhere:
            return SaveRefusal(self.failure.why_alone)
        ranks = self.world_size * self.worlds + self.apart
        if self._meshes is None or ranks == 1:
            return None
        if self._refused_for is not self.failure:
            self._refused_for = self.failure
            watchdog = self.watchdog
            self._refusal = self.failure.refusal(
                job_store(),
                run=self.run,
                rank=self.global_rank,
                ranks=ranks,
                progress=progress,
                is_blocked=lambda rank: watchdog is not None and watchdog.is_blocked(rank),
            )
            if self._refusal is None and watchdog is not None:
                watchdog.extend_end(self.timeout_s)
        return self._refusal

    def stop_watchdog(self) -> None:
        """This rank's work is done; its silence means nothing from now on. Not collective."""
        if self.watchdog is not None:
            self.watchdog.stop()
            self.watchdog = None

    def close(self) -> None:
        """The run has ended on this rank. Not collective: a group of several ranks lives as long as the process."""
        if dist.is_initialized() and dist.get_backend() == "fake":
            # Nobody was met, and a job around this one still needs its interface.
            return
        self.stop_watchdog()
        forget_interface()
        # Ranks apart have one rank each, and a job around it.
        if self._owns_group and not self.apart:
            destroy_alone()
            _forget_past_meshes()


#: Meshes over the default process group of this moment, each with what user code gets for that group.
_meshes: dict[tuple[ParallelDims, str], tuple[JobMeshes, DefaultGroup | None]] = {}
_meshes_world: dist.ProcessGroup | None = None


def _meshes_for(dims: ParallelDims, device_type: str) -> tuple[JobMeshes, DefaultGroup | None]:
    """One mesh for all runs with these degrees: each new one would leave process groups and their threads behind."""
    global _meshes_world
    _forget_past_meshes()
    _meshes_world = world_group()
    if (dims, device_type) not in _meshes:
        meshes, default = dims.build(device_type), None
        if meshes.batch.size() < dims.world_size:
            ranks = meshes.batch.mesh.tolist()
            default = DefaultGroup(dist.new_group(ranks, use_local_synchronization=True))
        _meshes[dims, device_type] = meshes, default
    return _meshes[dims, device_type]


@contextmanager
def rehearsed() -> Iterator[None]:
    """Inside, runs are tried whose process groups are not the job's: its own meshes and counts stay as they are."""
    global _meshes, _meshes_world
    before = _meshes, _meshes_world
    _meshes, _meshes_world = {}, None
    try:
        with counted_apart():
            yield
    finally:
        _meshes, _meshes_world = before


def _forget_past_meshes() -> None:
    """Let go of a destroyed group in the process that made it: in a child by fork its destructor would hang."""
    global _meshes_world
    if not dist.is_initialized() or _meshes_world is not world_group():
        _meshes.clear()
        _meshes_world = None
