"""All-gather and reduce-scatter of slices in few bits (ZeRO++, arXiv 2306.10209).

Weights are rounded by their owner, who goes on from the exact ones: what rounding leaves behind does not add up.
Gradients go to their owners in one all-to-all, each rounded once, and are summed there in full precision; rounded again
at every hop, as a ring would have it, their errors would grow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pardist.engines.common.block_codes import Compression, EvenBlocks, decode, encode, left_behind
from lightning_pardist.engines.common.slice_exchange import gather_slices

#: What is left behind is added to later gradients, and is itself kept in codes.
_KEPT_AS: Compression = "int8"


def has_codes(tensor: Tensor) -> bool:
    """Whether there are numbers, of a dtype that can be sent in few bits."""
    return tensor.is_floating_point() and tensor.numel() > 0


def coded(rows: Tensor, kind: Compression) -> Tensor:
    """What ranks that receive these rows have of them, shape and dtype of ``rows``, ``[any, slice]``."""
    layout = EvenBlocks(rows.shape[1])
    return decode(encode(rows, layout, kind), layout, kind, rows.dtype)


class CodedGather(dist.Work):
    """An all-gather of codes; the numbers are there when it has been waited for.

    Args:
        work: Of the codes.
        codes: Of all ranks, shape ``[group size, bytes]``.
        whole: Where the numbers go, shape ``[group size, slice]``.
        kind: Of the codes.
    """

    def __init__(self, work: dist.Work, codes: Tensor, whole: Tensor, kind: Compression) -> None:
        super().__init__()
        self._work: dist.Work | None = work
        self._codes, self._whole, self._kind = codes, whole, kind

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait as long as the group's timeout has it, and make numbers of the codes."""
        if self._work is not None:
            self._work.wait()
            with torch.no_grad():
                self._whole.copy_(decode(self._codes, EvenBlocks(self._whole.shape[1]), self._kind, self._whole.dtype))
            self._work = None
            self._codes = self._codes.new_empty(0)
        return True


def gather_coded(whole: Tensor, own: Tensor, *, group: dist.ProcessGroup, kind: Compression) -> dist.Work:
    """All-gather slices in few bits. Collective over ``group``; asynchronous.

    Every rank gets the same numbers, the owner of a slice as well. Sends ``(N-1)/N`` of ``whole`` in codes.

    Args:
        whole: Flat, contiguous, shape ``[group size * slice]``: where numbers go.
        own: This rank's slice, exact; it may be a part of ``whole``.
        group: Who takes part.
        kind: Of codes.

    Returns:
        What to wait for, before ``whole`` is read or written to.
    """
    size, rank = group.size(), group.rank()
    mine = encode(own.view(1, -1), EvenBlocks(own.numel()), kind)
    codes = mine.new_empty(size, mine.shape[1])
    codes[rank] = mine[0]
    return CodedGather(gather_slices(codes.view(-1), group=group), codes, whole.view(size, -1), kind)


class Remainders:
    """What codes of gradients could not say on this rank, to be added to the next ones (error feedback).

    1-bit SGD (Seide et al. 2014); that SGD converges with it is shown in arXiv 1901.09847. A remainder is kept in codes
    of 8 bits, a byte a parameter in place of four.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, Tensor] = {}

    def added(self, key: Hashable, rows: Tensor) -> Tensor:
        """``rows`` with what was left of them; a new tensor, in fp32 or wider, as their receivers have them."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        kept = self._kept.get((key, rows.shape))
        if kept is None:
            return rows.to(wide, copy=True)
        return decode(kept, EvenBlocks(rows.shape[1]), _KEPT_AS, wide).add_(rows)

    def keep(self, key: Hashable, left: Tensor) -> None:
        """Remember what is left."""
        self._kept[key, left.shape] = encode(left, EvenBlocks(left.shape[1]), _KEPT_AS)

    def clear(self) -> None:
        """Forget it all: a checkpoint does not have it."""
        self._kept.clear()

    def held_bytes(self) -> int:
        """Bytes of what is kept."""
        return sum(kept.numel() for kept in self._kept.values())


@dataclass
class CodedReduction:
    """A pending reduce-scatter in few bits, summed on wait.

    Attributes:
        own: This rank's slice of its own gradients, exact.
        received: Codes of all ranks' slices, this one's included, shape ``[group size, bytes]``.
        sent: Kept until it has been sent.
        rank: This rank in the group.
        kind: Of the codes.
        work: To be waited for.
    """

    own: Tensor
    received: Tensor
    sent: Tensor
    rank: int
    kind: Compression
    work: Any

    def finish(self, out: Tensor | None = None) -> Tensor:
        """Wait, and add up in fp32 or wider, in the order of ranks, so that every run adds alike.

        Args:
            out: Where the sum goes, shape ``[slice]``; it may be ``own``. A new tensor if None.
        """
        self.work.wait()
        layout = EvenBlocks(self.own.numel())
        wide = torch.promote_types(self.own.dtype, torch.float32)
        total = torch.zeros(self.own.numel(), dtype=wide, device=self.own.device)
        for rank, codes in enumerate(self.received.split(1)):
            total += self.own if rank == self.rank else decode(codes, layout, self.kind, wide)[0]
        return total if out is None else out.copy_(total)


def scatter_coded(
    whole: Tensor,
    *,
    group: dist.ProcessGroup,
    kind: Compression,
    remainders: Remainders | None = None,
    key: Hashable = None,
) -> CodedReduction:
    """Reduce-scatter by slices in few bits. Collective over ``group``; asynchronous.

    A rank's own slice does not travel and is not rounded. Sends ``(N-1)/N`` of ``whole`` in codes.

    Args:
        whole: Flat, contiguous, shape ``[group size * slice]``; not to be written to before it is finished.
        group: Who takes part.
        kind: Of codes.
        remainders: What earlier calls have left behind; rounding errors are lost if None.
        key: Under which they are kept, for the same elements.
    """
    size, rank = group.size(), group.rank()
    own_rows = whole.view(size, -1)
    layout = EvenBlocks(own_rows.shape[1])
    rows = own_rows if remainders is None else remainders.added(key, own_rows)
    message = encode(rows, layout, kind)
    if remainders is not None:
        left = left_behind(rows, decode(message, layout, kind, rows.dtype))
        left[rank] = 0
        remainders.keep(key, left)
    received = torch.empty_like(message)
    work = dist.all_to_all_single(received, message, group=group, async_op=True)
    return CodedReduction(own_rows[rank], received, message, rank, kind, work)
