"""Messages between workers and servers: a header of fixed length, and tensors in one run of bytes.

A message is a header of eight 64-bit integers (:class:`Kind`, index of the optimizer, number of bytes that follow,
numbers) and, if there are any, that many bytes. Both sides have the shapes and dtypes of a share's parameters, so the
bytes start with what varies: whether each parameter is sent whole, as rows or not at all. Nothing is pickled.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pardist.collectives import as_bytes

_HEADER = 8
#: Tensors start at multiples of this many bytes, so that they can be viewed in any dtype.
_ALIGN = 16
#: Markers in place of a number of rows.
WHOLE, ABSENT = -1, -2


class Kind(enum.IntEnum):
    """Kind of a message."""

    UPDATE = 1
    TICK = 2
    MEET = 3
    LEAVE = 4
    VALUES = 5
    FAILED = 6
    BEGIN = 7
    STATE = 8
    OUTCOME = 9
    REST = 10
    WAIT = 11
    GONE = 12


#: Attribute of exceptions raised by a :class:`Connection`: its peer is gone, or did not receive in time.
_BROKEN = "_pardist_broken_line"


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        kind: Kind of the message.
        optimizer: Index of the optimizer whose parameters it concerns.
        numbers: Up to five integers, whose meaning depends on the kind.
        payload: Bytes that follow the header.
    """

    kind: Kind
    optimizer: int = 0
    numbers: tuple[int, ...] = ()
    payload: Tensor | None = None


@contextmanager
def _marked() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        error.__dict__[_BROKEN] = True
        raise


def is_broken_connection(error: BaseException) -> bool:
    """Return whether an exception was raised by a :class:`Connection`: its peer is gone, or did not receive in time."""
    return _BROKEN in error.__dict__


class Connection:
    """Messages under one tag between this rank and another; gloo keeps their order.

    Args:
        group: gloo group used for messages only.
        peer: The other rank's number in the group.
        tag: The same on both sides, and used by nothing else between the two in this direction.
        timeout_s: Timeout of waiting until sent messages have arrived; the peer waits for them.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, tag: int, timeout_s: float) -> None:
        self._group, self._peer, self._tag = group, peer, tag
        self._timeout_s = timeout_s
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def send(self, message: Message) -> int:
        """Start to send a message, after earlier ones are complete. Returns the number of bytes.

        Raises:
            RuntimeError: If the connection is closed, or the timeout expires.
        """
        self.flush()
        payload = message.payload
        size = 0 if payload is None else payload.numel()
        fields = [message.kind, message.optimizer, size, *message.numbers]
        header = torch.zeros(_HEADER, dtype=torch.int64)
        header[: len(fields)] = torch.tensor(fields)
        for part in (header, payload):
            if part is not None and part.numel():
                with _marked():
                    self._sending.append((self._group.send([part], self._peer, self._tag), part))
        return size + header.numel() * header.element_size()

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything is sent, at most for a timeout, by default the line's.

        Raises:
            RuntimeError: If the connection is closed, or the timeout expires.
        """
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        while self._sending:
            # The buffer stays alive as long as it may be read.
            with _marked():
                self._sending[0][0].wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            self._sending.pop(0)

    def receive(self, timeout_s: float | None = None) -> Message:
        """Wait for the next message.

        Args:
            timeout_s: Timeout in seconds; as long as the connection lives if None.

        Raises:
            RuntimeError: If the connection is closed, or the timeout expires.
        """
        header = torch.empty(_HEADER, dtype=torch.int64)
        self._receive(header, timeout_s)
        kind, optimizer, size, *numbers = header.tolist()
        payload = None
        if size:
            payload = torch.empty(size, dtype=torch.uint8)
            self._receive(payload, timeout_s)
        return Message(Kind(kind), optimizer, tuple(numbers), payload)

    def _receive(self, into: Tensor, timeout_s: float | None) -> None:
        with _marked():
            work = self._group.recv([into], self._peer, self._tag)
            if timeout_s is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=timeout_s))


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Pack tensors one after the other into one buffer in host memory."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += _aligned(tensor.numel() * tensor.element_size())
    packed = torch.empty(end, dtype=torch.uint8)
    for tensor, offset in zip(tensors, offsets, strict=True):
        data = as_bytes(tensor.detach().contiguous())
        packed[offset : offset + data.numel()].copy_(data)
    return packed


class Unpacked:
    """Reads tensors from a buffer of :func:`pack`, one after the other, sharing its memory."""

    def __init__(self, packed: Tensor | None) -> None:
        self._packed = torch.empty(0, dtype=torch.uint8) if packed is None else packed
        self._at = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the next tensor."""
        size = math.prod(shape) * dtype.itemsize
        data = self._packed[self._at : self._at + size]
        self._at += _aligned(size)
        return data.view(dtype).view(tuple(shape))


def pack_parts(first: Sequence[Tensor], parts: Sequence[Tensor | None]) -> Tensor:
    """Pack tensors, some of which may be sparse or left out.

    Args:
        first: Tensors that precede them.
        parts: Dense tensors, row-sparse ones (such as gradients of ``nn.Embedding(sparse=True)``), or None.
    """
    sizes, tensors = [], []
    for part in parts:
        if part is None:
            sizes.append(ABSENT)
        elif part.is_sparse and part.sparse_dim() == 1:
            part = part.coalesce()
            sizes.append(part.indices().shape[1])
            tensors += [part.indices(), part.values()]
        else:
            sizes.append(WHOLE)
            tensors.append(part.to_dense() if part.is_sparse else part)
    return pack([*first, torch.tensor(sizes, dtype=torch.int64), *tensors])


def unpack_parts(packed: Unpacked, likes: Sequence[Tensor]) -> list[Tensor | None]:
    """Unpack what :func:`pack_parts` packed after ``first``, for parameters like these."""
    found: list[Tensor | None] = []
    for size, like in zip(packed.take([len(likes)], torch.int64).tolist(), likes, strict=True):
        if size == ABSENT:
            found.append(None)
        elif size == WHOLE:
            found.append(packed.take(like.shape, like.dtype))
        else:
            rows = packed.take([1, size], torch.int64)
            values = packed.take([size, *like.shape[1:]], like.dtype)
            found.append(torch.sparse_coo_tensor(rows, values, like.shape, is_coalesced=True, check_invariants=False))
    return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
