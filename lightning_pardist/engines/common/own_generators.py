"""Random number generators stored in module attributes, in addition to the global ones of torch, numpy and Python."""

from __future__ import annotations

import pickle
import random
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


#: Cache by type: every attribute of every module is checked in each step.
_known: dict[type, bool] = {}


def _is_generator(kind: type) -> bool:
    found = _known.get(kind)
    if found is None:
        # SystemRandom has no state.
        found = _known[kind] = issubclass(kind, _KINDS) and not issubclass(kind, random.SystemRandom)
    return found


def generators_of(module: nn.Module) -> list[Any]:
    """Return the generators in attributes of a module and its submodules, each once; other objects are not searched."""
    values = (value for child in module.modules() for value in child.__dict__.values())
    return list({id(value): value for value in values if _is_generator(type(value))}.values())


def state_of(generator: Any) -> Any:
    """Return the state of a generator; None for any other object."""
    if not _is_generator(type(generator)):
        return None
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def set_state(generator: Any, state: Any) -> None:
    """Set the state of a generator, as returned by :func:`state_of`."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def states_of(generators: Sequence[Any]) -> list[Any]:
    """Return the state of each generator."""
    return [state_of(generator) for generator in generators]


def are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether two lists of states are equal, so that nothing was drawn between them."""
    one, other = (
        [state.tolist() if isinstance(state, torch.Tensor) else state for state in states] for states in (some, others)
    )
    return pickle.dumps(one) == pickle.dumps(other)


def seed_all(generators: Sequence[Any], seed: int) -> None:
    """Seed each generator with a different seed, derived from ``seed`` and its index."""
    for index, generator in enumerate(generators):
        own = zlib.crc32(f"{seed}:{index}".encode())
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(own).state
        elif isinstance(generator, np.random.RandomState):
            kind: Any = getattr(np.random, generator.get_state(legacy=False)["bit_generator"])
            generator.set_state(np.random.RandomState(kind(own)).get_state(legacy=False))
        else:
            generator.seed(own)


@contextmanager
def preserve_generators(generators: Sequence[Any]) -> Iterator[None]:
    """Restore the generators' states on exit, so that draws inside are repeated afterwards."""
    before = states_of(generators)
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            set_state(generator, state)
