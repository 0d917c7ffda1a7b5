"""This rank's process group, watchdog and meshes."""

from __future__ import annotations

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
from lightning_pardist.runtime.job_counts import count_up, counted_apart
from lightning_pardist.runtime.launchers import children
from lightning_pardist.runtime.process_group import (
    check_backend,
    destroy_alone,
    forget_interface,
    init_process_group,
    job_store,
)
from lightning_pardist.runtime.ranks_apart import make_whole, set_apart
from lightning_pardist.runtime.watchdog import Watchdog
from lightning_pardist.settings import positive


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
        self._messages: dist.ProcessGroup | None = None
        self.watchdog: Watchdog | None = None
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
    ) -> None:
        """Meet the other ranks, and watch each other from then on. Collective over all ranks of the job.

        Args:
            environment: Says where ranks meet.
            global_rank: This rank.
            local_rank: This rank among those of its host.
            device: Where it computes.
            apart: Ranks of the job behind those of :attr:`dims`, each of which becomes a world of its own.

        Raises:
            RuntimeError: If a process group of other ranks exists.
            TimeoutError: If ranks do not find each other.
        """
        self.global_rank, self.local_rank, self.device = global_rank, local_rank, device
        job_size, timeout = self.world_size + apart, timedelta(seconds=self.timeout_s)
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
            children.report_to(self.watchdog.blame)
        self.apart, self.is_apart = apart, global_rank >= self.world_size
        self._messages = set_apart(apart, timeout=timeout) if apart else None
        if self.is_apart:
            self.dims = ParallelDims()
        self._meshes, self.default_group = _meshes_for(self.dims, device.type)

    def change_dims(self, dims: ParallelDims) -> None:
        """Other degrees for the ranks that have met. Collective over the world."""
        self.dims = dims
        self._meshes, self.default_group = _meshes_for(dims, self.device.type)

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
