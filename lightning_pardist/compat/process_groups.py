"""Process groups: the store of the default group, and timeouts of collectives."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from lightning_pardist.compat.contract import Private

if TYPE_CHECKING:
    # torch.distributed exports these without type stubs.
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
    """Return the store that the default process group was created with. The group must be initialized."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of the group's collectives."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    return getattr(options, "_timeout", default_pg_timeout)


def device_types(group: dist.ProcessGroup) -> list[torch.device]:
    """Return the device types whose tensors a group can exchange."""
    return list(group._device_types)
