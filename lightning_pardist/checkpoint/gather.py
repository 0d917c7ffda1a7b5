"""Gathering of sharded tensors on the first rank, one at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pardist.checkpoint.chunks import Chunk, Shards, within
from lightning_pardist.checkpoint.coordination import Coordinator, GroupCoordinator
from lightning_pardist.checkpoint.folder import Listed, divide
from lightning_pardist.checkpoint.tensors import (
    Slots,
    merged_aliases,
    model_key,
    model_name,
    module_shards,
    optimizer_keys,
    optimizer_shards,
)
from lightning_pardist.collectives import world_group
from lightning_pardist.compat.modules import copy_metadata
from lightning_pardist.compat.process_groups import device_types


@torch.no_grad()
def assemble(tensors: Mapping[str, Shards], exchange: Coordinator) -> dict[str, Tensor]:
    """Gather tensors on the first rank. Collective over the exchange's group.

    Boxes that the first rank holds are not sent, and a tensor that it holds in full is returned as it is. Every other
    box is sent by one of the ranks that hold it, in an order that is the same on all ranks; a rank copies one box at a
    time.

    Args:
        tensors: This rank's shards by key; keys may differ between ranks.
        exchange: Coordinator of the participating ranks.

    Returns:
        On the first rank full tensors by key, the assembled ones in host memory; an empty dict elsewhere.

    Raises:
        RuntimeError: On every rank, if the shards of a tensor do not cover it.
    """
    listings = exchange.gather({key: Listed.of(held) for key, held in tensors.items()})
    wanted = {key: entry for listed in reversed(listings) for key, entry in listed.items()}
    wanted = {key: wanted[key] for key in sorted(wanted)}
    plan: tuple[list[list[tuple[str, int]]], str | None] = ([], None)
    if exchange.rank == 0:
        try:
            plan = divide(listings, wanted, first_if_it_can=True), None
        except ValueError as error:
            plan = [], str(error)
    shares, wrong = exchange.broadcast(plan)
    if wrong is not None:
        raise RuntimeError(wrong)
    group = _group_of(exchange)
    wire = torch.device("cpu") if group is None else _wire(group)
    if exchange.rank:
        for key, index in shares[exchange.rank]:
            dist.send(tensors[key].parts[index].values.to(wire).contiguous(), group_dst=0, group=group)
        return {}
    boxes: dict[str, list[tuple[int, int]]] = {key: [] for key in wanted}
    for rank, share in enumerate(shares):
        for key, index in share:
            boxes[key].append((rank, index))
    whole: dict[str, Tensor] = {}
    for key, entry in wanted.items():
        own = tensors[key].parts if key in tensors else ()
        if len(own) == 1 and own[0].sizes == entry.shape:
            whole[key] = own[0].values
            continue
        whole[key] = torch.empty(entry.shape, dtype=entry.dtype)
        target = Chunk((0,) * whole[key].dim(), whole[key])
        for rank, index in boxes[key]:
            offsets, sizes = listings[rank][key].boxes[index]
            values = own[index].values if rank == 0 else _received(sizes, entry.dtype, wire, group, rank)
            within(target, offsets, sizes).copy_(values)
    return whole


def assemble_module(own: Mapping[str, Any], exchange: Coordinator, *, like: Mapping[str, Any]) -> dict[str, Any]:
    """Gather a module's state on the first rank. Collective over the exchange.

    Args:
        own: State dict with the entries that this rank contributes; tensors of other ranks are on ``meta``.
        exchange: Coordinator of the participating ranks.
        like: The state dict of this rank, with all names in their order.

    Returns:
        On the first rank the full state dict, followed by entries that only other ranks hold; on the other ranks a
        state dict in which sharded tensors are on ``meta``.
    """
    tensors, aliases, rest = module_shards(own)
    gathered = exchange.gather((aliases, rest))
    aliases = exchange.broadcast(merged_aliases(known for known, _ in gathered))
    whole = assemble({key: held for key, held in tensors.items() if key not in aliases}, exchange)
    for _, of_rank in gathered:
        rest = {**of_rank, **rest}
    state: OrderedDict[str, Any] = OrderedDict()
    later = [name for key in whole if (name := model_name(key)) not in like]
    for name, value in (*like.items(), *((name, whole[model_key(name)]) for name in later)):
        if not isinstance(value, Tensor):
            state[name] = rest.get(name, value)
        elif exchange.rank == 0:
            state[name] = whole[aliases.get(model_key(name), model_key(name))]
        else:
            state[name] = torch.empty_like(value, device="meta") if isinstance(value, DTensor) else value
    copy_metadata(like, state)
    return state


def assemble_optimizer(
    index: int, optimizer: Optimizer, slots: Slots, names: Mapping[Tensor, str], exchange: Coordinator
) -> dict[str, Any]:
    """Gather an optimizer's state on the first rank. Collective over the exchange.

    Args:
        index: Index of the optimizer in the Trainer.
        optimizer: The optimizer.
        slots: Its slots for the user's parameters on this rank.
        names: Names of its parameters in the module.
        exchange: Coordinator of the participating ranks.

    Returns:
        The full state dict on the first rank; elsewhere parameter groups without state.

    Raises:
        RuntimeError: On the first rank, if other ranks hold state of parameters that its optimizer does not have.
    """
    tensors, own = optimizer_shards(index, optimizer, slots, names)
    state = merged_small(exchange.gather(own["small"]))
    whole = assemble(tensors, exchange)
    unknown = set(whole)
    for number, keys in optimizer_keys(index, own, whole).items():
        if keys:
            state.setdefault(number, {}).update({key: whole[full_key] for key, full_key in keys.items()})
            unknown.difference_update(keys.values())
    if unknown:
        # Do not write an incomplete checkpoint silently.
        raise RuntimeError(
            f"{type(optimizer).__name__} has state on other ranks for parameters that this rank does not have:"
            f" {', '.join(sorted(unknown)[:3])}. Give the optimizer the same parameters, with the same names, on"
            " all ranks."
        )
    shared = own.get("shared", {}) if exchange.rank == 0 else {}
    return {"state": {**dict(sorted(state.items())), **shared}, "param_groups": own["param_groups"]}


def merged_small(of_ranks: Iterable[Mapping[int, Mapping[str, Any]]]) -> dict[int, dict[str, Any]]:
    """Merge the ranks' small optimizer values; the first rank that holds a value takes precedence."""
    merged: dict[int, dict[str, Any]] = {}
    for found in of_ranks:
        for number, values in found.items():
            for key, value in values.items():
                merged.setdefault(number, {}).setdefault(key, value)
    return merged


def _received(
    sizes: tuple[int, ...], dtype: torch.dtype, wire: torch.device, group: dist.ProcessGroup | None, rank: int
) -> Tensor:
    values = torch.empty(sizes, dtype=dtype, device=wire)
    dist.recv(values, group_src=rank, group=group)
    return values


def _group_of(exchange: Coordinator) -> dist.ProcessGroup | None:
    if not isinstance(exchange, GroupCoordinator):
        return None
    return exchange.group or world_group()


def _wire(group: dist.ProcessGroup) -> torch.device:
    """Return the device to send from: the host, where gathered tensors are stored, if the group supports it."""
    kinds = [device.type for device in device_types(group)]
    return torch.device("cpu" if "cpu" in kinds or not kinds else kinds[0])
