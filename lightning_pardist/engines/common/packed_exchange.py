"""A single all-to-all of packed boxes of many tensors, of any dtypes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

#: Alignment of boxes in bytes, so that each can be viewed in its dtype.
_ALIGN = 16


@dataclass(frozen=True)
class BoxTransfer:
    """A box to send to, or receive from, another rank.

    Attributes:
        rank: The peer rank in the group; this rank for a local copy.
        values: The tensor to send, or to receive into: a view of the box's shape.
    """

    rank: int
    values: Tensor

    @property
    def num_bytes(self) -> int:
        """Aligned size in a message."""
        return -(-self.values.numel() * self.values.element_size() // _ALIGN) * _ALIGN


class PackedExchange:
    """An asynchronous all-to-all of boxes, launched by the constructor. Collective over ``group``.

    Each rank lists the boxes it sends and receives, in the same order on both ranks of each pair. Boxes for the rank
    itself are copied in :meth:`finish`.

    Args:
        outgoing: Boxes that this rank sends.
        incoming: Boxes that this rank receives into, of the same shapes and dtypes as those sent.
        group: The participating ranks.
        device: Device of the messages.
    """

    def __init__(
        self,
        outgoing: Sequence[BoxTransfer],
        incoming: Sequence[BoxTransfer],
        *,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        rank, size = group.rank(), group.size()
        own = [[parcel.values for parcel in parcels if parcel.rank == rank] for parcels in (outgoing, incoming)]
        self._local_copies = list(zip(*own, strict=True))
        away = [parcel for parcel in outgoing if parcel.rank != rank]
        self._coming = [parcel for parcel in incoming if parcel.rank != rank]
        splits_out, splits_in = _by_rank(away, size), _by_rank(self._coming, size)
        self.sent_bytes = sum(splits_out)
        message = torch.empty(self.sent_bytes, dtype=torch.uint8, device=device)
        for parcel, room in _message_views(away, splits_out, message):
            room.copy_(parcel.values)
        self._received = torch.empty(sum(splits_in), dtype=torch.uint8, device=device)
        self._splits_in = splits_in
        # Referenced until it has been sent.
        self._message = message
        self._work = None
        if size > 1:
            self._work = dist.all_to_all_single(
                self._received, message, splits_in, splits_out, group=group, async_op=True
            )

    def finish(self) -> None:
        """Wait for the messages, and copy every box to its destination."""
        if self._work is not None:
            self._work.wait()
        for values, place in self._local_copies:
            place.copy_(values)
        for parcel, room in _message_views(self._coming, self._splits_in, self._received):
            parcel.values.copy_(room)


def _by_rank(parcels: Sequence[BoxTransfer], size: int) -> list[int]:
    found = [0] * size
    for parcel in parcels:
        found[parcel.rank] += parcel.num_bytes
    return found


def _message_views(
    parcels: Sequence[BoxTransfer], splits: Sequence[int], message: Tensor
) -> list[tuple[BoxTransfer, Tensor]]:
    """Return each parcel with its view of a message, in the box's dtype and shape."""
    starts = [sum(splits[:rank]) for rank in range(len(splits))]
    found = []
    for parcel in parcels:
        values, start = parcel.values, starts[parcel.rank]
        starts[parcel.rank] += parcel.num_bytes
        room = message[start : start + math.prod(values.shape) * values.element_size()]
        found.append((parcel, room.view(values.dtype).view(values.shape)))
    return found
