"""Host copies of a bucket's slice, for optimizer steps on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_pardist.engines.common.fingerprint import bit_sums
from lightning_pardist.engines.offload import HostCopies, StateFile


def low_precision(dtype: torch.dtype) -> bool:
    """Whether parameters of this dtype are updated in fp32 masters."""
    return dtype in (torch.float16, torch.bfloat16)


def follow(master: Tensor, own: Tensor) -> None:
    """Update an fp32 master with values changed from outside since it was rounded to ``own``."""
    torch.where(own == master.to(own.dtype), master, own.to(master.dtype), out=master)


class HostSlice:
    """A slice's masters and gradients in host memory, for a bucket on ``own``'s device.

    Where that is the host itself and the slice is fp32, the slice is its own master, and nothing is copied.

    Args:
        own: This rank's slice of the bucket's parameters, flat.
        copies: To and from the bucket's device.
        store: Where masters live; in memory if None.
        window_bytes: With a store, how much of the masters is resident while they are copied.
    """

    #: Whether masters are on another device than the slice.
    is_away: bool
    #: Whether masters have memory of their own.
    is_apart: bool

    def __init__(self, own: Tensor, *, copies: HostCopies, store: StateFile | None, window_bytes: int) -> None:
        self._own = own
        self._copies = copies
        self._store = store
        self._window_bytes = window_bytes
        self.is_away = own.device.type != "cpu"
        dtype = torch.float32 if low_precision(own.dtype) else own.dtype
        self.master: Tensor = own
        if self.is_away or dtype != own.dtype:
            away = copies.buffer if store is None else store.zeros
            self.master = away(own.numel(), dtype)
            for begin, end in self._windows():
                self.master[begin:end].copy_(own[begin:end])
                self._evict(begin, end)
        self.is_apart = self.master is not own
        #: Of the slice as it was published last, where that is on another device.
        self._sums = bit_sums(own) if self.is_away else None
        self._published: torch.Event | None = None
        self._landing: torch.Event | None = None

    def take_changes(self) -> None:
        """Let masters follow a slice that was changed by hand. Waits for the device, as the step that follows does."""
        if not self.is_apart or (self._sums is not None and torch.equal(bit_sums(self._own), self._sums)):
            return
        for begin, end in self._windows():
            follow(self.master[begin:end], self._own[begin:end].to(self.master.device))
            self._evict(begin, end)

    def publish(self) -> None:
        """Begin to copy the updated masters to the slice."""
        if not self.is_apart:
            return
        for begin, end in self._windows():
            master, own = self.master[begin:end], self._own[begin:end]
            if self.is_away and master.dtype != own.dtype:
                # Rounded by torch, it would go through memory that the device cannot read by itself.
                master = self._copies.buffer(len(master), own.dtype).copy_(master)
            self._published = self._copies.start(master, own)
            self._evict(begin, end)

    def wait_published(self) -> None:
        """Let what follows on the device come after the copies of :meth:`publish`."""
        if self._published is not None:
            self._published.wait()
            self._published = None
            self._sums = bit_sums(self._own)

    def receive(self, reduced: Tensor) -> Tensor:
        """Gradients in the masters' dtype, on the host; there once :meth:`wait_received` returns."""
        if not self.is_away:
            return reduced.to(self.master.dtype)
        received = self._copies.buffer(reduced.numel(), self.master.dtype)
        self._landing = self._copies.start(reduced.to(self.master.dtype), received)
        return received

    def wait_received(self) -> None:
        """Wait for gradients that are on their way."""
        if self._landing is not None:
            self._landing.synchronize()
            self._landing = None

    def _windows(self) -> list[tuple[int, int]]:
        numel = self._own.numel()
        if self._store is None or not self._store.holds(self.master):
            return [(0, numel)]
        step = max(1, self._window_bytes // self.master.element_size())
        return [(begin, min(begin + step, numel)) for begin in range(0, numel, step)]

    def _evict(self, begin: int, end: int) -> None:
        if self._store is not None:
            self._store.evict(self.master[begin:end])
