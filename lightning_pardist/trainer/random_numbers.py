"""Continues the script's random number state in a run, as a single process does, and detects draws."""

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


def sync_random_state(batch_rank: int, *, group: dist.ProcessGroup) -> None:
    """Continue with the random state of the script, synchronised across the ranks that need equal states. Collective.

    Lightning's ``ddp`` re-seeds here, since scripts may have drawn more numbers on one rank than on others. A single
    process does not: numbers drawn since ``seed_everything``, for the module's weights for example, are not drawn again
    for the order of samples. So no seed is set; if states differ, each rank takes the state of the first rank that has
    the same seed or the same samples.

    Args:
        batch_rank: Index of this rank's share of the samples: equal on ranks with the same samples, which need equal
            states also without a seed.
        group: Ranks that begin the run together.
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


def random_fingerprint(module: nn.Module) -> int:
    """Return a fingerprint of the random state, including generators of the module, that changes with every draw."""
    return _fingerprint((rng_state(), states_of(generators_of(module))))


def random_draws_message(what: str, how: str) -> str:
    """Return the log message on random numbers that differ from those of a single process.

    Args:
        what: The code that draws them in each step.
        how: Which rank draws for which samples.
    """
    return (
        f"{what} draws random numbers (dropout, sampling, augmentation), {how}: they have the distribution of a single"
        " process's numbers, but not the same values."
    )


def _fingerprint(state: Any) -> int:
    result = 0
    for leaf in pytree.tree_leaves(state):
        said = leaf.numpy().tobytes() if isinstance(leaf, torch.Tensor) else repr(leaf).encode()
        result = zlib.crc32(said, result)
    return result
