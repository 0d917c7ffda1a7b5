"""Facts that one process sees of cluster, host and libraries, as plain data."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment

from lightning_pardist.engines.common.devices import rank_devices
from lightning_pardist.runtime.environments.external import ExternalEnvironment, check_address
from lightning_pardist.runtime.environments.find import describe, rendezvous_endpoint
from lightning_pardist.runtime.environments.mpi import unconnected_mpi_hint
from lightning_pardist.runtime.rendezvous import RendezvousEndpoint, interface_address, interface_towards

_PACKAGES = ("torch", "lightning", "lightning_pardist", "torchmetrics", "numpy")


@dataclass(frozen=True)
class Facts:
    """One rank's view of cluster, host and libraries.

    Attributes:
        rank: Global rank.
        local_rank: Index on its host.
        node_rank: Index of its host.
        world_size: Number of ranks, according to this rank's environment.
        host: Host name.
        address: Address of the interface that leads to the other ranks; empty if it is unknown.
        interface: Name of that interface.
        environment: Name of the cluster environment class.
        why: The variables by which it was detected.
        meeting: Address and port of the rendezvous.
        device: Device that the rank would train on.
        device_id: Identifier that distinguishes the device from others on the host.
        cores: CPU cores that this process may use.
        threads: Threads that torch would use.
        versions: Versions of Python and of packages.
        problems: Reasons why training could not start.
        warnings: Conditions that will harm training.
    """

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    host: str
    address: str
    interface: str
    environment: str
    why: str
    meeting: str
    device: str
    device_id: str
    cores: int
    threads: int
    versions: dict[str, str]
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def gather_facts(environment: ClusterEnvironment) -> tuple[Facts, RendezvousEndpoint | None]:
    """Collect the facts of this process. Not collective, and does not wait for other ranks.

    Returns:
        The facts and the rendezvous endpoint; the latter is None if it is among the problems.
    """
    problems: list[str] = []
    meeting: RendezvousEndpoint | None = None
    rank, local_rank, node_rank, world_size = 0, 0, 0, 1
    try:
        rank, local_rank = environment.global_rank(), environment.local_rank()
        node_rank, world_size = environment.node_rank(), environment.world_size()
        meeting = rendezvous_endpoint(environment)
        if meeting.path is None:
            check_address(meeting.address, source="the launcher", is_first=rank == 0 and not meeting.hosted)
    except (RuntimeError, ValueError) as error:
        problems.append(str(error))
        meeting = None
    interface = interface_towards(meeting) if meeting is not None else None
    device, device_id = _device(local_rank)
    facts = Facts(
        rank=rank,
        local_rank=local_rank,
        node_rank=node_rank,
        world_size=world_size,
        host=socket.gethostname(),
        address=interface_address(interface) or "",
        interface=interface or "",
        environment=type(environment).__name__,
        why=describe(environment),
        meeting=_where(meeting),
        device=device,
        device_id=device_id,
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        versions={"python": platform.python_version(), **_versions()},
        problems=problems,
        warnings=_warnings(environment, local_rank),
    )
    return facts, meeting


def _where(meeting: RendezvousEndpoint | None) -> str:
    if meeting is None:
        return "?"
    return meeting.path or f"{meeting.address}:{'/'.join(map(str, meeting.ports[:1]))}"


def _device(local_rank: int) -> tuple[str, str]:
    known = rank_devices()
    if not known:
        return "cpu", ""
    if local_rank >= len(known):
        return f"none: {len(known)} GPU(s) visible, local rank {local_rank}", ""
    properties: Any = torch.get_device_module(known[local_rank]).get_device_properties(local_rank)
    return f"{known[local_rank]} {properties.name}", str(getattr(properties, "uuid", local_rank))


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def _warnings(environment: ClusterEnvironment, local_rank: int) -> list[str]:
    found = []
    if torch.cuda.is_available() and not dist.is_nccl_available():
        found.append("torch was built without NCCL: GPUs would talk through gloo. Install a CUDA build of torch.")
    if local_rank >= len(rank_devices()) > 0:
        found.append("there are more ranks than GPUs on this host. Start fewer, or set accelerator='cpu'.")
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0)
    if restarts > 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        found.append(
            "torchrun --max-restarts shares one store between restarts, and can hang where a host is lost. Start"
            " torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment."
        )
    if (lonely := unconnected_mpi_hint()) is not None:
        found.append(f"{lonely}. Set MPI4PY_MPIABI to the MPI whose mpirun is used.")
    if isinstance(environment, ExternalEnvironment) and os.environ.get("GLOO_SOCKET_IFNAME"):
        found.append(f"GLOO_SOCKET_IFNAME={os.environ['GLOO_SOCKET_IFNAME']} is set and is used on every host.")
    return found
