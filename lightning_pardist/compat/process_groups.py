"""Process groups: the store behind the default one, and how long collectives wait."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from lightning_pardist.compat.contract import Private

if TYPE_CHECKING:
    # torch.distributed has them without saying so to type checkers.
    from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
else:
    from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

__all__ = [
    "FileStore",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "default_store",
    "device_types",
    "timeout_of",
]

NAMES = (
    Private("torch.distributed.distributed_c10d._get_default_store", "agreeing without a collective",
            "keep the store that init_process_group is given"),
    Private("torch.distributed.ProcessGroup._get_backend", "waiting as long as the user's collectives do",
            "use torch's default timeout"),
    Private("torch.distributed.ProcessGroup.Options._timeout", "waiting as long as the user's collectives do",
            "use torch's default timeout", on_instances=True),
    Private("torch.distributed.ProcessGroup._device_types", "telling whether a group works on the host",
            "read dist.get_backend_config()"),
)  # fmt: skip


def default_store() -> Store:
    """The store that the default group was made with. It must be initialized."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long the group's collectives wait for a rank."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    return getattr(options, "_timeout", default_pg_timeout)


def device_types(group: dist.ProcessGroup) -> list[torch.device]:
    """Kinds of devices whose tensors a group exchanges."""
    return list(group._device_types)
