"""Ranks of a job that do not train: the training ranks become the default group, and each other rank a world of one.

All code that uses the default group (Lightning, user code, this package) then sees only the ranks that train:
samplers, logged values, meshes and checkpoints need no special case. Messages between both kinds of ranks go over a
separate group.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta

import torch.distributed as dist

from lightning_pardist.collectives import world_group
from lightning_pardist.compat.default_group import number_groups_from, show_as_default

#: Messages may take as long as both sides live; waits for a reply are bounded by the user's timeout.
_WHILE_THEY_LIVE = timedelta(days=30)
#: Upper bound assumed for the number of groups that a run creates.
_GROUPS_OF_A_RUN = 100_000

#: The group of all ranks, while a part of them is the default group.
_all_ranks: dist.ProcessGroup | None = None
_groups: dict[tuple[dist.ProcessGroup, int, int], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
_starts: dict[tuple[dist.ProcessGroup, tuple[int, ...]], dist.ProcessGroup] = {}
_times = 0


def isolate_ranks(number: int, *, worlds: int = 1, timeout: timedelta) -> dist.ProcessGroup:
    """Make each of the last ranks a world of its own, and all others the world, until :func:`restore_world`.

    Collective over all ranks, on the first call with these numbers.

    Args:
        number: Number of ranks that are isolated.
        worlds: Number of worlds of equal size that the other ranks form.
        timeout: Timeout of the collectives of the other ranks.

    Returns:
        A gloo group of all ranks, for messages only.
    """
    global _all_ranks
    _all_ranks = whole = world_group()
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
    """Return a gloo group of some ranks of the job, while ranks are isolated. Collective over these ranks only."""
    if _all_ranks is None:
        raise RuntimeError("No ranks are isolated.")
    key = _all_ranks, tuple(sorted(ranks))
    if key not in _starts:
        own = world_group()
        show_as_default(_all_ranks)
        try:
            _starts[key] = dist.new_group(list(key[1]), backend="gloo", timeout=timeout, use_local_synchronization=True)
        finally:
            show_as_default(own)
    return _starts[key]


def restore_world() -> None:
    """Restore the world of all ranks, if some are isolated.

    Not collective, but all ranks call it at the same place in the program.
    """
    global _all_ranks, _times
    whole, _all_ranks = _all_ranks, None
    if not dist.is_initialized():
        _groups.clear()
        _starts.clear()
    elif whole is not None:
        _times += 1
        show_as_default(whole)
        number_groups_from(_times * _GROUPS_OF_A_RUN)
