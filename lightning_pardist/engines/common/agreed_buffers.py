"""Synchronise the set of a module's buffers across ranks, so that buffers registered at run time can be broadcast."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pardist.compat.modules import non_persistent_buffers
from lightning_pardist.local_tensors import is_dense, local_shard


@dataclass(frozen=True)
class AgreedBuffer:
    """A buffer that is allocated on every rank of the group.

    Attributes:
        name: Fully qualified name in the module.
        source: Rank in the group whose values are broadcast.
        tensor: This rank's buffer, to be sent or written to; for a DTensor its local part is used.
        is_everywhere: Whether all ranks held it before, with this shape and dtype.
    """

    name: str
    source: int
    tensor: Tensor
    is_everywhere: bool


@dataclass(frozen=True)
class _Described:
    """Properties of a buffer that must match across ranks before its values can be sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_persistent: bool


def agree_on_buffers(
    module: nn.Module,
    *,
    group: dist.ProcessGroup | None,
    source_of: Callable[[str], int] = lambda name: 0,
    left_alone: set[str] | None = None,
) -> list[AgreedBuffer]:
    """Allocate on every rank the buffers that any rank holds. Collective over ``group``; values are not sent.

    A forward may register or replace buffers, and ranks may run different branches or pipeline stages. A buffer that is
    missing on a rank, or differs there from the source in shape or dtype, is allocated uninitialized. Sparse buffers
    are not among them: strategies verify that they are equal.

    Args:
        module: The same on every rank except for its buffers. A buffer on ``meta`` counts as missing, and stays on
            ``meta``.
        group: The participating ranks; None for the default group.
        source_of: Maps a name to the rank in the group whose values are used; the first rank that holds the buffer if
            that rank does not.
        left_alone: If given, names are added of buffers that ranks hold with different shapes or dtypes, such as masks
            for each rank's batch. Every rank then keeps its own, and they are not among those returned.

    Returns:
        All buffers, in the same order on all ranks.
    """
    buffers = module.named_buffers(remove_duplicate=False)
    own = {name: buffer for name, buffer in buffers if is_dense(buffer)}
    described = {name: _describe(module, name, buffer) for name, buffer in own.items() if not buffer.is_meta}
    if _all_same(described, group):
        return [AgreedBuffer(name, source_of(name), own[name], True) for name in described]
    everybody: list[dict[str, _Described]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everybody, described, group=group)
    devices = (tensor.device for tensor in (*own.values(), *module.parameters()) if not tensor.is_meta)
    device = next(devices, torch.device("cpu"))
    agreed = []
    for name in sorted(set().union(*everybody)):
        holders = [rank for rank, of_rank in enumerate(everybody) if name in of_rank]
        if left_alone is not None and len({everybody[rank][name] for rank in holders}) > 1:
            left_alone.add(name)
            continue
        source = source_of(name) if source_of(name) in holders else holders[0]
        wanted = everybody[source][name]
        tensor = own.get(name)
        if described.get(name) != wanted or tensor is None:
            made = torch.empty(wanted.shape, dtype=wanted.dtype, device=device)
            if tensor is None or not tensor.is_meta:
                _register(module, name, made, wanted.is_persistent)
            tensor = made
        is_everywhere = all(of_rank.get(name) == wanted for of_rank in everybody)
        agreed.append(AgreedBuffer(name, source, tensor, is_everywhere))
    return agreed


def _describe(module: nn.Module, name: str, buffer: Tensor) -> _Described:
    owner, _, last = name.rpartition(".")
    local = local_shard(buffer)
    is_persistent = last not in non_persistent_buffers(module.get_submodule(owner))
    return _Described(tuple(local.shape), local.dtype, is_persistent)


def _all_same(described: dict[str, _Described], group: dist.ProcessGroup | None) -> bool:
    digest = hashlib.sha256(repr(list(described.items())).encode()).digest()
    everybody: list[bytes] = [b""] * dist.get_world_size(group)
    dist.all_gather_object(everybody, digest, group=group)
    return len(set(everybody)) == 1


def _register(module: nn.Module, name: str, buffer: Tensor, is_persistent: bool) -> None:
    owner, _, last = name.rpartition(".")
    # The submodule may not exist on this rank.
    with suppress(AttributeError):
        module.get_submodule(owner).register_buffer(last, buffer, persistent=is_persistent)
