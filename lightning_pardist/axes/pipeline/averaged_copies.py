"""Copies of the module that callbacks hold (weight averages), reduced on each pipeline rank to its stages."""

from __future__ import annotations

import functools
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pardist.axes.module_copies import copies_of
from lightning_pardist.collectives import irecv, isend
from lightning_pardist.compat import pytree
from lightning_pardist.engines.pipeline.placement import Placement


def placements_of_copies(trainer: pl.Trainer, own: Placement) -> list[Placement]:
    """Return placements of the copies' parameters, equal to the module's. Not collective.

    Args:
        trainer: The Trainer whose callbacks hold copies.
        own: Placement of the module.
    """
    copies = copies_of(own.module, trainer.callbacks)  # type: ignore[attr-defined]
    return [Placement(copied, own.plan, own.stage_ranks, own.rank, own.group) for copied in copies]


def free_copy(placement: Placement) -> None:
    """Free other ranks' parameters of a copy, and make its ``to(device)`` skip them. Not collective."""
    placement.free()
    copied = placement.module
    # StochasticWeightAveraging moves its copy to a device when it starts; `meta` tensors must stay where they are.
    copied.__dict__["to"] = functools.partial(_move_held, copied)


def restore_copy(placement: Placement) -> None:
    """Undo :func:`free_copy`: restore the full copy on every rank. Collective over the pipeline."""
    placement.module.__dict__.pop("to", None)
    placement.restore()


@torch.no_grad()
def _move_held(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    for parameter in module.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.to(*args, **kwargs)
    for each in module.modules():
        for name, buffer in each.named_buffers(recurse=False):
            if not buffer.is_meta:
                setattr(each, name, buffer.to(*args, **kwargs))
    return module


def gather_values(tree: Any, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Gather values that ranks hold for their own stages only, such as state dicts of copies, on the first rank.

    Collective over the pipeline.

    Args:
        tree: Nested containers. Tensors of other ranks are on ``meta``, under the same key path as there. Trees of
            ranks may differ otherwise.
        group: Process group of the pipeline.
        device: Device for sending and receiving tensors.

    Returns:
        The tree; on the first rank with values for all tensors that any rank holds.
    """
    pairs, spec = pytree.tree_flatten_with_path(tree)
    leaves = [leaf for _, leaf in pairs]
    missing = [pytree.keystr(path) for path, leaf in pairs if isinstance(leaf, Tensor) and leaf.is_meta]
    wanted: list[Any] = [missing]
    dist.broadcast_object_list(wanted, src=dist.get_global_rank(group, 0), group=group)
    if not wanted[0]:
        return tree
    places = {pytree.keystr(path): index for index, (path, leaf) in enumerate(pairs) if isinstance(leaf, Tensor)}
    held = {place for place in wanted[0] if place in places and place not in missing}
    everybody: list[set[str]] = [set() for _ in range(group.size())]
    dist.all_gather_object(everybody, held, group=group)
    for place in wanted[0]:
        holder = next((rank for rank, has in enumerate(everybody) if place in has), None)
        if holder == group.rank():
            tensor = leaves[places[place]].detach().to(device).contiguous()
            isend(tensor, 0, group=group).wait()
        elif holder is not None and group.rank() == 0:
            leaf = leaves[places[place]]
            received = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
            irecv(received, holder, group=group).wait()
            leaves[places[place]] = received
    return pytree.tree_unflatten(leaves, spec)
