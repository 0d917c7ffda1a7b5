"""The device that a candidate trains on: which it is, its process group, its clock and its memory."""

from __future__ import annotations

import itertools
import os
import time
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.settings import Settings


def missing(accelerator: str) -> str | None:
    """Why nothing can be measured on this kind of device here, in a sentence; None if something can."""
    if accelerator == "cpu" or torch.accelerator.is_available():
        return None
    return "accelerator='gpu' needs a device, and torch finds none here. Use --accelerator cpu."


def use_device(settings: Settings) -> torch.device:
    """This rank's device, made the current one."""
    if settings.accelerator == "cpu":
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator()
    assert found is not None  # The command has asked missing().
    device = torch.device(found.type, int(os.environ.get("LOCAL_RANK", "0")))
    torch.accelerator.set_device_index(device.index)
    return device


def init_group(settings: Settings) -> torch.device:
    """Make the default process group on the backend that the device has, and return the device."""
    device = use_device(settings)
    backend = dist.get_default_backend_for_device(device)
    chosen = None if device.type == "cpu" else device
    dist.init_process_group(backend, timeout=timedelta(minutes=10), device_id=chosen)
    return device


def autocast(settings: Settings, device: torch.device) -> AbstractContextManager[Any]:
    """What the forward of a loop by hand runs under: what ``Trainer(precision=)`` runs a step under."""
    if settings.precision == "32-true":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def moved(batch: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    """A batch on the device; from pinned memory without waiting for the copy, as Lightning does it."""
    return tuple(part.to(device, non_blocking=device.type != "cpu") for part in batch)


class Clock:
    """Takes times between steps: the host's on CPU, and the device's own where the host runs ahead of it.

    Args:
        accelerator: ``"cpu"`` or ``"gpu"``.
    """

    def __init__(self, accelerator: str) -> None:
        self._module: ModuleType | None = None if accelerator == "cpu" else torch.get_device_module()
        self._stamps: list[Any] = []

    @property
    def device_name(self) -> str | None:
        """As the device calls itself, None on CPU."""
        return None if self._module is None else str(self._module.get_device_name())

    def start(self) -> None:
        """Begin a round: wait for the device, forget its peak of memory, take the first time."""
        if self._module is not None:
            self._module.synchronize()
            self._module.reset_peak_memory_stats()
        self._stamps = []
        self.stamp()

    def stamp(self) -> None:
        """Take a time; nothing waits for it."""
        if self._module is None:
            self._stamps.append(time.perf_counter())
            return
        event = self._module.Event(enable_timing=True)
        event.record()
        self._stamps.append(event)

    def stop(self) -> list[float]:
        """End a round: take the last time, wait for the device; seconds of each step."""
        self.stamp()
        if self._module is not None:
            self._module.synchronize()
            return [one.elapsed_time(two) / 1e3 for one, two in itertools.pairwise(self._stamps)]
        return [two - one for one, two in itertools.pairwise(self._stamps)]

    def memory(self) -> dict[str, int | None]:
        """The most bytes of the device's memory in tensors, and kept by the allocator, since :meth:`start`."""
        if self._module is None:
            return {"device_peak": None, "device_reserved": None}
        return {
            "device_peak": self._module.max_memory_allocated(),
            "device_reserved": self._module.max_memory_reserved(),
        }

    def make_room(self) -> None:
        """Give the memory that is cached back, for the candidate whose turn is next."""
        if self._module is not None:
            self._module.empty_cache()
