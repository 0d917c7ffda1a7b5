"""Random numbers that differ between tensor ranks on sharded tensors and are equal on replicated ones.

All tensor ranks run the same program with the same generator state, so dropout on replicated tensors is equal on all of
them. On a split tensor each rank draws from a generator seeded by one number of the common stream plus its rank; the
common stream advances by that one number only. Activation checkpointing restores the common stream, and with it the
seeds, so that the recomputed forward drops the same elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_pardist.engines.common.devices import torch_seeded
from lightning_pardist.engines.tensor.regions import TensorGroup


@contextmanager
def rank_specific_rng(group: TensorGroup, like: Tensor, name: str) -> Iterator[None]:
    """Draw rank-specific random numbers inside the block; the common stream advances equally on all ranks.

    Args:
        group: Tensor ranks.
        like: A tensor on the device whose generator is used.
        name: Plain name of the operator that draws.
    """
    group.drawn.add(name)
    # Drawn from the CPU generator on every device: no synchronization, and checkpointing restores it.
    seed = int(torch.randint(0, 2**62, ()).item()) + group.rank
    with torch_seeded(seed, like.device):
        yield
