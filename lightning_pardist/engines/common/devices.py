"""Device-agnostic helpers: device selection, random number generators, non-blocking copies and synchronization."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

#: Device types without a generator of their own; they use the host's.
_WITHOUT_GENERATOR = ("cpu", "meta")


@dataclass(frozen=True)
class RandomState:
    """States of a process' random number generators.

    Attributes:
        host: torch's CPU generator.
        own: The device's generator; None if it has none of its own.
        numpy: numpy's global generator.
        python: Python's ``random``.
    """

    host: Tensor
    own: Tensor | None
    numpy: Any
    python: Any


def device_in_use() -> torch.device:
    """Return the accelerator that this process has initialized; the CPU if there is none.

    An uninitialized accelerator is not queried: that would allocate memory on it, and fails in a forked child.
    """
    found = torch.accelerator.current_accelerator()
    if found is None:
        return torch.device("cpu")
    module = torch.get_device_module(found)
    if not getattr(module, "is_initialized", module.is_available)():
        return torch.device("cpu")
    return torch.device(found.type, torch.accelerator.current_device_index())


def device_of_mesh(mesh: DeviceMesh) -> torch.device:
    """Return this rank's device in a mesh."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def rank_devices() -> list[torch.device]:
    """Return the accelerators of this host, one per local rank; empty if torch has no collective backend for them.

    Does not initialize them.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    backends = dist.Backend.default_device_backend_map
    if found is None or backends.get(found.type, dist.Backend.GLOO) == dist.Backend.GLOO:
        return []
    return [torch.device(found.type, index) for index in range(torch.accelerator.device_count())]


def device_of_rank(local_rank: int) -> torch.device:
    """Return the accelerator of a local rank and make it the current device; the CPU if there is none for it."""
    known = rank_devices()
    if local_rank >= len(known):
        return torch.device("cpu")
    torch.accelerator.set_device_index(local_rank)
    return known[local_rank]


def has_generator(device: torch.device) -> bool:
    """Return whether a device has a random number generator of its own."""
    return device.type not in _WITHOUT_GENERATOR


def generator_state(device: torch.device) -> Tensor:
    """Return the state of a device's generator, in host memory. Does not wait for the device."""
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_generator_state(state: Tensor, device: torch.device) -> None:
    """Set the state of a device's generator, as returned by :func:`generator_state`."""
    torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def torch_seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators of the host and of a current device inside; restore their states on exit."""
    host, own = torch.get_rng_state(), generator_state(device) if has_generator(device) else None
    try:
        _seed_torch(seed, device)
        yield
    finally:
        torch.set_rng_state(host)
        if own is not None:
            set_generator_state(own, device)


def _seed_torch(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)
    if has_generator(device):
        torch.get_device_module(device).manual_seed(seed)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed torch's, numpy's and Python's generators.

    Args:
        seed: Seed of 32 bits.
        device: Current device.
    """
    _seed_torch(seed, device)
    np.random.seed(seed)
    random.seed(seed)


def random_state(device: torch.device) -> RandomState:
    """Return the states of torch's generators (host, and device if it has its own), numpy's and Python's."""
    own = generator_state(device) if has_generator(device) else None
    return RandomState(torch.get_rng_state(), own, np.random.get_state(), random.getstate())


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Restore states returned by :func:`random_state`."""
    torch.set_rng_state(state.host)
    if state.own is not None:
        set_generator_state(state.own, device)
    np.random.set_state(state.numpy)
    random.setstate(state.python)


def is_same_state(one: RandomState, other: RandomState) -> bool:
    """Return whether two states of one device are equal, so that nothing was drawn between them."""
    if not torch.equal(one.host, other.host) or (one.own is None) != (other.own is None):
        return False
    if one.own is not None and other.own is not None and not torch.equal(one.own, other.own):
        return False
    same_numpy = all(np.array_equal(here, there) for here, there in zip(one.numpy, other.numpy, strict=True))
    return same_numpy and bool(one.python == other.python)


@contextmanager
def preserve_random_state(device: torch.device) -> Iterator[None]:
    """Restore all random states on exit, so that draws inside are repeated afterwards."""
    before = random_state(device)
    try:
        yield
    finally:
        set_random_state(before, device)


def numbers_on(device: torch.device, numbers: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers of the host as a tensor on a device, by a non-blocking copy from pinned memory."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=has_generator(device)).to(device, non_blocking=True)


def number_on(device: torch.device, value: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return a number or scalar tensor as a tensor on a device; non-blocking unless the target is the host."""
    if isinstance(value, Tensor):
        return value.to(device, dtype, non_blocking=has_generator(device))
    return torch.full((), value, dtype=dtype, device=device)


def synchronize(device: torch.device) -> None:
    """Wait for all queued work of a device; returns immediately for the host."""
    if device.type not in _WITHOUT_GENERATOR:
        torch.accelerator.synchronize(device)
