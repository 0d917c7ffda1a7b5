"""Which cluster a process is part of, and telling a Trainer so."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_pardist.engines.rendezvous import MeetingPoint
from lightning_pardist.environments.external import ExternalEnvironment
from lightning_pardist.environments.launched import launcher_pid
from lightning_pardist.environments.manual import ManualEnvironment
from lightning_pardist.environments.mpi import MPIEnvironment
from lightning_pardist.environments.slurm import SLURMEnvironment, SLURMShellEnvironment
from lightning_pardist.environments.torchrun import TorchrunEnvironment


def find() -> ClusterEnvironment:
    """The environment of this process, by what started it last.

    torchrun comes first, since it may run inside SLURM and under MPI. ``mpirun`` inside a SLURM job starts its ranks
    through a step of its own, so that its variables count before SLURM's; ``srun --mpi=`` sets some of them as well,
    and there SLURM knows more.

    Returns:
        One of this package's, or Lightning's where a process starts its own ranks.
    """
    if launcher_pid() is not None:
        # A rank that another rank started, with a copy of the variables that were there.
        return LightningEnvironment()
    if TorchrunEnvironment.detect():
        return TorchrunEnvironment()
    if MPIEnvironment.detect() and MPIEnvironment.was_mpirun():
        return MPIEnvironment()
    if SLURMEnvironment.detect():
        return SLURMEnvironment()
    for kind in (MPIEnvironment, LSFEnvironment, ManualEnvironment):
        if kind.detect():
            return kind()
    return SLURMShellEnvironment() if SLURMShellEnvironment.detect() else LightningEnvironment()


def meeting_point(environment: ClusterEnvironment) -> MeetingPoint:
    """Where ranks of any environment meet, Lightning's own and other people's among them."""
    if isinstance(environment, ExternalEnvironment):
        return environment.meeting_point()
    return MeetingPoint(address=environment.main_address, ports=(environment.main_port,))


def describe(environment: ClusterEnvironment) -> str:
    """What an environment was found by, for a person."""
    if isinstance(environment, ExternalEnvironment | SLURMShellEnvironment):
        return environment.describe()
    if launcher_pid() is not None:
        return "started by the first rank of this host"
    if "LOCAL_RANK" in os.environ:
        return f"told by LOCAL_RANK={os.environ['LOCAL_RANK']}"
    return "no launcher: this process starts its own ranks"


def choose_for(is_ours: Callable[[Any], bool]) -> None:
    """Let every Trainer with a strategy of ours use :func:`find` where no environment was given to it.

    Lightning makes its own environment before it makes a strategy that was chosen by name, and its own SLURM class
    refuses ``--ntasks`` there. Strategies that are not ours see no difference.

    Args:
        is_ours: Whether ``Trainer(strategy=...)``, lower-cased if a name, is one of ours.
    """
    choose = _AcceleratorConnector._choose_and_init_cluster_environment
    choose = getattr(choose, "__wrapped__", choose)

    @wraps(choose)
    def choose_or_find(connector: _AcceleratorConnector) -> ClusterEnvironment:
        given = connector._cluster_environment_flag
        if isinstance(given, ClusterEnvironment) or not is_ours(connector._strategy_flag):
            return choose(connector)
        return find()

    _AcceleratorConnector._choose_and_init_cluster_environment = choose_or_find  # type: ignore[method-assign, assignment]
