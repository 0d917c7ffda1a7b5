"""All-gather and reduce-scatter of slices of flat tensors without extra copies.

[Note: gloo]
On the host, gloo's reduce-scatter sends as much as an all-reduce, and its all-gather receives into an internal buffer
that is copied afterwards. Point-to-point messages avoid both: every rank sends each peer only that peer's slice, and
receives without an extra buffer. All ranks launch the same exchanges in the same order, so that messages with the same
tag match in the order in which they were sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pardist.collectives import Message, all_gather_flat, irecv, isend
from lightning_pardist.compat.fake_group import backend_of

#: Message tags, unlikely to collide with those of users' own messages (0 and up). The message size is added: gloo ends
#: a process that receives more than it expects, whereas messages with different tags never match, and the watchdog
#: reports where ranks wait.
_GATHER_TAG, _SCATTER_TAG = 1 << 29, 1 << 30
_LOW_PRECISION = (torch.bfloat16, torch.float16)


def exchanges_directly(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether slices of ``tensor`` are exchanged by sends and receives over ``group``, see [Note: gloo]."""
    # A group may have one backend per device type: "cpu:gloo,cuda:nccl".
    return tensor.device.type == "cpu" and "gloo" in backend_of(group)


class SliceExchange(dist.Work):
    """Work handle for a set of sends and receives.

    Args:
        messages: The messages.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        super().__init__()
        self._messages = list(messages)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until all messages are sent and received, with the group's timeout.

        Raises:
            RuntimeError: If a peer has failed or the timeout expires.
        """
        messages, self._messages = self._messages, []
        for message in messages:
            message.wait()
        return True


def gather_slices(whole: Tensor, *, group: dist.ProcessGroup) -> dist.Work:
    """All-gather slices in place. Collective over ``group``; asynchronous.

    Args:
        whole: Flat, contiguous, shape ``[group size * slice]``; this rank's slice contains its values.
        group: The participating ranks.

    Returns:
        The work handle to wait for before ``whole`` is read or this rank's slice is written.
    """
    rank, slices = group.rank(), whole.chunk(group.size())
    if not exchanges_directly(whole, group):
        work: dist.Work = all_gather_flat(whole, slices[rank], group=group, async_op=True)
        return work
    if not whole.numel():
        return SliceExchange([])
    peers, tag = _peers(group), _tag(_GATHER_TAG, slices[rank])
    messages = [irecv(slices[peer], peer, group=group, tag=tag) for peer in peers]
    messages += [isend(slices[rank], peer, group=group, tag=tag) for peer in peers]
    return SliceExchange(messages)


@dataclass
class Reduction:
    """A pending reduce-scatter; :meth:`finish` waits and sums the received slices.

    Attributes:
        whole: This rank's flat input.
        received: The peers' contributions to this rank's slice, in rank order, shape ``[group size - 1, slice]``.
        rank: This rank in the group.
        work: Handle of the messages.
    """

    whole: Tensor
    received: Tensor
    rank: int
    work: dist.Work

    def finish(self, out: Tensor | None = None) -> Tensor:
        """Wait, then sum in the order of ranks, which makes the sum deterministic.

        Args:
            out: Output, shape ``[slice]``; it may be this rank's slice of ``whole``. A new tensor if None, in fp32 if
                the input is bf16 or fp16.
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
            # This slice is read after the first partial sum has overwritten ``out``.
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
    """Reduce-scatter ``whole`` by slices. Collective over ``group``; asynchronous.

    Only for tensors and groups for which :func:`exchanges_directly` is true. Sends ``(N-1)/N`` of ``whole``.

    Args:
        whole: Flat, contiguous, shape ``[group size * slice]``; must not be written before the reduction is finished.
        group: The participating ranks.
    """
    size, slices = group.size(), whole.chunk(group.size())
    received = whole.new_empty(size - 1, whole.numel() // size)
    messages: list[Message] = []
    if whole.numel():
        peers, tag = _peers(group), _tag(_SCATTER_TAG, slices[0])
        # One row per peer, in rank order, the order of summation.
        rows = dict(zip(sorted(peers), received.unbind(0), strict=True))
        messages = [irecv(rows[peer], peer, group=group, tag=tag) for peer in peers]
        messages += [isend(slices[peer], peer, group=group, tag=tag) for peer in peers]
    return Reduction(whole, received, group.rank(), SliceExchange(messages))


def _tag(kind: int, message: Tensor) -> int:
    return kind + message.nbytes % _GATHER_TAG


def _peers(group: dist.ProcessGroup) -> list[int]:
    """Return the other ranks, starting after this one, so that not all ranks send to the same peer first."""
    rank, size = group.rank(), group.size()
    return [(rank + step) % size for step in range(1, size)]
