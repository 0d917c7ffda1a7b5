"""Detection of the cluster environment that a process is part of."""

from __future__ import annotations

import os

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.lsf import LSFEnvironment

from lightning_pardist.runtime.environments.external import ExternalEnvironment
from lightning_pardist.runtime.environments.launched import launcher_pid
from lightning_pardist.runtime.environments.manual import ManualEnvironment
from lightning_pardist.runtime.environments.mpi import MPIEnvironment
from lightning_pardist.runtime.environments.slurm import SLURMEnvironment, SLURMShellEnvironment
from lightning_pardist.runtime.environments.torchrun import TorchrunEnvironment
from lightning_pardist.runtime.rendezvous import RendezvousEndpoint


def find() -> ClusterEnvironment:
    """Return the environment of this process, according to the launcher that started it last.

    torchrun comes first, since it may run inside SLURM and under MPI. ``mpirun`` inside a SLURM job starts its ranks
    through a step of its own, so its variables take precedence over SLURM's; ``srun --mpi=`` sets some of them as well,
    and then SLURM's variables hold more information.

    Returns:
        An environment of this package, or Lightning's if a process starts its own ranks.
    """
    if launcher_pid() is not None:
        # A rank that another rank started, with a copy of its environment variables.
        return LightningEnvironment()
    if TorchrunEnvironment.detect():
        return TorchrunEnvironment()
    if MPIEnvironment.detect() and MPIEnvironment.is_mpirun():
        return MPIEnvironment()
    if SLURMEnvironment.detect():
        return SLURMEnvironment()
    for kind in (MPIEnvironment, LSFEnvironment, ManualEnvironment):
        if kind.detect():
            return kind()
    return SLURMShellEnvironment() if SLURMShellEnvironment.detect() else LightningEnvironment()


def rendezvous_endpoint(environment: ClusterEnvironment) -> RendezvousEndpoint:
    """Return the rendezvous endpoint of any environment, including Lightning's own and third-party ones."""
    if isinstance(environment, ExternalEnvironment):
        return environment.rendezvous_endpoint()
    return RendezvousEndpoint(address=environment.main_address, ports=(environment.main_port,))


def describe(environment: ClusterEnvironment) -> str:
    """Return a readable description of how an environment was detected."""
    if isinstance(environment, ExternalEnvironment | SLURMShellEnvironment):
        return environment.describe()
    if launcher_pid() is not None:
        return "started by the first rank of this host"
    if "LOCAL_RANK" in os.environ:
        return f"told by LOCAL_RANK={os.environ['LOCAL_RANK']}"
    return "no launcher: this process starts its own ranks"
