"""Host copies of a bucket's slice, for optimizer steps on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_pardist.engines.common.fingerprint import bit_sums
from lightning_pardist.engines.offload import HostCopies, StateFile


def low_precision(dtype: torch.dtype) -> bool:
    """Return whether parameters of this dtype are updated in fp32 masters."""
    return dtype in (torch.float16, torch.bfloat16)


def follow(master: Tensor, own: Tensor) -> None:
    """Copy to an fp32 master the values of ``own`` that were changed since the master was rounded to it."""
    torch.where(own == master.to(own.dtype), master, own.to(master.dtype), out=master)


class HostSlice:
    """Host memory for a slice's masters and gradients, for a bucket on ``own``'s device.

    If the slice is on the host itself and not in half precision, it is its own master, and nothing is copied.

    Args:
        own: This rank's slice of the bucket's parameters, flat.
        copies: Copies to and from the bucket's device.
        store: File in which masters are kept; in memory if None.
        window_bytes: With a store, bytes of the masters that are resident while they are copied.
    """

    #: Whether masters are on another device than the slice.
    is_from_device: bool
    #: Whether masters have memory of their own.
    has_separate_masters: bool

    def __init__(self, own: Tensor, *, copies: HostCopies, store: StateFile | None, window_bytes: int) -> None:
        self._own = own
        self._copies = copies
        self._store = store
        self._window_bytes = window_bytes
        self.is_from_device = own.device.type != "cpu"
        dtype = torch.float32 if low_precision(own.dtype) else own.dtype
        self.master: Tensor = own
        if self.is_from_device or dtype != own.dtype:
            away = copies.buffer if store is None else store.zeros
            self.master = away(own.numel(), dtype)
            for begin, end in self._windows():
                self.master[begin:end].copy_(own[begin:end])
                self._evict(begin, end)
        self.has_separate_masters = self.master is not own
        #: Bit sums of the slice as it was published last, if it is on another device.
        self._sums = bit_sums(own) if self.is_from_device else None
        self._published: torch.Event | None = None
        self._receive_event: torch.Event | None = None

    def take_changes(self) -> None:
        """Update the masters from a slice that the user changed. Waits for the device, as the following step does."""
        if not self.has_separate_masters or (self._sums is not None and torch.equal(bit_sums(self._own), self._sums)):
            return
        for begin, end in self._windows():
            follow(self.master[begin:end], self._own[begin:end].to(self.master.device))
            self._evict(begin, end)

    def publish(self) -> None:
        """Start to copy the updated masters to the slice."""
        if not self.has_separate_masters:
            return
        for begin, end in self._windows():
            master, own = self.master[begin:end], self._own[begin:end]
            if self.is_from_device and master.dtype != own.dtype:
                # A copy that rounds would go through unpinned memory, which the device cannot read directly.
                master = self._copies.buffer(len(master), own.dtype).copy_(master)
            self._published = self._copies.start(master, own)
            self._evict(begin, end)

    def wait_published(self) -> None:
        """Make the device's current stream wait for the copies of :meth:`publish`."""
        if self._published is not None:
            self._published.wait()
            self._published = None
            self._sums = bit_sums(self._own)

    def receive(self, reduced: Tensor) -> Tensor:
        """Return gradients in the masters' dtype on the host; complete once :meth:`wait_received` returns."""
        if not self.is_from_device:
            return reduced.to(self.master.dtype)
        received = self._copies.buffer(reduced.numel(), self.master.dtype)
        self._receive_event = self._copies.start(reduced.to(self.master.dtype), received)
        return received

    def wait_received(self) -> None:
        """Wait for gradients that are still being copied."""
        if self._receive_event is not None:
            self._receive_event.synchronize()
            self._receive_event = None

    def _windows(self) -> list[tuple[int, int]]:
        numel = self._own.numel()
        if self._store is None or not self._store.holds(self.master):
            return [(0, numel)]
        step = max(1, self._window_bytes // self.master.element_size())
        return [(begin, min(begin + step, numel)) for begin in range(0, numel, step)]

    def _evict(self, begin: int, end: int) -> None:
        if self._store is not None:
            self._store.evict(self.master[begin:end])
