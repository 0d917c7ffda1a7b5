"""Base of environments whose launcher starts the ranks."""

from __future__ import annotations

import os
import socket
from abc import abstractmethod
from contextlib import suppress

from lightning.fabric.plugins import ClusterEnvironment
from typing_extensions import override

from lightning_pardist.runtime.rendezvous import RendezvousEndpoint

#: Ports to choose from for a job's first rank: below the range from which systems assign ports themselves.
_FIRST_PORT, _NUM_PORTS = 15000, 17000
_NUM_CANDIDATES = 4


class ExternalEnvironment(ClusterEnvironment):
    """A cluster whose launcher numbers the ranks; Lightning's settings are checked against it."""

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_port(self) -> int:
        return self.rendezvous_endpoint().ports[0]

    @property
    @override
    def main_address(self) -> str:
        return self.rendezvous_endpoint().address

    @abstractmethod
    def rendezvous_endpoint(self) -> RendezvousEndpoint:
        """Return the rendezvous endpoint of this job; the same on all ranks."""

    @abstractmethod
    def describe(self) -> str:
        """Return a readable description of what was detected: the variables that decided it."""

    @property
    def restart_count(self) -> int:
        """Number of times this job was started before, as far as this rank's host can see."""
        return 0

    @property
    def starter(self) -> str | None:
        """Identity of the process that started this one and may start it again; None if it cannot be identified."""
        return None

    @property
    def job_key(self) -> str | None:
        """Key that this job shares with its own restarts and with no other job; None if there is none."""
        return None

    @override
    def set_world_size(self, size: int) -> None:
        """Ignore the given number: the launcher's applies."""

    @override
    def set_global_rank(self, rank: int) -> None:
        """Ignore the given number: the launcher's applies."""


def required(name: str, launcher: str) -> int:
    """Return an integer variable that a launcher sets.

    Raises:
        RuntimeError: If it is not set, or not an integer.
    """
    value = os.environ.get(name, "")
    if not value.isdigit():
        found = f"{name}={value!r}" if value else f"{name} is not set"
        raise RuntimeError(f"{found}, which {launcher} sets for every rank. Start the script through {launcher}.")
    return int(value)


def chosen_address() -> str | None:
    """Return the first rank's host as the user has set it; None if it is not set."""
    return os.environ.get("MASTER_ADDR") or None


def chosen_port() -> int | None:
    """Return the first rank's port as the user has set it; None if it is not set.

    Raises:
        ValueError: If the value is not a port.
    """
    value = os.environ.get("MASTER_PORT")
    if not value:
        return None
    if not value.isdigit() or not 0 < int(value) < 65536:
        raise ValueError(f"MASTER_PORT={value!r} is not a port. Set it to a number from 1 to 65535, or unset it.")
    return int(value)


def candidate_ports(job: int, step: int) -> tuple[int, ...]:
    """Return candidate ports that differ between steps of one job and between neighbouring jobs.

    Args:
        job: Number of the job. Neighbours often share hosts: the tasks of an array.
        step: Number of the step within the job.
    """
    first = (job * 64 + step) * _NUM_CANDIDATES
    return tuple(_FIRST_PORT + (first + index) % _NUM_PORTS for index in range(_NUM_CANDIDATES))


def check_address(address: str, *, source: str, is_first: bool) -> None:
    """Check that an address is usable, before any rank waits for a connection.

    Args:
        address: Host of the first rank.
        source: Where the address comes from, for the error message.
        is_first: Whether this is the first rank.

    Raises:
        ValueError: If the address does not resolve, or the first rank runs on another host.
    """
    try:
        found = socket.getaddrinfo(address, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(
            f"{source} names {address!r} as the host of rank 0, which {socket.gethostname()} cannot resolve ({error})."
            " Set MASTER_ADDR to an address that every host reaches, or add the name to the hosts file."
        ) from None
    if not is_first or address == socket.gethostname():
        return
    for family, kind, protocol, _, where in found:
        with socket.socket(family, kind, protocol) as probe, suppress(OSError):
            probe.bind((where[0], 0))
            return
    raise ValueError(
        f"{source} names {address!r} as the host of rank 0, but rank 0 runs on {socket.gethostname()}, which does not"
        " have that address. Unset MASTER_ADDR, or set it to rank 0's host."
    )
