"""Zero-copy exchange of slices of flat tensors between ranks.

[Note: gloo]
On the host, gloo's reduce-scatter sends as much as an all-reduce, and its all-gather receives into a buffer of its own
that it copies out of afterwards. Sends and receives do neither: every rank gives each peer what is the peer's, and
nothing lies anywhere twice. All ranks begin the same exchanges in the same order, so that messages of one kind meet in
the order in which they were sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pardist.collectives import all_gather_flat
from lightning_pardist.compat.fake_group import backend_of

#: Tags of messages on the group's connections, which users' own messages (0 and up) hardly have. The size of a message
#: is added: gloo ends a process that receives more than it expects, whereas messages of unequal tags never meet, and
#: the watchdog reports where ranks wait.
_GATHER_TAG, _SCATTER_TAG = 1 << 29, 1 << 30
_LOW_PRECISION = (torch.bfloat16, torch.float16)


def exchanges_directly(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether ranks of ``group`` exchange slices of ``tensor`` by sends and receives, see [Note: gloo]."""
    # A group may have a backend for each kind of device: "cpu:gloo,cuda:nccl".
    return tensor.device.type == "cpu" and "gloo" in backend_of(group)


class SliceExchange(dist.Work):
    """A set of sends and receives with one wait.

    Args:
        works: Of the single messages.
    """

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until everything has come and gone; as long as the group's timeout has it.

        Raises:
            RuntimeError: If a peer is gone or silent for too long.
        """
        works, self._works = self._works, []
        for work in works:
            work.wait()
        return True


def gather_slices(whole: Tensor, *, group: dist.ProcessGroup) -> dist.Work:
    """All-gather slices in place. Collective over ``group``; asynchronous.

    Args:
        whole: Flat, shape ``[group size * slice]``, in which this rank's slice has its values; contiguous.
        group: Who takes part.

    Returns:
        What to wait for, before ``whole`` is read and this rank's slice is written to.
    """
    rank, slices = group.rank(), whole.chunk(group.size())
    if not exchanges_directly(whole, group):
        work: dist.Work = all_gather_flat(whole, slices[rank], group=group, async_op=True)
        return work
    if not whole.numel():
        return SliceExchange([])
    peers, tag = _peers(group), _tag(_GATHER_TAG, slices[rank])
    works = [dist.irecv(slices[peer], group=group, group_src=peer, tag=tag) for peer in peers]
    works += [dist.isend(slices[rank], group=group, group_dst=peer, tag=tag) for peer in peers]
    return SliceExchange(works)


@dataclass
class Reduction:
    """A pending reduce-scatter, whose received slices are summed on wait.

    Attributes:
        whole: What this rank sends, flat.
        received: The peers' slices, in the order of ranks, shape ``[group size - 1, slice]``.
        rank: This rank in the group.
        work: To be waited for.
    """

    whole: Tensor
    received: Tensor
    rank: int
    work: dist.Work

    def finish(self, out: Tensor | None = None) -> Tensor:
        """Wait, and add up in the order of ranks, so that every run adds alike.

        Args:
            out: Where the sum goes, shape ``[slice]``; it may be this rank's slice of ``whole``. A new tensor if None,
                in fp32 where ranks send less.
        """
        self.work.wait()
        slices = list(self.received.unbind(0))
        slices.insert(self.rank, self.whole.chunk(len(slices) + 1)[self.rank])
        if out is None:
            first = slices[0]
            out = torch.empty_like(first, dtype=torch.float32 if first.dtype in _LOW_PRECISION else first.dtype)
        if len(slices) == 1:
            return out.copy_(slices[0])
        if self.rank > 1 and out.data_ptr() == slices[self.rank].data_ptr():
            # It is read after the first sum has been written.
            slices[self.rank] = slices[self.rank].clone()
        if slices[0].dtype in _LOW_PRECISION:
            total = slices[0].float()
            for piece in slices[1:]:
                total += piece
            return out.copy_(total)
        torch.add(slices[0], slices[1], out=out)
        for piece in slices[2:]:
            out += piece
        return out


def scatter_slices(whole: Tensor, *, group: dist.ProcessGroup) -> Reduction:
    """Reduce-scatter ``whole`` by slices. Collective; asynchronous.

    Only where :func:`exchanges_directly`. Sends ``(N-1)/N`` of ``whole``.

    Args:
        whole: Flat, shape ``[group size * slice]``, contiguous; not to be written to before it is finished.
        group: Who takes part.
    """
    size, slices = group.size(), whole.chunk(group.size())
    received = whole.new_empty(size - 1, whole.numel() // size)
    works: list[Any] = []
    if whole.numel():
        peers, tag = _peers(group), _tag(_SCATTER_TAG, slices[0])
        # In the order in which they are added.
        rows = dict(zip(sorted(peers), received.unbind(0), strict=True))
        works = [dist.irecv(rows[peer], group=group, group_src=peer, tag=tag) for peer in peers]
        works += [dist.isend(slices[peer], group=group, group_dst=peer, tag=tag) for peer in peers]
    return Reduction(whole, received, group.rank(), SliceExchange(works))


def _tag(kind: int, message: Tensor) -> int:
    return kind + message.nbytes % _GATHER_TAG


def _peers(group: dist.ProcessGroup) -> list[int]:
    """The other ranks, each rank beginning with its next one: so that not all send to the same one first."""
    rank, size = group.rank(), group.size()
    return [(rank + step) % size for step in range(1, size)]
