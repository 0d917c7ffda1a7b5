"""Quantized averaging of the islands' parameter differences, with error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pardist.collectives import all_gather_flat
from lightning_pardist.engines.common.block_quantization import (
    Compression,
    SliceLayout,
    decode,
    encode,
    quantization_error,
)


class OuterExchange:
    """Repeated quantized mean of a fixed set of tensors over K islands; each rank sends ``2 (K-1)/K`` of their size.

    An all-to-all gives each rank its slice of every island's tensors; the rank averages the slice, and an all-gather
    distributes the means. The quantization error of a message is kept and added to the next one, both for the islands'
    differences and for the means (error feedback: 1-bit SGD, Seide et al. 2014; in two stages as in 1-bit Adam,
    arXiv 2102.02888).

    Args:
        sizes: Number of elements of each tensor.
        group: This rank and its counterparts on the other islands.
        kind: Quantization of the messages; None sends full precision.
        like: A tensor with the dtype and device of the values.
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
        self._format: Compression | None = None
        self._work: Any = None
        self._message = self._answer = torch.empty(0)

    def start(self, values: Tensor) -> None:
        """Start the all-to-all of this island's flattened tensors; does not block. Collective over the group."""
        self._start(self.layout.rows(values), self.kind)

    def _start(self, rows: Tensor, kind: Compression | None) -> None:
        self._format = kind
        if self.kind is not None:
            rows = rows + self._error
        self._message = encode(rows, self.layout, kind)
        if self.kind is not None:
            self._error = quantization_error(rows, self._decoded(self._message))
        self._answer = torch.empty_like(self._message)
        self._work = dist.all_to_all_single(self._answer, self._message, group=self.group, async_op=True)

    def turn(self) -> None:
        """Wait for the all-to-all and start the all-gather of this rank's mean slice. Collective over the group."""
        self._work.wait()
        # Sequential sum: the rounding of an element does not depend on its position in the message.
        first, *others = self._decoded(self._answer).split(1)
        mean = first.clone()
        for other in others:
            mean += other
        mean /= self.group.size()
        if self.kind is not None:
            mean += self._mean_error
        self._message = encode(mean, self.layout, self._format)
        if self.kind is not None:
            self._mean_error = quantization_error(mean, self._decoded(self._message))
        self._answer = self._message.new_empty(self.group.size(), self._message.shape[1])
        flat = self._answer.view(-1), self._message.view(-1)
        self._work = all_gather_flat(*flat, group=self.group, async_op=True)

    def finish(self) -> Tensor:
        """Wait for the all-gather and return the flat mean, equal on all islands. Collective over the group."""
        self._work.wait()
        mean = self.layout.flat(self._decoded(self._answer))
        self._work, self._message, self._answer = None, torch.empty(0), torch.empty(0)
        return mean

    def exact(self, values: Tensor) -> Tensor:
        """Return the mean in full precision, including earlier quantization errors. Collective over the group."""
        self._start(self.layout.rows(values), None)
        self.turn()
        return self.finish()

    def held_bytes(self) -> int:
        """Return the bytes of error-feedback buffers on this rank."""
        return (self._error.numel() + self._mean_error.numel()) * self._error.element_size()

    def _decoded(self, data: Tensor) -> Tensor:
        return decode(data, self.layout, self._format, self._dtype)
