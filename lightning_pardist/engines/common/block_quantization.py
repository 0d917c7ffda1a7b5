"""Block-wise quantization of tensors for communication: bf16, or 8- and 4-bit integers with one scale per block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

#: Format in which values are sent: bf16, or 8- or 4-bit integers with one scale per block.
Compression = Literal["bf16", "int8", "int4"]
#: Elements of one tensor that share a scale: 0.4% more bytes with 4 bits.
BLOCK = 2048
_LARGEST = {"int8": 127, "int4": 7}


class BlockLayout(Protocol):
    """Partition of a row into blocks that share a scale; a matrix has one row per message."""

    @property
    def num_blocks(self) -> int:
        """Number of scales per row."""
        ...

    def arranged(self, rows: Tensor) -> Tensor:
        """Return the rows in a shape that broadcasts with :meth:`spread`: row dim first, then elements in order."""
        ...

    def largest(self, arranged: Tensor) -> Tensor:
        """Return the largest magnitude of each block, NaN if it contains one; shape ``[rows, num_blocks]``."""
        ...

    def spread(self, scales: Tensor) -> Tensor:
        """Return one number per block in a shape that broadcasts with the result of :meth:`arranged`."""
        ...

    def rows_of(self, arranged: Tensor) -> Tensor:
        """Invert :meth:`arranged`."""
        ...


class SliceLayout:
    """Layout of several tensors, each cut into K slices, as a matrix with one row per rank.

    A row is the concatenation of one slice of each tensor. Blocks do not cross tensor boundaries, so the codes of a
    tensor depend on that tensor alone: ranks that hold it next to different other tensors compute the same mean of it.

    Args:
        sizes: Number of elements of each tensor.
        ranks: Number of ranks K.
    """

    def __init__(self, sizes: Sequence[int], ranks: int) -> None:
        self.sizes, self.ranks = list(sizes), ranks
        # Even widths: two 4-bit codes share a byte.
        self.widths = [max(2, -(-size // (2 * ranks)) * 2) for size in sizes]
        self.width = sum(self.widths)
        blocks = [[BLOCK] * (width // BLOCK) + [width % BLOCK] * (width % BLOCK > 0) for width in self.widths]
        lengths = torch.tensor([length for run in blocks for length in run], dtype=torch.int64)
        self.num_blocks = lengths.numel()
        self.block_of = torch.repeat_interleave(torch.arange(self.num_blocks), lengths)

    def to(self, device: torch.device) -> SliceLayout:
        """Move the layout to a device, in place, and return it."""
        self.block_of = self.block_of.to(device)
        return self

    def rows(self, flat: Tensor) -> Tensor:
        """Return the concatenated flat tensors as a zero-padded matrix of shape ``[ranks, width]``."""
        parts = zip(flat.split(self.sizes), self.widths, strict=True)
        return torch.cat([pad(part, (0, w * self.ranks - part.numel())).view(self.ranks, w) for part, w in parts], 1)

    def flat(self, rows: Tensor) -> Tensor:
        """Invert :meth:`rows`."""
        parts = zip(rows.split(self.widths, 1), self.sizes, strict=True)
        return torch.cat([part.reshape(-1)[:size] for part, size in parts])

    def arranged(self, rows: Tensor) -> Tensor:
        """Return the rows unchanged."""
        return rows

    def largest(self, arranged: Tensor) -> Tensor:
        """See :class:`BlockLayout`."""
        index = self.block_of.expand(len(arranged), -1)
        return arranged.new_zeros(len(arranged), self.num_blocks).scatter_reduce(1, index, arranged.abs(), "amax")

    def spread(self, scales: Tensor) -> Tensor:
        """Return the scale of each element, shape ``[rows, width]``."""
        return scales.gather(1, self.block_of.expand(len(scales), -1))

    def rows_of(self, arranged: Tensor) -> Tensor:
        """Return the rows unchanged."""
        return arranged


class EvenBlocks:
    """Layout of rows in blocks of equal size, regardless of tensor boundaries; it allocates no memory.

    Args:
        width: Elements per row.
        block: Elements that share a scale; even.
    """

    def __init__(self, width: int, block: int = 64) -> None:
        self.width, self.block = width, block
        self.num_blocks = -(-width // block)

    def arranged(self, rows: Tensor) -> Tensor:
        """Return the rows as ``[rows, num_blocks, block]``, zero-padded at the end of a row."""
        missing = self.num_blocks * self.block - rows.shape[1]
        return (pad(rows, (0, missing)) if missing else rows).reshape(len(rows), self.num_blocks, self.block)

    def largest(self, arranged: Tensor) -> Tensor:
        """See :class:`BlockLayout`."""
        if not self.num_blocks:
            return arranged.new_zeros(len(arranged), 0)
        low, high = arranged.aminmax(dim=2)
        return torch.maximum(-low, high)

    def spread(self, scales: Tensor) -> Tensor:
        """Return the scales as ``[rows, num_blocks, 1]``."""
        return scales.unsqueeze(2)

    def rows_of(self, arranged: Tensor) -> Tensor:
        """Return the rows as ``[rows, width]``, without padding."""
        return arranged.flatten(1)[:, : self.width]


def encode(rows: Tensor, layout: BlockLayout, kind: Compression | None) -> Tensor:
    """Quantize rows to bytes: scaled by the largest magnitude of their block and rounded to the nearest code.

    Args:
        rows: Tensor of floating dtype, shape ``[any, width]``.
        layout: Block layout of the rows.
        kind: Format of the codes; None keeps the values unchanged.

    Returns:
        Shape ``[any, bytes]``, ``uint8``: for integers the scales of a row (fp32), followed by its codes. A block that
        contains a non-finite value decodes to non-finite values only.
    """
    if kind is None:
        return rows.contiguous().view(torch.uint8)
    if kind == "bf16":
        return rows.to(torch.bfloat16).contiguous().view(torch.uint8)
    values = layout.arranged(rows.float())
    scales = layout.largest(values) / _LARGEST[kind]
    # An all-zero block gets zero codes.
    codes = (values / layout.spread(torch.where(scales == 0, 1.0, scales))).round_().to(torch.int8).flatten(1)
    packed = codes.view(torch.uint8)
    if kind == "int4":
        unsigned = (codes + 8).view(torch.uint8)
        packed = unsigned[:, ::2] | unsigned[:, 1::2] << 4
    return torch.cat([scales.view(torch.uint8), packed], 1)


def quantization_error(values: Tensor, received: Tensor) -> Tensor:
    """Return the quantization error for error feedback, with non-finite entries replaced by zero."""
    return (values - received).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def decode(data: Tensor, layout: BlockLayout, kind: Compression | None, dtype: torch.dtype) -> Tensor:
    """Dequantize the output of :func:`encode`.

    Args:
        data: Shape ``[any, bytes]``, ``uint8``.
        layout: Block layout of the rows.
        kind: Format used by :func:`encode`.
        dtype: Dtype of the result.
    """
    if kind is None:
        return data.view(dtype)
    if kind == "bf16":
        return data.view(torch.bfloat16).to(dtype)
    scales, codes = data.split([4 * layout.num_blocks, data.shape[1] - 4 * layout.num_blocks], 1)
    # The column slice is not aligned for fp32; copy it before the view.
    scales = scales.flatten().clone().view(torch.float32).view(len(data), -1)
    if kind == "int4":
        codes = torch.stack([codes & 15, codes >> 4], 2).flatten(1).to(torch.int8) - 8
    numbers = layout.arranged(codes.contiguous().view(torch.int8).float()).mul_(layout.spread(scales))
    return layout.rows_of(numbers).to(dtype)
