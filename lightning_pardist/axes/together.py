"""What happens on one rank only, before training, known to all: the others would wait for it until a timeout."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist


def raise_together(failure: Exception | None, elsewhere: Callable[[str], Exception] = RuntimeError) -> None:
    """Raise on all ranks what happened on one. Collective over the world.

    Args:
        failure: What happened here, if anything.
        elsewhere: Makes the exception of the other ranks from what they are to be told.

    Raises:
        Exception: This rank's own failure; on others that of the first rank that has one, in words.
    """
    said = None if failure is None else f"{type(failure).__name__}: {failure}"
    everybody: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, said)
    if failure is not None:
        raise failure
    for rank, other in enumerate(everybody):
        if other is not None:
            raise elsewhere(f"On rank {rank}: {other}")
