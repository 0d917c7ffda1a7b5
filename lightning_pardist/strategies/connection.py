"""What connects a rank with the others of its job: process group, watchdog and mesh."""

from __future__ import annotations

import itertools
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_pardist.engines.process_group import destroy_alone, init_process_group, job_store, world_group
from lightning_pardist.engines.watchdog import Watchdog
from lightning_pardist.environments.find import meeting_point
from lightning_pardist.mesh import ParallelDims
from lightning_pardist.strategies.launchers import children

if TYPE_CHECKING:
    from lightning_pardist.strategies.base import PardistStrategy

#: Runs of a Trainer in this process: equal on all ranks, because they run the same program.
_runs = itertools.count()


class Connection:
    """A rank's connection with the others, from :meth:`open` at the start of a run to :meth:`close` at its end.

    Mesh and groups stay after the end, since checkpoints may be saved then.

    Args:
        strategy: Whose ranks.

    Attributes:
        run: Number of the run, equal on all ranks.
        watchdog: Ends this rank when another one fails. None on one rank, before a run, and when this rank's part of it
            is done.
    """

    def __init__(self, strategy: PardistStrategy) -> None:
        self.strategy = strategy
        self.run = 0
        self.watchdog: Watchdog | None = None
        self._owns_group = False
        self._mesh: DeviceMesh | None = None
        self._data_group: dist.ProcessGroup | None = None

    @property
    def mesh(self) -> DeviceMesh:
        """The job's mesh.

        Raises:
            RuntimeError: Before :meth:`open`, that is before ``configure_model``.
        """
        if self._mesh is None:
            raise RuntimeError("The device mesh exists once ranks are connected: use it in configure_model or later.")
        return self._mesh

    @property
    def data_group(self) -> dist.ProcessGroup:
        """This rank's group along the data axes.

        Raises:
            RuntimeError: Before :meth:`open`, that is before ``configure_model``.
        """
        if self._data_group is None:
            raise RuntimeError("Process groups exist once ranks are connected: use them in configure_model or later.")
        return self._data_group

    def open(self) -> None:
        """Meet the other ranks, and watch each other from then on. Collective over the world.

        Raises:
            RuntimeError: If the strategy has no cluster environment yet, or a process group of other ranks exists.
            TimeoutError: If ranks do not find each other.
        """
        strategy = self.strategy
        if strategy.cluster_environment is None:
            raise RuntimeError("The strategy has no cluster environment; construct a Trainer with it first.")
        self._owns_group = not dist.is_initialized()
        init_process_group(
            strategy.process_group_backend,
            rank=strategy.global_rank,
            world_size=strategy.world_size,
            meeting=meeting_point(strategy.cluster_environment),
            device=strategy.root_device,
            timeout=timedelta(seconds=strategy.timeout_s),
        )
        self.run = next(_runs)
        if strategy.world_size > 1:
            self.watchdog = Watchdog(
                job_store(),
                rank=strategy.global_rank,
                world_size=strategy.world_size,
                run=self.run,
                heartbeat_timeout_s=strategy.heartbeat_timeout_s,
                on_exit=partial(children.end, 0.0),
            )
            self.watchdog.start()
            children.report_to(self.watchdog.blame)
        self._mesh, data_mesh = _meshes_for(strategy.dims, strategy.root_device.type)
        self._data_group = data_mesh.get_group()

    def stop_watchdog(self) -> None:
        """This rank's work is done; its silence means nothing from now on. Not collective."""
        if self.watchdog is not None:
            self.watchdog.stop()
            self.watchdog = None

    def close(self) -> None:
        """The run has ended on this rank. Not collective: a group of several ranks lives as long as the process."""
        self.stop_watchdog()
        if self._owns_group:
            destroy_alone()
            _forget_past_meshes()


#: Meshes over the default process group of this moment, each with the one of its data axes.
_meshes: dict[tuple[ParallelDims, str], tuple[DeviceMesh, DeviceMesh]] = {}
_meshes_world: dist.ProcessGroup | None = None


def _meshes_for(dims: ParallelDims, device_type: str) -> tuple[DeviceMesh, DeviceMesh]:
    """One mesh for all runs with these degrees: each new one would leave process groups and their threads behind."""
    global _meshes_world
    _forget_past_meshes()
    _meshes_world = world_group()
    if (dims, device_type) not in _meshes:
        _meshes[dims, device_type] = dims.build(device_type)
    return _meshes[dims, device_type]


def _forget_past_meshes() -> None:
    """Let go of a destroyed group in the process that made it: in a child by fork its destructor would hang."""
    global _meshes_world
    if not dist.is_initialized() or _meshes_world is not world_group():
        _meshes.clear()
        _meshes_world = None
