"""Propagation of one rank's failure during setup to all ranks, which would otherwise wait for it until a timeout."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist


def raise_on_all_ranks(failure: Exception | None, elsewhere: Callable[[str], Exception] = RuntimeError) -> None:
    """Raise on all ranks if one rank has failed. Collective over the world.

    Args:
        failure: This rank's exception, if any.
        elsewhere: Creates the exception for the other ranks from the message.

    Raises:
        Exception: This rank's own failure; on ranks without one, the message of the first failed rank.
    """
    said = None if failure is None else f"{type(failure).__name__}: {failure}"
    everybody: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, said)
    if failure is not None:
        raise failure
    for rank, other in enumerate(everybody):
        if other is not None:
            raise elsewhere(f"On rank {rank}: {other}")
