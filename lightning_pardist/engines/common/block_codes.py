"""Numbers as codes of few bits, blocks of which share a scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

#: How numbers travel: as halves, or as integers of 8 or 4 bits with a scale a block.
Compression = Literal["bf16", "int8", "int4"]
#: Elements of one tensor that share a scale: 0.4% more bytes with 4 bits.
BLOCK = 2048
_LARGEST = {"int8": 127, "int4": 7}


class BlockLayout(Protocol):
    """Which numbers of a row share a scale, for a matrix with so many rows as there are messages."""

    @property
    def num_blocks(self) -> int:
        """Scales of a row."""
        ...

    def arranged(self, rows: Tensor) -> Tensor:
        """Rows as :meth:`spread` fits them: rows first, then codes in their order."""
        ...

    def largest(self, arranged: Tensor) -> Tensor:
        """The largest magnitude of each block, NaN where there is one, shape ``[rows, num_blocks]``."""
        ...

    def spread(self, scales: Tensor) -> Tensor:
        """A number a block, to be multiplied with what is arranged."""
        ...

    def rows_of(self, arranged: Tensor) -> Tensor:
        """The inverse of :meth:`arranged`."""
        ...


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

    def arranged(self, rows: Tensor) -> Tensor:
        """The rows themselves."""
        return rows

    def largest(self, arranged: Tensor) -> Tensor:
        """See :class:`BlockLayout`."""
        index = self.block_of.expand(len(arranged), -1)
        return arranged.new_zeros(len(arranged), self.num_blocks).scatter_reduce(1, index, arranged.abs(), "amax")

    def spread(self, scales: Tensor) -> Tensor:
        """A number an element."""
        return scales.gather(1, self.block_of.expand(len(scales), -1))

    def rows_of(self, arranged: Tensor) -> Tensor:
        """The rows themselves."""
        return arranged


class EvenBlocks:
    """Rows of flat memory in blocks of one size, whatever lies in them; it takes no memory of its own.

    Args:
        width: Elements of a row.
        block: Elements that share a scale; even.
    """

    def __init__(self, width: int, block: int = 64) -> None:
        self.width, self.block = width, block
        self.num_blocks = -(-width // block)

    def arranged(self, rows: Tensor) -> Tensor:
        """Shape ``[rows, num_blocks, block]``, zeros behind a row's end."""
        missing = self.num_blocks * self.block - rows.shape[1]
        return (pad(rows, (0, missing)) if missing else rows).reshape(len(rows), self.num_blocks, self.block)

    def largest(self, arranged: Tensor) -> Tensor:
        """See :class:`BlockLayout`."""
        if not self.num_blocks:
            return arranged.new_zeros(len(arranged), 0)
        low, high = arranged.aminmax(dim=2)
        return torch.maximum(-low, high)

    def spread(self, scales: Tensor) -> Tensor:
        """Shape ``[rows, num_blocks, 1]``."""
        return scales.unsqueeze(2)

    def rows_of(self, arranged: Tensor) -> Tensor:
        """Shape ``[rows, width]``."""
        return arranged.flatten(1)[:, : self.width]


def encode(rows: Tensor, layout: BlockLayout, kind: Compression | None) -> Tensor:
    """Numbers as the bytes that travel: rounded to the nearest code, scaled by the largest magnitude of their block.

    Args:
        rows: Of floating dtype, shape ``[any, width]``.
        layout: Of the rows.
        kind: How; as they are if None.

    Returns:
        Shape ``[any, bytes]``, ``uint8``: for integers a row's scales (fp32), then its codes. Of a block with a number
        that is not finite no number comes back finite.
    """
    if kind is None:
        return rows.contiguous().view(torch.uint8)
    if kind == "bf16":
        return rows.to(torch.bfloat16).contiguous().view(torch.uint8)
    values = layout.arranged(rows.float())
    scales = layout.largest(values) / _LARGEST[kind]
    # A block of zeros has codes of zero.
    codes = (values / layout.spread(torch.where(scales == 0, 1.0, scales))).round_().to(torch.int8).flatten(1)
    packed = codes.view(torch.uint8)
    if kind == "int4":
        unsigned = (codes + 8).view(torch.uint8)
        packed = unsigned[:, ::2] | unsigned[:, 1::2] << 4
    return torch.cat([scales.view(torch.uint8), packed], 1)


def left_behind(values: Tensor, received: Tensor) -> Tensor:
    """What codes could not say, to be added the next time: nothing where that is not finite."""
    return (values - received).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def decode(data: Tensor, layout: BlockLayout, kind: Compression | None, dtype: torch.dtype) -> Tensor:
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
    numbers = layout.arranged(codes.contiguous().view(torch.int8).float()).mul_(layout.spread(scales))
    return layout.rows_of(numbers).to(dtype)
