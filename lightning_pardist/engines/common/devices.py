"""What is asked of a device, whichever accelerator it is: its random numbers, and to have done its work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

#: Kinds of devices without random numbers of their own beside the host's.
_WITHOUT_GENERATOR = ("cpu", "meta")

RandomState = tuple[Tensor, Tensor | None, torch.device]


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


def seed_generator(seed: int, device: torch.device) -> None:
    """Let the random numbers of the host, and of a current device that has its own, begin anew."""
    torch.default_generator.manual_seed(seed)
    if has_generator(device):
        torch.get_device_module(device).manual_seed(seed)


def random_state(device: torch.device) -> RandomState:
    """Of the host, and of the device if it has random numbers of its own."""
    return torch.get_rng_state(), generator_state(device) if has_generator(device) else None, device


def set_random_state(state: RandomState) -> None:
    """Go on from there."""
    host, own, device = state
    torch.set_rng_state(host)
    if own is not None:
        set_generator_state(own, device)


def is_same_state(one: RandomState, other: RandomState) -> bool:
    """Whether nothing was drawn between two states of one device."""
    (host, own, _), (other_host, other_own, _) = one, other
    if not torch.equal(host, other_host) or (own is None) != (other_own is None):
        return False
    return own is None or other_own is None or torch.equal(own, other_own)


@contextmanager
def random_stays(device: torch.device) -> Iterator[None]:
    """What is drawn inside is drawn again afterwards."""
    before = random_state(device)
    try:
        yield
    finally:
        set_random_state(before)


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
