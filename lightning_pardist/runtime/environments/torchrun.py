"""torchrun environment: an agent on each host starts the ranks, and may restart them."""

from __future__ import annotations

import os
import re
import socket
import warnings
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from typing_extensions import override

from lightning_pardist.runtime.environments.external import ExternalEnvironment, check_address, required
from lightning_pardist.runtime.rendezvous import RendezvousEndpoint


class TorchrunEnvironment(ExternalEnvironment):
    """Environment of ranks started by ``torchrun``: static or c10d rendezvous, one or several hosts, elastic or not."""

    @staticmethod
    @override
    def detect() -> bool:
        """Return whether torchrun started this process."""
        return dist.is_available() and dist.is_torchelastic_launched()

    @override
    def describe(self) -> str:
        names = ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
        return f"torchrun ({', '.join(f'{name}={os.environ[name]}' for name in names if name in os.environ)})"

    @override
    def world_size(self) -> int:
        return required("WORLD_SIZE", "torchrun")

    @override
    def global_rank(self) -> int:
        return required("RANK", "torchrun")

    @override
    def local_rank(self) -> int:
        return required("LOCAL_RANK", "torchrun")

    @override
    def node_rank(self) -> int:
        return int(os.environ.get("GROUP_RANK", "0"))

    @override
    def rendezvous_endpoint(self) -> RendezvousEndpoint:
        hosted, one_host = _agent_holds_store(), self.num_nodes() == 1
        address = os.environ.get("MASTER_ADDR") if hosted or not one_host else None
        port = required("MASTER_PORT", "torchrun")
        token = f"torchrun {os.environ.get('TORCHELASTIC_RUN_ID')}"
        return RendezvousEndpoint(address or "127.0.0.1", (port,), token=token, hosted=hosted, one_host=one_host)

    def num_nodes(self) -> int:
        """Return the number of agents that take part."""
        groups = os.environ.get("GROUP_WORLD_SIZE")
        return int(groups) if groups else max(1, self.world_size() // self._local_world_size())

    def _local_world_size(self) -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE") or self.world_size())

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Check the Trainer's numbers against torchrun's. An elastic job may have fewer hosts, with a warning.

        Raises:
            ValueError: If they differ, with what was set, what was found and the line to change.
        """
        here, nodes = self._local_world_size(), self.num_nodes()
        if num_devices != here:
            raise ValueError(
                f"Trainer(devices={num_devices}), but torchrun started {here} rank(s) on this host. Set"
                f" devices={here}, or `torchrun --nproc-per-node={num_devices}`."
            )
        shrinks = nodes < num_nodes and _is_elastic()
        if nodes != num_nodes and not shrinks:
            hint = f", or --nnodes=1:{num_nodes} where hosts may come and go" if nodes < num_nodes else ""
            raise ValueError(
                f"Trainer(num_nodes={num_nodes}), but torchrun runs on {nodes} host(s). Set num_nodes={nodes}, or"
                f" `torchrun --nnodes={num_nodes}`{hint}."
            )
        if shrinks and self.global_rank() == 0:
            warnings.warn(
                f"Trainer(num_nodes={num_nodes}), but torchrun runs on {nodes} host(s): training goes on with"
                f" {self.world_size()} ranks, and the global batch is smaller by as much, unless the callback"
                " GlobalBatchSize keeps it.",
                stacklevel=2,
            )
        point = self.rendezvous_endpoint()
        check_address(point.address, source="torchrun's MASTER_ADDR", is_first=False)

    @property
    @override
    def restart_count(self) -> int:
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    @property
    @override
    def starter(self) -> str | None:
        """This host's agent. Starting ranks again because hosts have come or gone does not count as a restart."""
        try:
            began = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
        except OSError:
            return None
        return f"{socket.gethostname()} {os.getppid()} {began}"

    @property
    @override
    def job_key(self) -> str | None:
        return f"torchrun-{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}"


def _is_elastic() -> bool:
    """Return whether the agent was started for a range of hosts, by its option or by its variable."""
    given = f"--nnodes={os.environ.get('PET_NNODES', '')}"
    with suppress(OSError):
        given += "\0" + Path(f"/proc/{os.getppid()}/cmdline").read_text()
    ranges = re.findall(r"--nnodes[=\0](\d+):(\d+)", given)
    return any(int(least) < int(most) for least, most in ranges)


def _agent_holds_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
