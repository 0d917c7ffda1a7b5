"""Environment for ranks that are started one by one, with explicit rank and rendezvous."""

from __future__ import annotations

import os
from urllib.parse import urlparse

from typing_extensions import override

from lightning_pardist.runtime.environments.external import ExternalEnvironment, check_address, required
from lightning_pardist.runtime.rendezvous import RendezvousEndpoint


class ManualEnvironment(ExternalEnvironment):
    """Environment of a process with an explicit rank and rendezvous address.

    ``Trainer(strategy="pardist_ddp", plugins=[ManualEnvironment("tcp://host1:29500", rank=3, world_size=8)])``. Without
    arguments it reads ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, as some schedulers set them.

    Args:
        url: ``tcp://HOST:PORT``, host and port of rank 0, or ``file:///PATH``, a file on a file system that all ranks
            share, in a directory that exists.
        rank: Number of this process.
        world_size: Number of processes.
        local_rank: Number of this process on its host: the index of its device.

    Raises:
        ValueError: If the URL is of another form, or a number is missing or out of range.
    """

    def __init__(
        self,
        url: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        local_rank: int | None = None,
    ) -> None:
        super().__init__()
        launcher = "whoever starts ranks by hand"
        self._rank = required("RANK", launcher) if rank is None else rank
        self._world_size = required("WORLD_SIZE", launcher) if world_size is None else world_size
        if not 0 <= self._rank < self._world_size:
            raise ValueError(f"rank={self._rank} is not one of world_size={self._world_size}. Count ranks from 0.")
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0")) if local_rank is None else local_rank
        if url is None:
            url = f"tcp://{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{required('MASTER_PORT', launcher)}"
        self.url = url
        parsed = urlparse(url)
        if parsed.scheme == "file" and parsed.path and not parsed.netloc:
            self._meeting = RendezvousEndpoint(path=parsed.path)
        elif parsed.scheme == "tcp" and parsed.hostname and parsed.port:
            self._meeting = RendezvousEndpoint(address=parsed.hostname, ports=(parsed.port,), token="manual")
        else:
            raise ValueError(f"url={url!r} is not a place to meet. Use 'tcp://HOST:PORT' or 'file:///PATH'.")

    @staticmethod
    @override
    def detect() -> bool:
        """Return whether a scheduler set this process's rank and rank 0's address, and it is not a local child."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if not all(os.environ.get(name) for name in names) or "LOCAL_RANK" in os.environ:
            return False
        return os.environ["WORLD_SIZE"] != "1"

    @override
    def describe(self) -> str:
        return f"told by hand or by a scheduler (rank {self._rank} of {self._world_size}, meeting at {self.url})"

    @override
    def world_size(self) -> int:
        return self._world_size

    @override
    def global_rank(self) -> int:
        return self._rank

    @override
    def local_rank(self) -> int:
        return self._local_rank

    @override
    def node_rank(self) -> int:
        return int(os.environ.get("NODE_RANK", self._rank if self._local_rank == 0 else 0))

    @override
    def rendezvous_endpoint(self) -> RendezvousEndpoint:
        return self._meeting

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Check the Trainer's numbers against the given ones.

        Raises:
            ValueError: If they differ, with what was set, what was found and the line to change.
        """
        if num_devices * num_nodes != self._world_size:
            raise ValueError(
                f"Trainer(devices={num_devices}, num_nodes={num_nodes}) makes {num_devices * num_nodes} ranks, but"
                f" world_size={self._world_size} was given for this process. Set devices and num_nodes to match."
            )
        if self._meeting.path is not None:
            folder = os.path.dirname(self._meeting.path)
            if not os.path.isdir(folder):
                raise ValueError(
                    f"url={self.url!r}: the folder {folder} does not exist here. Make it, on a shared disk."
                )
        else:
            check_address(self._meeting.address, source=f"url={self.url!r}", is_first=self._rank == 0)
