"""Means of islands' differences in few bits, with what rounding leaves behind added the next time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from lightning_pardist.collectives import all_gather_flat

#: How differences travel: as halves, or as integers of 8 or 4 bits with a scale a block.
Compression = Literal["bf16", "int8", "int4"]
#: Elements of one tensor that share a scale: 0.4% more bytes with 4 bits.
BLOCK = 2048
_LARGEST = {"int8": 127, "int4": 7}


class SliceLayout:
    """Tensors cut into a slice for each of K ranks, as a matrix with a row a rank.

    A slice is a row's run of elements of each tensor. Blocks that share a scale end where a tensor ends, so that codes
    of a tensor depend on nothing else: ranks that hold the same tensor beside others get the same mean of it.

    Args:
        sizes: Elements of each tensor.
        ranks: K.
    """

    def __init__(self, sizes: Sequence[int], ranks: int) -> None:
        self.sizes, self.ranks = list(sizes), ranks
        # Codes of 4 bits come in pairs.
        self.widths = [max(2, -(-size // (2 * ranks)) * 2) for size in sizes]
        self.width = sum(self.widths)
        blocks = [[BLOCK] * (width // BLOCK) + [width % BLOCK] * (width % BLOCK > 0) for width in self.widths]
        lengths = torch.tensor([length for run in blocks for length in run], dtype=torch.int64)
        self.num_blocks = lengths.numel()
        self.block_of = torch.repeat_interleave(torch.arange(self.num_blocks), lengths)

    def to(self, device: torch.device) -> SliceLayout:
        """This layout, for tensors on a device."""
        self.block_of = self.block_of.to(device)
        return self

    def rows(self, flat: Tensor) -> Tensor:
        """Tensors end to end, flat, as the matrix, shape ``[ranks, width]``."""
        parts = zip(flat.split(self.sizes), self.widths, strict=True)
        return torch.cat([pad(part, (0, w * self.ranks - part.numel())).view(self.ranks, w) for part, w in parts], 1)

    def flat(self, rows: Tensor) -> Tensor:
        """The inverse of :meth:`rows`."""
        parts = zip(rows.split(self.widths, 1), self.sizes, strict=True)
        return torch.cat([part.reshape(-1)[:size] for part, size in parts])


def encode(rows: Tensor, layout: SliceLayout, kind: Compression | None) -> Tensor:
    """Numbers as the bytes that travel: rounded to the nearest code, scaled by the largest magnitude of their block.

    Args:
        rows: Of floating dtype, shape ``[any, layout.width]``.
        layout: Of the rows.
        kind: How; as they are if None.

    Returns:
        Shape ``[any, bytes]``, ``uint8``: for integers a row's scales (fp32), then its codes.
    """
    if kind is None:
        return rows.contiguous().view(torch.uint8)
    if kind == "bf16":
        return rows.to(torch.bfloat16).view(torch.uint8)
    values, index = rows.float(), layout.block_of.expand(len(rows), -1)
    largest = values.new_zeros(len(rows), layout.num_blocks).scatter_reduce(1, index, values.abs(), "amax")
    scales = largest / _LARGEST[kind]
    # A block of zeros has codes of zero.
    codes = (values / torch.where(scales == 0, 1.0, scales).gather(1, index)).round().to(torch.int8)
    packed = codes.view(torch.uint8)
    if kind == "int4":
        unsigned = (codes + 8).view(torch.uint8)
        packed = unsigned[:, ::2] | unsigned[:, 1::2] << 4
    return torch.cat([scales.view(torch.uint8), packed], 1)


def decode(data: Tensor, layout: SliceLayout, kind: Compression | None, dtype: torch.dtype) -> Tensor:
    """The numbers that :func:`encode` has made bytes of.

    Args:
        data: Shape ``[any, bytes]``, ``uint8``.
        layout: Of the rows.
        kind: As they were encoded.
        dtype: Of the result.
    """
    if kind is None:
        return data.view(dtype)
    if kind == "bf16":
        return data.view(torch.bfloat16).to(dtype)
    scales, codes = data.split([4 * layout.num_blocks, data.shape[1] - 4 * layout.num_blocks], 1)
    # Columns of a matrix are not aligned for numbers.
    scales = scales.flatten().clone().view(torch.float32).view(len(data), -1)
    if kind == "int4":
        codes = torch.stack([codes & 15, codes >> 4], 2).flatten(1).to(torch.int8) - 8
    numbers: Tensor = codes.contiguous().view(torch.int8).float() * scales.gather(
        1, layout.block_of.expand(len(data), -1)
    )
    return numbers.to(dtype)


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
            self._error = rows - self._decoded(self._message)
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
            self._mean_error = mean - self._decoded(self._message)
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
