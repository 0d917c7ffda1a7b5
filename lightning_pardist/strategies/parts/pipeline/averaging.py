"""Copies of the module that callbacks hold (averages of its weights): each rank of a pipeline has its stages' share."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_pardist.engines.pipeline.placement import Placement
from lightning_pardist.strategies.parts.copies import copies_of


def placements_of_copies(trainer: pl.Trainer, own: Placement) -> list[Placement]:
    """Where the parameters of copies lie: where those of the module do. Not collective.

    Args:
        trainer: Whose callbacks hold copies.
        own: Placement of the module.
    """
    copies = copies_of(own.module, trainer.callbacks)  # type: ignore[attr-defined]
    return [Placement(copied, own.plan, own.stage_ranks, own.rank, own.group) for copied in copies]


def gather_values(tree: Any, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Something that each rank has for its own stages, as state dicts of copies: whole on the first rank. Collective.

    Args:
        tree: Nested containers of the same structure on every rank; what other ranks hold is on ``meta``.
        group: The pipeline's ranks.
        device: Of tensors that travel.

    Returns:
        The tree, on the first rank with values for all that any rank has.
    """
    leaves, spec = pytree.tree_flatten(tree)
    mine = [leaf.is_meta if isinstance(leaf, Tensor) else None for leaf in leaves]
    everybody: list[list[bool | None]] = [[] for _ in range(group.size())]
    dist.all_gather_object(everybody, mine if True in mine else [], group=group)
    if not everybody[0]:
        return tree
    for index, is_missing in enumerate(everybody[0]):
        # A rank that misses nothing has said nothing.
        holders = [rank for rank, has in enumerate(everybody) if not has or has[index] is False]
        if not is_missing or not holders:
            continue
        first, holder = (dist.get_global_rank(group, rank) for rank in (0, holders[0]))
        if group.rank() == holders[0]:
            dist.send(leaves[index].detach().to(device).contiguous(), dst=first, group=group)
        elif group.rank() == 0:
            leaf = leaves[index]
            leaves[index] = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
            dist.recv(leaves[index], src=holder, group=group)
    return pytree.tree_unflatten(leaves, spec)
