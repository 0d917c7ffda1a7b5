"""MPI environment: ranks started by ``mpirun`` or ``mpiexec``. Needs only its variables, not the MPI library."""

from __future__ import annotations

import os
import re
import socket
import sys
import zlib
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from lightning_pardist.runtime.environments.external import (
    ExternalEnvironment,
    candidate_ports,
    check_address,
    chosen_address,
    chosen_port,
)
from lightning_pardist.runtime.rendezvous import RendezvousEndpoint

_LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class _Names:
    """Environment variables of one launcher; of each tuple, the first variable that is set is used."""

    launcher: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    job: tuple[str, ...]


_OPEN_MPI = _Names(
    "Open MPI's mpirun",
    ("OMPI_COMM_WORLD_RANK",),
    ("OMPI_COMM_WORLD_SIZE",),
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
_MPICH = _Names(
    "MPICH's mpiexec",
    ("PMI_RANK",),
    ("PMI_SIZE",),
    ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ("PMI_JOBID", "PMI_ID"),
)
_PMIX = _Names(
    "a PMIx launcher",
    ("PMIX_RANK",),
    ("PMIX_SIZE", "PMIX_UNIV_SIZE"),
    ("PMIX_LOCAL_RANK",),
    ("PMIX_LOCAL_SIZE",),
    ("PMIX_NAMESPACE",),
)


class MPIEnvironment(ExternalEnvironment):
    """Environment of an MPI job: Open MPI, MPICH and its relatives, or another launcher that supports PMI or PMIx.

    A job on several hosts needs rank 0's host: from ``MASTER_ADDR``, from what Open MPI passes on, or over mpi4py if
    the script has imported it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._meeting: RendezvousEndpoint | None = None

    @staticmethod
    @override
    def detect() -> bool:
        """Return whether an MPI launcher started this process as one of several ranks."""
        names = _names()
        return names is not None and _read(names.size) is not None

    @staticmethod
    def is_mpirun() -> bool:
        """Return whether the launcher is ``mpirun`` or ``mpiexec``; ``srun --mpi=`` sets some of the variables too."""
        return any(name in os.environ for name in ("OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID"))

    @override
    def describe(self) -> str:
        names = self._names
        found = [name for group in (names.rank, names.size, names.local_rank, names.local_size) for name in group]
        return f"{names.launcher} ({', '.join(f'{name}={os.environ[name]}' for name in found if name in os.environ)})"

    @property
    def _names(self) -> _Names:
        names = _names()
        if names is None:
            raise RuntimeError(
                "MPIEnvironment was given, but no MPI launcher started this process: OMPI_COMM_WORLD_RANK, PMI_RANK and"
                " PMIX_RANK are not set. Start the script by `mpirun -np N python ...`."
            )
        return names

    def _number(self, kind: str, default: int | None = None) -> int:
        names = self._names
        value = _read(getattr(names, kind))
        if value is None:
            value = default
        if value is None:
            raise RuntimeError(
                f"{names.launcher} does not say this process' {kind.replace('_', ' ')}: none of"
                f" {', '.join(getattr(names, kind))} is set. Set {getattr(names, kind)[0]} for every rank."
            )
        return value

    @override
    def world_size(self) -> int:
        return self._number("size")

    @override
    def global_rank(self) -> int:
        return self._number("rank")

    @override
    def local_rank(self) -> int:
        return self._number("local_rank", default=0 if self.world_size() == 1 else None)

    def _local_size(self) -> int:
        return self._number("local_size", default=self.world_size())

    @override
    def node_rank(self) -> int:
        """Return the host's index by count: launchers fill one host after the other by default."""
        return (self.global_rank() - self.local_rank()) // max(1, self._local_size())

    @override
    def rendezvous_endpoint(self) -> RendezvousEndpoint:
        if self._meeting is None:
            job = self._job()
            port = chosen_port()
            ports = candidate_ports(zlib.crc32(job.encode()) % 100_000, 0) if port is None else (port,)
            self._meeting = RendezvousEndpoint(address=self._address(), ports=ports, token=f"mpi {job}")
        return self._meeting

    def _job(self) -> str:
        for name in self._names.job:
            if os.environ.get(name):
                return os.environ[name]
        # A single launcher process per host starts the ranks there.
        return f"ppid {os.getppid()}" if self._local_size() == self.world_size() else "mpi"

    def _address(self) -> str:
        if address := chosen_address():
            return address
        if self._local_size() == self.world_size():
            return "127.0.0.1"
        if (communicator := _communicator()) is not None and communicator.Get_size() == self.world_size():
            return str(communicator.bcast(socket.gethostname(), root=0))
        if address := _head_node():
            return address
        raise ValueError(
            f"{self._names.launcher} runs {self.world_size()} ranks on several hosts and does not say which one is rank"
            " 0's. Pass it: `mpirun -x MASTER_ADDR=HOST ...` (Open MPI) or `mpiexec -env MASTER_ADDR HOST ...` (MPICH)."
        )

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Check the Trainer's numbers against those of the MPI job.

        Raises:
            ValueError: If they differ, with what was set, what was found and the line to change.
        """
        size, here = self.world_size(), self._local_size()
        communicator = _communicator()
        if communicator is not None and communicator.Get_size() != size:
            raise ValueError(
                f"{self._names.launcher} started {size} ranks, but mpi4py sees {communicator.Get_size()}: it was built"
                " for another MPI, and every rank would train alone. Set MPI4PY_MPIABI=mpich (or openmpi) to the one"
                " whose mpirun is used, or do not import mpi4py."
            )
        if num_devices != here or num_devices * num_nodes < size:
            nodes = -(-size // here)
            raise ValueError(
                f"Trainer(devices={num_devices}, num_nodes={num_nodes}), but {self._names.launcher} started {size}"
                f" ranks, {here} of them on this host. Set devices={here}, num_nodes={nodes}, or"
                f" `mpirun -np {num_devices * num_nodes}`."
            )
        source = "MASTER_ADDR" if chosen_address() else "mpirun"
        check_address(self.rendezvous_endpoint().address, source=source, is_first=self.global_rank() == 0)


def unconnected_mpi_hint() -> str | None:
    """Return why a process that is alone according to mpi4py may be one of many ranks; None if nothing indicates it."""
    communicator = _communicator()
    if communicator is None or communicator.Get_size() > 1:
        return None
    names = _names()
    size = _read(names.size) if names is not None else None
    if size is None or size == 1:
        return None
    return f"mpi4py sees 1 rank where {names.launcher if names else 'mpirun'} started {size}"


def _names() -> _Names | None:
    return next((names for names in (_OPEN_MPI, _MPICH, _PMIX) if _read(names.rank) is not None), None)


def _read(names: tuple[str, ...]) -> int | None:
    values = (os.environ.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdigit()), None)


def _communicator() -> Any | None:
    """Return mpi4py's world communicator if the script has initialized MPI; importing mpi4py would initialize it."""
    module = sys.modules.get("mpi4py.MPI")
    return module.COMM_WORLD if module is not None and module.Is_initialized() else None


def _head_node() -> str | None:
    """Return the host of ``mpirun`` from Open MPI's variable: rank 0's, if the job fills hosts in order from there."""
    text = os.environ.get("OMPI_MCA_orte_hnp_uri", "")  # noqa: SIM112  (Open MPI's spelling)
    hosts = re.findall(r"tcp4?://([^:;]+):", text)
    found = [host for group in hosts for host in group.split(",") if host not in _LOCAL_HOSTS]
    return found[0] if found else None
