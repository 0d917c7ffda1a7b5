"""Copies between a device and pinned host memory, on a separate stream."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopies:
    """Copies tensors asynchronously between device and pinned host memory; plain copies on CPU.

    Args:
        device: Device that is copied from and to.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate flat host memory, pinned for copies from and to a device."""
        return torch.empty(numel, dtype=dtype, pin_memory=self._stream is not None)

    def start(self, source: Tensor, target: Tensor) -> torch.Event | None:
        """Start a copy, after what the current stream has computed so far.

        Args:
            source: Tensor on either side; must not change before the copy has finished, and may be dropped.
            target: Tensor on the other side, same shape.

        Returns:
            Event to wait for before ``target`` is read; None if the copy is already complete.
        """
        if self._stream is None or source.device == target.device:
            target.copy_(source)
            return None
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self._stream:
            target.copy_(source, non_blocking=True)
            on_device = source if source.device.type != "cpu" else target
            on_device.record_stream(self._stream)
            return self._stream.record_event()
