"""Process group, watchdog and device meshes of this rank."""

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
from lightning_pardist.runtime.isolated_ranks import group_of, isolate_ranks, restore_world
from lightning_pardist.runtime.job_counts import next_call_number, preserve_call_numbers
from lightning_pardist.runtime.launchers import children
from lightning_pardist.runtime.process_group import (
    check_backend,
    destroy_single_rank_group,
    forget_interface,
    init_process_group,
    job_store,
)
from lightning_pardist.runtime.watchdog import Watchdog
from lightning_pardist.settings import positive

_POLL_S = 0.05
#: Seconds that a server may take beyond ``timeout_s`` to give up unresponsive workers and notice those that have ended.
_LAST_LOSS_S = 30.0
#: Whether a run of this process has had several worlds, of which some may be lost.
_had_worlds = False


class DistributedContext:
    """This rank's process group, watchdog and meshes, from :meth:`open` at a run's start to :meth:`close` at its end.

    Meshes and groups are kept after the end, since checkpoints may be saved then.

    Args:
        process_group_backend: Backend as torch takes it; see
            :class:`~lightning_pardist.strategies.strategy.PardistStrategy`.
        timeout_s: Seconds that a collective may take.
        heartbeat_timeout_s: Seconds without a heartbeat after which a rank is considered failed.

    Attributes:
        dims: Degrees of parallelism; set when the number of ranks is known, before :meth:`open`.
        global_rank: This rank, ``0 <= global_rank < dims.world_size``, unless it :attr:`is_isolated`.
        local_rank: Index of this rank on its host.
        device: Device of this rank.
        run: Number of the run, equal on all ranks.
        num_isolated: Number of ranks that do not train, the last ones of the job; they are not part of ``dims``.
        worlds: Number of worlds of ``dims`` that train side by side; 1 if all training ranks form one.
        failure: How the last run has failed on this rank; None if it has not.
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
        self.run = self.num_isolated = 0
        self.is_isolated = False
        self.worlds = 1
        self._start: dist.ProcessGroup | None = None
        self._messages: dist.ProcessGroup | None = None
        self.watchdog: Watchdog | None = None
        self.failure: Failure | None = None
        self._refusal: SaveRefusal | None = None
        self._refused_for: Failure | None = None
        self._owns_group = False
        self._meshes: JobMeshes | None = None
        #: Substitute for the default group in user code; None if user code sees the world.
        self.default_group: DefaultGroup | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return settings and ranks without connections: a Trainer may be pickled as a whole."""
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
        """The job's device mesh, and its views by purpose.

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
        """Whether this rank trains in a world other than the first one, which logs and writes for all."""
        return self.worlds > 1 and not self.is_isolated and self.global_rank >= self.world_size

    @property
    def start_group(self) -> dist.ProcessGroup:
        """Group of the ranks that start a run together: the world, or all worlds until :meth:`separate_worlds`."""
        return world_group() if self._start is None else self._start

    def separate_worlds(self, batches: float) -> None:
        """Make the worlds independent once their states are equal: afterwards each needs no other than the first.

        Collective over all worlds.

        Args:
            batches: Number of batches that this rank trains on in an epoch.

        Raises:
            RuntimeError: If worlds have different numbers of batches, or the number is unknown.
        """
        if self._start is None:
            return
        found: list[Any] = [None] * self._start.size()
        dist.all_gather_object(found, batches, group=self._start)
        if len(set(found)) > 1 or math.isinf(batches):
            raise RuntimeError(
                f"Workers have {', '.join(f'{each:g}' for each in found)} batches in an epoch, but workers that train"
                " independently of each other (lost_workers) stop at the same step only if they have equally many."
                " Give the training loader the same length on all workers (a DistributedSampler does,"
                " limit_train_batches may), or set lost_workers='end'."
            )
        dist.barrier(self._start)
        self._start = None
        if self.watchdog is not None:
            self.watchdog.allow_loss(self.followers)

    @property
    def followers(self) -> range:
        """Ranks that train in worlds other than the first one."""
        return range(self.world_size, self.world_size * self.worlds) if self.worlds > 1 else range(0)

    def messages(self, timeout: timedelta) -> dist.ProcessGroup:
        """Return a gloo group of all ranks of the job, for messages only. Collective over the world, the first time.

        Args:
            timeout: How long a message may take if nothing else bounds the wait for it; days, among ranks of which some
                are isolated.
        """
        return self.meshes.messages(timeout) if self._messages is None else self._messages

    def open(
        self,
        environment: ClusterEnvironment,
        *,
        global_rank: int,
        local_rank: int,
        device: torch.device,
        num_isolated: int = 0,
        worlds: int = 1,
    ) -> None:
        """Connect to the other ranks, and start the watchdog. Collective over all ranks of the job.

        Args:
            environment: Cluster environment with the rendezvous endpoint.
            global_rank: This rank.
            local_rank: Index of this rank on its host.
            device: Device of this rank.
            num_isolated: Number of ranks after those of :attr:`dims`, each of which becomes a world of its own.
            worlds: Number of worlds of :attr:`dims` before them.

        Raises:
            RuntimeError: If a process group with other ranks exists.
            TimeoutError: If ranks do not connect.
        """
        self.global_rank, self.local_rank, self.device = global_rank, local_rank, device
        self.worlds, self._start = worlds, None
        self.failure = self._refusal = self._refused_for = None
        trained, timeout = self.world_size * worlds, timedelta(seconds=self.timeout_s)
        job_size = trained + num_isolated
        restore_world()
        self._owns_group = not dist.is_initialized()
        init_process_group(
            self.process_group_backend,
            rank=global_rank,
            world_size=job_size,
            meeting=rendezvous_endpoint(environment),
            device=device,
            timeout=timeout,
        )
        self.run = next_call_number("runs")
        # A group of torch's "fake" backend has no other ranks to watch.
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
            # The process that has started the others of this host is the first rank there.
            blame, first = self.watchdog.report_failure_of, global_rank - local_rank
            children.report_to(lambda local, text, killed: blame(first + local, text, killed=killed))
            self.watchdog.on_lost = lambda rank: children.drop_rank(rank - first)
            self._check_lost_ranks(self.watchdog)
        self.num_isolated, self.is_isolated = num_isolated, global_rank >= trained
        self._messages = isolate_ranks(num_isolated, worlds=worlds, timeout=timeout) if num_isolated else None
        if worlds > 1 and not self.is_isolated:
            self._start = group_of(self._training_ranks(), timeout=timeout)
        if self.is_isolated:
            self.dims = ParallelDims()
            if worlds > 1 and self.watchdog is not None:
                self.watchdog.allow_loss(self.followers)
        self._meshes, self.default_group = _meshes_for(self.dims, device.type)

    def _check_lost_ranks(self, watchdog: Watchdog) -> None:
        """Record that ranks may be lost, and check that a run which needs all ranks is not started without some.

        Raises:
            RuntimeError: If ranks are missing.
        """
        global _had_worlds
        if self.worlds > 1:
            _had_worlds = True
        elif _had_worlds:
            watchdog.read_losses()
            if watchdog.lost:
                raise RuntimeError(
                    f"Rank {', '.join(map(str, watchdog.lost))} was lost in an earlier run of this script, and this run"
                    " needs all ranks. Use the strategy with lost_workers again, or start a new job for the runs that"
                    f" follow. {next(iter(watchdog.lost.values()))}"
                )

    def publish_served(self) -> None:
        """Publish that this server has no worker left and has recorded all lost ranks."""
        job_store().set(f"pardist/served/{self.run}/{self.global_rank}", "")

    def wait_for_servers(self) -> None:
        """Wait until the servers have reached the end of the run, while the watchdog monitors servers and workers.

        Raises:
            TimeoutError: If they do not, though they give up workers that do not respond for ``timeout_s``.
        """
        trained = self.world_size * self.worlds
        keys = [f"pardist/served/{self.run}/{rank}" for rank in range(trained, trained + self.num_isolated)]
        deadline = time.monotonic() + 2 * self.timeout_s + _LAST_LOSS_S
        while not job_store().check(keys):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"Servers did not reach the end of the run within {2 * self.timeout_s + _LAST_LOSS_S:g} s after the"
                    " first worker (twice timeout_s plus a margin)."
                )
            time.sleep(_POLL_S)

    def _training_ranks(self) -> list[int]:
        """Return the ranks that train in this run, published by the first rank: all but those lost in earlier runs.

        The first rank has seen all losses: it reaches the end of each run after the servers.
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
        """Change the degrees of parallelism of the connected ranks. Collective over the world."""
        self.dims = dims
        self._meshes, self.default_group = _meshes_for(dims, self.device.type)

    def save_refusal(self, progress: str) -> SaveRefusal | None:
        """Return why no checkpoint can be saved after a failure of the run. Not collective; all ranks call it.

        Args:
            progress: This rank's progress in training.

        Returns:
            None if the run has not failed, or if every rank failed at the same place and collectives still work.
        """
        if self.failure is None:
            return None
        if self.failure.elsewhere:
            return SaveRefusal(self.failure.why_alone)
        ranks = self.world_size * self.worlds + self.num_isolated
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
        """Stop the watchdog: this rank's work is done, and its heartbeat may stop. Not collective."""
        if self.watchdog is not None:
            self.watchdog.stop()
            self.watchdog = None
            children.report_to(None)

    def close(self) -> None:
        """End the run on this rank. Not collective: a group of several ranks lives as long as the process."""
        if dist.is_initialized() and dist.get_backend() == "fake":
            # No ranks were connected, and a job around this one still needs its interface setting.
            return
        self.stop_watchdog()
        forget_interface()
        # An isolated rank has a default group of one rank, inside the job's group.
        if self._owns_group and not self.num_isolated:
            destroy_single_rank_group()
            _forget_past_meshes()


#: Meshes over the current default process group, each with its substitute for that group in user code.
_meshes: dict[tuple[ParallelDims, str], tuple[JobMeshes, DefaultGroup | None]] = {}
_meshes_world: dist.ProcessGroup | None = None


def _meshes_for(dims: ParallelDims, device_type: str) -> tuple[JobMeshes, DefaultGroup | None]:
    """Return one mesh for all runs with these degrees: creating more would leak process groups and their threads."""
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
def trial_meshes() -> Iterator[None]:
    """Return a context for trial runs with process groups of their own: the job's meshes and counters are restored."""
    global _meshes, _meshes_world
    before = _meshes, _meshes_world
    _meshes, _meshes_world = {}, None
    try:
        with preserve_call_numbers():
            yield
    finally:
        _meshes, _meshes_world = before


def _forget_past_meshes() -> None:
    """Drop meshes of a destroyed group in the process that created them: in a forked child, destruction would hang."""
    global _meshes_world
    if not dist.is_initialized() or _meshes_world is not world_group():
        _meshes.clear()
        _meshes_world = None
