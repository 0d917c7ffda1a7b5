"""One packed all-to-all of boxes of many tensors, whatever their dtypes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

#: Bytes at whose multiples every box begins, so that it may be viewed in its dtype.
_ALIGN = 16


@dataclass(frozen=True)
class Parcel:
    """A box that goes to another rank or comes from one.

    Attributes:
        rank: The other one, in the group; this one for a box that stays.
        values: What is sent, or where to put what comes: a view of the box's shape.
    """

    rank: int
    values: Tensor

    @property
    def num_bytes(self) -> int:
        """Room in a message."""
        return -(-self.values.numel() * self.values.element_size() // _ALIGN) * _ALIGN


class PackedExchange:
    """An all-to-all under way, begun by the constructor. Collective over ``group``.

    Every rank lists what it sends and what it receives; between two ranks both lists have one order. Boxes that stay
    are copied when the exchange ends.

    Args:
        outgoing: What this rank sends.
        incoming: Where what it receives goes, boxes of the same shapes and dtypes.
        group: Who takes part.
        device: Of messages.
    """

    def __init__(
        self,
        outgoing: Sequence[Parcel],
        incoming: Sequence[Parcel],
        *,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        rank, size = group.rank(), group.size()
        own = [[parcel.values for parcel in parcels if parcel.rank == rank] for parcels in (outgoing, incoming)]
        self._stays = list(zip(*own, strict=True))
        away = [parcel for parcel in outgoing if parcel.rank != rank]
        self._coming = [parcel for parcel in incoming if parcel.rank != rank]
        splits_out, splits_in = _by_rank(away, size), _by_rank(self._coming, size)
        self.sent_bytes = sum(splits_out)
        message = torch.empty(self.sent_bytes, dtype=torch.uint8, device=device)
        for parcel, room in _rooms(away, splits_out, message):
            room.copy_(parcel.values)
        self._received = torch.empty(sum(splits_in), dtype=torch.uint8, device=device)
        self._splits_in = splits_in
        # Kept until it has gone.
        self._message = message
        self._work = None
        if size > 1:
            self._work = dist.all_to_all_single(
                self._received, message, splits_in, splits_out, group=group, async_op=True
            )

    def finish(self) -> None:
        """Wait for the messages, and put every box where it belongs."""
        if self._work is not None:
            self._work.wait()
        for values, place in self._stays:
            place.copy_(values)
        for parcel, room in _rooms(self._coming, self._splits_in, self._received):
            parcel.values.copy_(room)


def _by_rank(parcels: Sequence[Parcel], size: int) -> list[int]:
    found = [0] * size
    for parcel in parcels:
        found[parcel.rank] += parcel.num_bytes
    return found


def _rooms(parcels: Sequence[Parcel], splits: Sequence[int], message: Tensor) -> list[tuple[Parcel, Tensor]]:
    """Each parcel with its place in a message, in its own dtype and shape."""
    starts = [sum(splits[:rank]) for rank in range(len(splits))]
    found = []
    for parcel in parcels:
        values, start = parcel.values, starts[parcel.rank]
        starts[parcel.rank] += parcel.num_bytes
        room = message[start : start + math.prod(values.shape) * values.element_size()]
        found.append((parcel, room.view(values.dtype).view(values.shape)))
    return found
