"""Device of a candidate: selection, process group, clock and memory."""

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
    """Return why nothing can be measured on this accelerator here, as a sentence; None if it can."""
    if accelerator == "cpu" or torch.accelerator.is_available():
        return None
    return "accelerator='gpu' needs a device, and torch finds none here. Use --accelerator cpu."


def use_device(settings: Settings) -> torch.device:
    """Return this rank's device after making it the current one."""
    if settings.accelerator == "cpu":
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator()
    assert found is not None  # the command has already called missing()
    device = torch.device(found.type, int(os.environ.get("LOCAL_RANK", "0")))
    torch.accelerator.set_device_index(device.index)
    return device


def init_group(settings: Settings) -> torch.device:
    """Create the default process group on the device's default backend, and return the device."""
    device = use_device(settings)
    backend = dist.get_default_backend_for_device(device)
    chosen = None if device.type == "cpu" else device
    dist.init_process_group(backend, timeout=timedelta(minutes=10), device_id=chosen)
    return device


def autocast(settings: Settings, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a hand-written loop's forward, the same as that of ``Trainer(precision=)``."""
    if settings.precision == "32-true":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def moved(batch: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Copy a batch to the device; asynchronously from pinned memory, as Lightning does."""
    return tuple(part.to(device, non_blocking=device.type != "cpu") for part in batch)


class Clock:
    """Timer of steps: the host's clock on CPU, device events on an accelerator, where the host runs ahead.

    Args:
        accelerator: ``"cpu"`` or ``"gpu"``.
    """

    def __init__(self, accelerator: str) -> None:
        self._module: ModuleType | None = None if accelerator == "cpu" else torch.get_device_module()
        self._stamps: list[Any] = []

    @property
    def device_name(self) -> str | None:
        """Name of the device as reported by torch, None on CPU."""
        return None if self._module is None else str(self._module.get_device_name())

    def start(self) -> None:
        """Begin a round: synchronize the device, reset its peak memory statistics, record the first time."""
        if self._module is not None:
            self._module.synchronize()
            self._module.reset_peak_memory_stats()
        self._stamps = []
        self.stamp()

    def stamp(self) -> None:
        """Record a time without synchronization."""
        if self._module is None:
            self._stamps.append(time.perf_counter())
            return
        event = self._module.Event(enable_timing=True)
        event.record()
        self._stamps.append(event)

    def stop(self) -> list[float]:
        """End a round: record the last time, synchronize the device, and return the seconds of each step."""
        self.stamp()
        if self._module is not None:
            self._module.synchronize()
            return [one.elapsed_time(two) / 1e3 for one, two in itertools.pairwise(self._stamps)]
        return [two - one for one, two in itertools.pairwise(self._stamps)]

    def memory(self) -> dict[str, int | None]:
        """Return the device's peak bytes in tensors and peak bytes reserved by the allocator since :meth:`start`."""
        if self._module is None:
            return {"device_peak": None, "device_reserved": None}
        return {
            "device_peak": self._module.max_memory_allocated(),
            "device_reserved": self._module.max_memory_reserved(),
        }

    def make_room(self) -> None:
        """Release the allocator's cached memory for the next candidate's turn."""
        if self._module is not None:
            self._module.empty_cache()
