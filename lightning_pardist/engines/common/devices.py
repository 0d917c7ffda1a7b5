"""What is asked of a device, whichever accelerator it is: its random numbers, and to have done its work."""

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

#: Kinds of devices without random numbers of their own beside the host's.
_WITHOUT_GENERATOR = ("cpu", "meta")


@dataclass(frozen=True)
class RandomState:
    """Where a process' random number generators are.

    Attributes:
        host: torch's on the host.
        own: That of a device, if it has one of its own.
        numpy: numpy's global one.
        python: That of Python's ``random``.
    """

    host: Tensor
    own: Tensor | None
    numpy: Any
    python: Any


def device_in_use() -> torch.device:
    """The accelerator that this process computes on by now, the host if it uses none.

    One that is there and was not touched is left alone: asking it would take memory of it, and fails in a forked child.
    """
    found = torch.accelerator.current_accelerator()
    if found is None:
        return torch.device("cpu")
    module = torch.get_device_module(found)
    if not getattr(module, "is_initialized", module.is_available)():
        return torch.device("cpu")
    return torch.device(found.type, torch.accelerator.current_device_index())


def device_of_mesh(mesh: DeviceMesh) -> torch.device:
    """The device that this rank has in a mesh."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def rank_devices() -> list[torch.device]:
    """Accelerators of this host, one for each of its ranks; none where torch has nothing that ranks could talk through.

    Leaves them untouched.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    backends = dist.Backend.default_device_backend_map
    if found is None or backends.get(found.type, dist.Backend.GLOO) == dist.Backend.GLOO:
        return []
    return [torch.device(found.type, index) for index in range(torch.accelerator.device_count())]


def device_of_rank(local_rank: int) -> torch.device:
    """The accelerator of a rank, current from now on; the host where there is none for it."""
    known = rank_devices()
    if local_rank >= len(known):
        return torch.device("cpu")
    torch.accelerator.set_device_index(local_rank)
    return known[local_rank]


def has_generator(device: torch.device) -> bool:
    """Whether a device draws random numbers of its own."""
    return device.type not in _WITHOUT_GENERATOR


def generator_state(device: torch.device) -> Tensor:
    """The state of a device's generator, in host memory. Does not wait for the device."""
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_generator_state(state: Tensor, device: torch.device) -> None:
    """The inverse of :func:`generator_state`."""
    torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def torch_seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside torch draws from a seed, on the host and on a current device; afterwards as if nothing was drawn."""
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
    """Let torch's, numpy's and Python's random numbers begin anew.

    Args:
        seed: Of 32 bits.
        device: Current device.
    """
    _seed_torch(seed, device)
    np.random.seed(seed)
    random.seed(seed)


def random_state(device: torch.device) -> RandomState:
    """Of torch, on the host and on the device if it has random numbers of its own, of numpy and of Python."""
    own = generator_state(device) if has_generator(device) else None
    return RandomState(torch.get_rng_state(), own, np.random.get_state(), random.getstate())


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Go on from there."""
    torch.set_rng_state(state.host)
    if state.own is not None:
        set_generator_state(state.own, device)
    np.random.set_state(state.numpy)
    random.setstate(state.python)


def is_same_state(one: RandomState, other: RandomState) -> bool:
    """Whether nothing was drawn between two states of one device."""
    if not torch.equal(one.host, other.host) or (one.own is None) != (other.own is None):
        return False
    if one.own is not None and other.own is not None and not torch.equal(one.own, other.own):
        return False
    same_numpy = all(np.array_equal(here, there) for here, there in zip(one.numpy, other.numpy, strict=True))
    return same_numpy and bool(one.python == other.python)


@contextmanager
def random_stays(device: torch.device) -> Iterator[None]:
    """What is drawn inside is drawn again afterwards."""
    before = random_state(device)
    try:
        yield
    finally:
        set_random_state(before, device)


def numbers_on(device: torch.device, numbers: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of the host as a tensor on a device, which nobody waits for."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=has_generator(device)).to(device, non_blocking=True)


def number_on(device: torch.device, value: Tensor | float, dtype: torch.dtype) -> Tensor:
    """A number, of the host or a device, as a tensor on a device, which nobody waits for unless it is the host."""
    if isinstance(value, Tensor):
        return value.to(device, dtype, non_blocking=has_generator(device))
    return torch.full((), value, dtype=dtype, device=device)


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was given; at once on the host."""
    if device.type not in _WITHOUT_GENERATOR:
        torch.accelerator.synchronize(device)
