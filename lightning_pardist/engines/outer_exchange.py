"""Means of islands' differences in few bits, with what rounding leaves behind added the next time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pardist.collectives import all_gather_flat
from lightning_pardist.engines.common.block_codes import Compression, SliceLayout, decode, encode, left_behind


class OuterExchange:
    """The mean of some tensors over islands, again and again, of which each rank sends ``2 (K-1)/K`` in codes.

    Each rank sends every other one a slice, sums up the slice that is its own, and sends that to all. What codes cannot
    say of a difference stays behind and is added to the next one, on the island as well as by the rank that sums (error
    feedback: 1-bit SGD, Seide et al. 2014; in two stages as 1-bit Adam has it, arXiv 2102.02888).

    Args:
        sizes: Elements of each tensor.
        group: This rank and its counterparts on the other islands.
        kind: Of codes; None sends numbers as they are.
        like: A tensor of the dtype and device.
    """

    def __init__(
        self, sizes: Sequence[int], *, group: dist.ProcessGroup, kind: Compression | None, like: Tensor
    ) -> None:
        self.group, self.kind = group, kind
        self.layout = SliceLayout(sizes, group.size()).to(like.device)
        held = group.size() if kind is not None else 0
        self._error = like.new_zeros(held, self.layout.width)
        self._mean_error = like.new_zeros(min(held, 1), self.layout.width)
        self._dtype = like.dtype
        self._sent_as: Compression | None = None
        self._work: Any = None
        self._message = self._answer = torch.empty(0)

    def start(self, values: Tensor) -> None:
        """Send slices of this island's tensors, flat; the caller goes on. Collective over the group."""
        self._start(self.layout.rows(values), self.kind)

    def _start(self, rows: Tensor, kind: Compression | None) -> None:
        self._sent_as = kind
        if self.kind is not None:
            rows = rows + self._error
        self._message = encode(rows, self.layout, kind)
        if self.kind is not None:
            self._error = left_behind(rows, self._decoded(self._message))
        self._answer = torch.empty_like(self._message)
        self._work = dist.all_to_all_single(self._answer, self._message, group=self.group, async_op=True)

    def turn(self) -> None:
        """Wait for the slices of all islands, and send their mean; the caller goes on. Collective over the group."""
        self._work.wait()
        # One after the other, so that it does not matter where in a message a number lies.
        first, *others = self._decoded(self._answer).split(1)
        mean = first.clone()
        for other in others:
            mean += other
        mean /= self.group.size()
        if self.kind is not None:
            mean += self._mean_error
        self._message = encode(mean, self.layout, self._sent_as)
        if self.kind is not None:
            self._mean_error = left_behind(mean, self._decoded(self._message))
        self._answer = self._message.new_empty(self.group.size(), self._message.shape[1])
        flat = self._answer.view(-1), self._message.view(-1)
        self._work = all_gather_flat(*flat, group=self.group, async_op=True)

    def finish(self) -> Tensor:
        """The mean, flat, equal on all islands. Collective over the group."""
        self._work.wait()
        mean = self.layout.flat(self._decoded(self._answer))
        self._work, self._message, self._answer = None, torch.empty(0), torch.empty(0)
        return mean

    def exact(self, values: Tensor) -> Tensor:
        """The mean in full precision, with what earlier ones have left behind. Collective over the group."""
        self._start(self.layout.rows(values), None)
        self.turn()
        return self.finish()

    def held_bytes(self) -> int:
        """Bytes of what stays behind, on this rank."""
        return (self._error.numel() + self._mean_error.numel()) * self._error.element_size()

    def _decoded(self, data: Tensor) -> Tensor:
        return decode(data, self.layout, self._sent_as, self._dtype)
