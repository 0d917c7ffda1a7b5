"""A run draws the random numbers that one process would draw in it."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_pardist.compat import pytree
from lightning_pardist.engines.common.own_generators import generators_of, states_of
from lightning_pardist.runtime.environments.program import given_seed
from lightning_pardist.trainer.resumable_loaders import rng_state, set_rng_state


def go_on_drawing(batch_rank: int, *, group: dist.ProcessGroup) -> None:
    """Let every rank go on with the random numbers of its script, alike on ranks that have to be. Collective.

    Lightning's ``ddp`` seeds anew here, since scripts may have drawn more on one rank than on others. One process does
    not: what it has drawn since ``seed_everything``, its module's weights say, it does not draw again for the order of
    its samples. So no seed is set, and where states differ, the first rank's is taken by those that were seeded alike.

    Args:
        batch_rank: Ranks with the same number are given the same samples, and draw alike without a seed as well.
        group: Who begins a run together.
    """
    if group.size() == 1 or dist.get_backend() == "fake":
        return
    seed, state = given_seed(), rng_state()
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, (seed, batch_rank, _fingerprint(state)), group=group)
    if len({print_of for _, _, print_of in found}) == 1:
        return
    states: list[Any] = [None] * len(found)
    dist.all_gather_object(states, state, group=group)
    for (other, batch, _), drawn in zip(found, states, strict=True):
        if batch == batch_rank or (seed is not None and other == seed):
            set_rng_state(drawn)
            return


def draws(module: nn.Module) -> int:
    """A number that is another one after random numbers were drawn, by generators of the module too."""
    return _fingerprint((rng_state(), states_of(generators_of(module))))


def drawn_apart(what: str, how: str) -> str:
    """A line for the log about random numbers that one process would draw otherwise.

    Args:
        what: Runs in each step, and draws them.
        how: Who draws for what.
    """
    return (
        f"{what} draws random numbers (dropout, sampling, augmentation), {how}: they are distributed as those of one"
        " process, and are not the same numbers."
    )


def _fingerprint(state: Any) -> int:
    result = 0
    for leaf in pytree.tree_leaves(state):
        said = leaf.numpy().tobytes() if isinstance(leaf, torch.Tensor) else repr(leaf).encode()
        result = zlib.crc32(said, result)
    return result
