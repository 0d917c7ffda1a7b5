"""Ranks of a job that take no part in its collectives: the others are the world, and each of them one by itself.

Everything that asks torch for the world (Lightning, user code, this package) then finds the ranks that train: samplers,
logged values, meshes and checkpoints need not know that there are more. What the ranks have to say to those apart goes
over a group of its own.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta

import torch.distributed as dist

from lightning_pardist.collectives import world_group
from lightning_pardist.compat.default_group import number_groups_from, show_as_default

#: Messages wait for as long as both sides live; those who wait for an answer have the user's bound.
_WHILE_THEY_LIVE = timedelta(days=30)
#: Groups that a run is thought to make at most.
_GROUPS_OF_A_RUN = 100_000

#: The group of all ranks, while a part of them stands for it.
_whole: dist.ProcessGroup | None = None
_groups: dict[tuple[dist.ProcessGroup, int, int], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
_starts: dict[tuple[dist.ProcessGroup, tuple[int, ...]], dist.ProcessGroup] = {}
_times = 0


def set_apart(number: int, *, worlds: int = 1, timeout: timedelta) -> dist.ProcessGroup:
    """Let the last ranks be worlds of one rank, and all others the world, until :func:`make_whole`.

    Collective over all ranks, the first time with these numbers.

    Args:
        number: Of ranks that are set apart.
        worlds: How many worlds of equal size the others make.
        timeout: For the collectives of the others.

    Returns:
        A gloo group of all ranks, for messages alone.
    """
    global _whole
    _whole = whole = world_group()
    if (whole, number, worlds) not in _groups:
        first, rank = whole.size() - number, whole.rank()
        size = first // worlds
        parts = [list(range(at, at + size)) for at in range(0, first, size)]
        parts += [[each] for each in range(first, whole.size())]
        made = [dist.new_group(ranks, timeout=timeout) for ranks in parts]
        own = next(group for ranks, group in zip(parts, made, strict=True) if rank in ranks)
        _groups[whole, number, worlds] = own, dist.new_group(backend="gloo", timeout=_WHILE_THEY_LIVE)
    own, messages = _groups[whole, number, worlds]
    show_as_default(own)
    return messages


def group_of(ranks: Collection[int], *, timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group of some ranks of the job, while a part of them stands for the world. Collective over them alone."""
    if _whole is None:
        raise RuntimeError("No ranks are set apart.")
    key = _whole, tuple(sorted(ranks))
    if key not in _starts:
        own = world_group()
        show_as_default(_whole)
        try:
            _starts[key] = dist.new_group(list(key[1]), backend="gloo", timeout=timeout, use_local_synchronization=True)
        finally:
            show_as_default(own)
    return _starts[key]


def make_whole() -> None:
    """All ranks are the world again, unless they are. Not collective, but all ranks call it at the same place."""
    global _whole, _times
    whole, _whole = _whole, None
    if not dist.is_initialized():
        _groups.clear()
        _starts.clear()
    elif whole is not None:
        _times += 1
        show_as_default(whole)
        number_groups_from(_times * _GROUPS_OF_A_RUN)
