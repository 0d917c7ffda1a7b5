"""What workers and servers send each other: a header of fixed length, and tensors in one run of bytes.

A message is a header of eight 64-bit integers (:class:`Kind`, index of the optimizer, bytes that follow, numbers) and,
if there are any, that many bytes. Both sides know the shapes and dtypes of a share's parameters, so bytes begin with
what they cannot know: for each parameter whether it comes whole, in rows or not at all. Nothing is pickled.
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
#: Tensors begin at multiples of this many bytes, so that they can be viewed in any dtype.
_ALIGN = 16
#: In place of a number of rows.
WHOLE, ABSENT = -1, -2


class Kind(enum.IntEnum):
    """What a message is."""

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


#: On an exception: it is of a line, whose other side is gone, or did not listen in time.
_BROKEN = "_pardist_broken_line"


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        kind: What it is.
        optimizer: Index of the optimizer whose parameters it is about.
        numbers: Up to five integers, see who sends them.
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


def is_broken_line(error: BaseException) -> bool:
    """Whether a :class:`Line` has raised an exception: the other side is gone, or did not listen in time."""
    return _BROKEN in error.__dict__


class Line:
    """Messages of one kind of conversation between this rank and another; gloo keeps their order.

    Args:
        group: A gloo group that nothing else but messages uses.
        peer: The other's rank in it.
        tag: The same on both sides, of nobody else between the two in this direction.
        timeout_s: Bound on waiting until what was sent has arrived: the other side waits for it.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, tag: int, timeout_s: float) -> None:
        self._group, self._peer, self._tag = group, peer, tag
        self._timeout_s = timeout_s
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def send(self, message: Message) -> int:
        """Begin to send; what was sent before is complete then. Returns the bytes.

        Raises:
            RuntimeError: If the connection is closed, or time is up.
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
        """Wait until everything is sent, for so many seconds at most, by default the line's.

        Raises:
            RuntimeError: If the connection is closed, or time is up.
        """
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        while self._sending:
            # Memory stays alive for as long as it may be read.
            with _marked():
                self._sending[0][0].wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            self._sending.pop(0)

    def receive(self, timeout_s: float | None = None) -> Message:
        """Wait for the next message.

        Args:
            timeout_s: Seconds at most; as long as the connection lives if None.

        Raises:
            RuntimeError: If the connection is closed, or time is up.
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
    """The memory of some tensors behind each other, in host memory."""
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
    """Takes tensors out of what :func:`pack` made, one after the other, sharing its memory."""

    def __init__(self, packed: Tensor | None) -> None:
        self._packed = torch.empty(0, dtype=torch.uint8) if packed is None else packed
        self._at = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next tensor."""
        size = math.prod(shape) * dtype.itemsize
        data = self._packed[self._at : self._at + size]
        self._at += _aligned(size)
        return data.view(dtype).view(tuple(shape))


def pack_parts(first: Sequence[Tensor], parts: Sequence[Tensor | None]) -> Tensor:
    """Pack tensors of which some are sparse or left out.

    Args:
        first: What comes before them.
        parts: Dense ones, sparse ones of rows (as ``nn.Embedding(sparse=True)`` makes gradients), or None.
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
    """What :func:`pack_parts` packed behind ``first``, for parameters like these."""
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
