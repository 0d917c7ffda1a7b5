"""Quantized all-gather and reduce-scatter of slices (ZeRO++, arXiv 2306.10209).

Weights are quantized by their owner, which updates the exact values, so quantization errors do not accumulate over
steps. Gradients are sent to their owners in one all-to-all, quantized once, and summed there in full precision. A ring
would quantize again at every hop, with errors that grow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pardist.engines.common.block_quantization import (
    Compression,
    EvenBlocks,
    decode,
    encode,
    quantization_error,
)
from lightning_pardist.engines.common.slice_exchange import gather_slices

#: Format in which quantization errors are stored until they are added to later gradients.
_KEPT_AS: Compression = "int8"


def is_quantizable(tensor: Tensor) -> bool:
    """Return whether a tensor is not empty and of a dtype that can be quantized."""
    return tensor.is_floating_point() and tensor.numel() > 0


def quantized_roundtrip(rows: Tensor, kind: Compression) -> Tensor:
    """Return ``rows``, shape ``[any, slice]``, as other ranks receive them: quantized and dequantized."""
    layout = EvenBlocks(rows.shape[1])
    return decode(encode(rows, layout, kind), layout, kind, rows.dtype)


class QuantizedGather(dist.Work):
    """Work handle of a quantized all-gather; :meth:`wait` dequantizes the received codes.

    Args:
        work: Handle of the all-gather of codes.
        codes: Codes of all ranks, shape ``[group size, bytes]``.
        whole: Output, shape ``[group size, slice]``.
        kind: Format of the codes.
    """

    def __init__(self, work: dist.Work, codes: Tensor, whole: Tensor, kind: Compression) -> None:
        super().__init__()
        self._work: dist.Work | None = work
        self._codes, self._whole, self._kind = codes, whole, kind

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the all-gather, with the group's timeout, and dequantize into the output."""
        if self._work is not None:
            self._work.wait()
            with torch.no_grad():
                self._whole.copy_(decode(self._codes, EvenBlocks(self._whole.shape[1]), self._kind, self._whole.dtype))
            self._work = None
            self._codes = self._codes.new_empty(0)
        return True


def all_gather_quantized(whole: Tensor, own: Tensor, *, group: dist.ProcessGroup, kind: Compression) -> dist.Work:
    """All-gather slices in quantized form. Collective over ``group``; asynchronous.

    Every rank gets the same values, including the owner of a slice. Sends ``(N-1)/N`` of ``whole`` in codes.

    Args:
        whole: Output, flat and contiguous, shape ``[group size * slice]``.
        own: This rank's exact slice; it may be a view of ``whole``.
        group: The participating ranks.
        kind: Format of the codes.

    Returns:
        The work handle to wait for before ``whole`` is read or written.
    """
    size, rank = group.size(), group.rank()
    mine = encode(own.view(1, -1), EvenBlocks(own.numel()), kind)
    codes = mine.new_empty(size, mine.shape[1])
    codes[rank] = mine[0]
    return QuantizedGather(gather_slices(codes.view(-1), group=group), codes, whole.view(size, -1), kind)


class ErrorFeedback:
    """Error feedback: this rank's quantization errors of gradients, added to the gradients of the next step.

    See 1-bit SGD (Seide et al. 2014); arXiv 1901.09847 shows that SGD converges with it. Errors are stored as 8-bit
    codes: one byte per parameter in place of four.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, Tensor] = {}

    def with_error(self, key: Hashable, rows: Tensor) -> Tensor:
        """Return ``rows`` plus their stored error, as a new tensor in fp32 or wider, the dtype of the reduction."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        kept = self._kept.get((key, rows.shape))
        if kept is None:
            return rows.to(wide, copy=True)
        return decode(kept, EvenBlocks(rows.shape[1]), _KEPT_AS, wide).add_(rows)

    def store_error(self, key: Hashable, left: Tensor) -> None:
        """Store the quantization error of a key."""
        self._kept[key, left.shape] = encode(left, EvenBlocks(left.shape[1]), _KEPT_AS)

    def clear(self) -> None:
        """Drop all stored errors: they are not part of a checkpoint."""
        self._kept.clear()

    def held_bytes(self) -> int:
        """Return the number of bytes of stored errors."""
        return sum(kept.numel() for kept in self._kept.values())


@dataclass
class QuantizedReduction:
    """A pending quantized reduce-scatter; :meth:`finish` waits and sums.

    Attributes:
        own: This rank's slice of its own gradients, exact.
        received: Codes of this slice from all ranks, this one included, shape ``[group size, bytes]``.
        sent: The send buffer, referenced until it has been sent.
        rank: This rank in the group.
        kind: Format of the codes.
        work: Handle of the all-to-all.
    """

    own: Tensor
    received: Tensor
    sent: Tensor
    rank: int
    kind: Compression
    work: Any

    def finish(self, out: Tensor | None = None) -> Tensor:
        """Wait, then sum in fp32 or wider in the order of ranks, which makes the sum deterministic.

        Args:
            out: Output, shape ``[slice]``; it may be ``own``. A new tensor if None.
        """
        self.work.wait()
        layout = EvenBlocks(self.own.numel())
        wide = torch.promote_types(self.own.dtype, torch.float32)
        total = torch.zeros(self.own.numel(), dtype=wide, device=self.own.device)
        for rank, codes in enumerate(self.received.split(1)):
            total += self.own if rank == self.rank else decode(codes, layout, self.kind, wide)[0]
        return total if out is None else out.copy_(total)


def reduce_scatter_quantized(
    whole: Tensor,
    *,
    group: dist.ProcessGroup,
    kind: Compression,
    error_feedback: ErrorFeedback | None = None,
    key: Hashable = None,
) -> QuantizedReduction:
    """Reduce-scatter slices in quantized form. Collective over ``group``; asynchronous.

    A rank's own slice is not quantized. Sends ``(N-1)/N`` of ``whole`` in codes.

    Args:
        whole: Flat, contiguous, shape ``[group size * slice]``; must not be written before the reduction is finished.
        group: The participating ranks.
        kind: Format of the codes.
        error_feedback: Quantization errors of earlier calls (error feedback); errors are dropped if None.
        key: Key of these elements in ``error_feedback``.
    """
    size, rank = group.size(), group.rank()
    own_rows = whole.view(size, -1)
    layout = EvenBlocks(own_rows.shape[1])
    rows = own_rows if error_feedback is None else error_feedback.with_error(key, own_rows)
    message = encode(rows, layout, kind)
    if error_feedback is not None:
        left = quantization_error(rows, decode(message, layout, kind, rows.dtype))
        left[rank] = 0
        error_feedback.store_error(key, left)
    received = torch.empty_like(message)
    work = dist.all_to_all_single(received, message, group=group, async_op=True)
    return QuantizedReduction(own_rows[rank], received, message, rank, kind, work)
