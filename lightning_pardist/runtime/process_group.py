"""The default process group and its store."""

from __future__ import annotations

import atexit
import functools
import gc
import hashlib
import itertools
import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from lightning_pardist.collectives import forget_abandoned
from lightning_pardist.compat.process_groups import HashStore, PrefixStore, Store, default_store
from lightning_pardist.runtime.rendezvous import RendezvousEndpoint, interface_towards, open_store

_store: Store | None = None
_RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
_generation = itertools.count()


def job_store() -> Store:
    """Return the key-value store that all ranks of the job share.

    Raises:
        RuntimeError: Before :func:`init_process_group`.
    """
    if _store is None:
        raise RuntimeError("The job's store exists once the process group does; call init_process_group first.")
    return _store


def check_backend(setting: str | None) -> None:
    """Check that a backend is known to torch. Not collective.

    Args:
        setting: A backend such as ``"gloo"``, or one per device type (``"cpu:gloo,cuda:nccl"``); None is always valid.

    Raises:
        ValueError: If it is unknown, with the available backends.
    """
    known = dist.Backend.backend_list
    for each in (setting or "").split(","):
        backend = each.rpartition(":")[2].strip().lower()
        if backend and backend not in known:
            raise ValueError(
                f"process_group_backend={setting!r} is not a backend that torch knows."
                f" Use one of {', '.join(name for name in known if name != 'undefined')}, 'cpu:gloo,cuda:nccl', or"
                " None to choose by device."
            )


def default_backend(device: torch.device) -> str:
    """Return torch's default backend for a device, combined with gloo for tensors in host memory."""
    own = dist.get_default_backend_for_device(device)
    return own if own == dist.Backend.GLOO else f"cpu:{dist.Backend.GLOO},{device.type}:{own}"


def init_process_group(
    backend: str | None,
    *,
    rank: int,
    world_size: int,
    meeting: RendezvousEndpoint,
    device: torch.device,
    timeout: timedelta,
    store: Store | None = None,
) -> None:
    """Create the default process group, unless it exists. Collective over the world.

    The store outlives the group: a group that is created again, after a failure that all ranks survived, needs no new
    port and does not read the previous group's keys.

    Args:
        backend: Backend as torch takes it; None chooses by ``device``.
        rank: Global rank of this process.
        world_size: Number of ranks.
        meeting: Rendezvous endpoint of the ranks.
        device: Device of this rank's tensors.
        timeout: Bound on every wait in a collective.
        store: The job's store, if the ranks are already connected to one.

    Raises:
        RuntimeError: If a group exists with another rank or another number of ranks.
        TimeoutError: If ranks do not find each other, with the address and what to check.
    """
    global _store
    _protect_forked_children()
    backend = backend or default_backend(device)
    # Used by NCCL only. torch takes a bound device as permission to split groups, which gloo does not support.
    device_id = device if device.type == "cuda" and "nccl" in backend else None
    if dist.is_initialized():
        if dist.get_world_size() != world_size or dist.get_rank() != rank:
            raise RuntimeError(
                f"A process group with rank {dist.get_rank()} of {dist.get_world_size()} exists already, but the"
                f" Trainer needs rank {rank} of {world_size}. Destroy it first, or set devices and num_nodes to match."
            )
        if world_size > 1 and dist.get_backend() != "fake":
            _store = _store or default_store()
            name_interface(meeting)
        return
    if world_size == 1:
        # No rendezvous: no port, no environment variable, and destroy_single_rank_group() leaves no trace.
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, device_id=device_id)
        return
    if _store is None:
        # Ranks may start minutes apart (a cold file system, a queue), however short the timeout of collectives is.
        wait = max(timeout, _RENDEZVOUS_TIMEOUT)
        _store = store or open_store(meeting, rank=rank, world_size=world_size, timeout=wait)
        atexit.register(_destroy)
        _wait_for_all_ranks(_store, world_size, wait)
    name_interface(meeting)
    dist.init_process_group(
        backend,
        store=PrefixStore(f"pardist/group/{next(_generation)}", _store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device_id,
    )


_INTERFACE = "GLOO_SOCKET_IFNAME"
_named_interface = False


def name_interface(meeting: RendezvousEndpoint) -> None:
    """Set the network interface that leads to the other ranks for gloo, until :func:`forget_interface`.

    By default gloo resolves its own host's name, which may stand for another network, or for loopback only.
    """
    global _named_interface
    if _INTERFACE not in os.environ and (interface := interface_towards(meeting)) is not None:
        os.environ[_INTERFACE] = interface
        _named_interface = True


def forget_interface() -> None:
    """Restore the environment variable that :func:`name_interface` has set."""
    global _named_interface
    if _named_interface:
        os.environ.pop(_INTERFACE, None)
        _named_interface = False


@functools.cache
def _protect_forked_children() -> None:
    """Keep forked children (workers of a loader, for example) from garbage-collecting objects that they inherit.

    The destructor of a gloo group waits for its threads, which a child does not have: if it collected the group of an
    earlier run, the child would hang in the middle of its work.
    """
    os.register_at_fork(after_in_child=gc.freeze)


def _wait_for_all_ranks(store: Store, world_size: int, timeout: timedelta) -> None:
    """Wait until every rank has opened the store, so that the group's shorter timeout starts on all ranks together.

    Raises:
        TimeoutError: If some ranks do not arrive, with the number that did.
    """
    arrived = store.add("pardist/arrived", 1)
    if arrived == world_size:
        store.set("pardist/everybody", "")
    try:
        store.wait(["pardist/everybody"], timeout)
    except dist.DistStoreError as error:
        arrived = store.add("pardist/arrived", 0)
        raise TimeoutError(
            f"{arrived} of {world_size} ranks connected within {timeout.total_seconds():.0f} s. Check in the other"
            " ranks' output why they did not start, or whether they were started at all."
        ) from error


def destroy_single_rank_group() -> None:
    """Destroy the default group if it has one rank. A larger one lives as long as the process.

    Scripts use it after training, and the next run needs it again.
    """
    if dist.is_initialized() and dist.get_world_size() == 1:
        dist.destroy_process_group()


def verify_same_module(module: nn.Module, *, group: dist.ProcessGroup, constants: Sequence[str] = ()) -> None:
    """Check that a module is built equally on all ranks. Collective over ``group``.

    Args:
        module: The module.
        group: The participating ranks.
        constants: Descriptions of other tensors that are not sent, so that they must have equal values.

    Raises:
        RuntimeError: On every rank if it is not, naming the first tensor that differs from the first rank's.
    """
    if group.size() == 1:
        return
    lines = [
        f"{name} {tuple(param.shape)} {param.dtype}{'' if param.requires_grad else ' frozen'}"
        for name, param in module.named_parameters()
    ]
    lines += constants
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    digests: list[str] = [""] * group.size()
    dist.all_gather_object(digests, digest, group=group)
    if len(set(digests)) == 1:
        return
    # Only if the digests differ, since large models have long lists.
    everything: list[list[str]] = [[] for _ in range(group.size())]
    dist.all_gather_object(everything, lines, group=group)
    other = next(rank for rank, found in enumerate(digests) if found != digests[0])
    here, there = everything[0], everything[other]
    index = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there)))
    first, second = (lines[index] if index < len(lines) else "nothing" for lines in (here, there))
    raise RuntimeError(
        f"The module differs between ranks: at tensor {index} rank 0 has {first!r}, rank {other} has {second!r}."
        " Build it alike on every rank (same arguments, no choice that depends on the rank)."
    )


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_abandoned()
