"""What islands and the outer server send each other: headers of fixed length, and numbers in one run of bytes.

Nothing is pickled. A header says how many bytes follow, and what is longer than was agreed on is not read.
"""

from __future__ import annotations

import enum
import socket
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_pardist.collectives import as_bytes

#: Magic, kind, islands that counted, generation, bytes that follow.
_HEADER = struct.Struct("!4sBxxxIQQ")
_MAGIC = b"pdo1"
_HELLO = struct.Struct("!IIIIQQddB16s32s")
_DTYPES = (torch.float32, torch.float64)
#: Bytes that are sent at a time.
_PIECE_BYTES = 2**20
#: Longest text of a refusal, in bytes.
TEXT_BYTES = 2000


class Kind(enum.IntEnum):
    """What a message is."""

    HELLO = 1
    BEGIN = 2
    VALUES = 3
    MEET = 4
    FETCH = 5
    MOMENTUM = 6
    LEAVE = 7
    REFUSED = 8
    WAIT = 9


@dataclass(frozen=True)
class Message:
    """A message.

    Attributes:
        kind: What it is.
        generation: Outer steps so far: of the server, or those that a difference was measured after.
        islands: With values, how many islands' differences they were made of.
        payload: Bytes that follow the header.
    """

    kind: Kind
    generation: int = 0
    islands: int = 0
    payload: Tensor | None = None


@dataclass(frozen=True)
class OuterSettings:
    """What all islands of a run have in common.

    Attributes:
        islands: Shares that the data is divided into, and so the most islands there may be.
        ranks: Ranks of an island.
        lr: Step size of the outer optimizer.
        momentum: Its Nesterov momentum.
    """

    islands: int
    ranks: int
    lr: float
    momentum: float


@dataclass(frozen=True)
class IslandPart:
    """What one rank of an island brings to the server.

    Attributes:
        settings: The run's.
        island: Which share of the data is the island's, from 0.
        rank: Of the island.
        numel: Numbers that the rank averages.
        stepped: How many of them, the first ones, outer steps are made for; of the rest the mean is taken.
        dtype: Of those numbers, fp32 or fp64.
        token: Of this start of the island, 16 bytes.
        layout: Digest of names and shapes, 32 bytes.
    """

    settings: OuterSettings
    island: int
    rank: int
    numel: int
    stepped: int
    dtype: torch.dtype
    token: bytes
    layout: bytes

    def packed(self) -> Tensor:
        """As it is sent."""
        one = self.settings
        data = _HELLO.pack(
            one.islands,
            one.ranks,
            self.island,
            self.rank,
            self.numel,
            self.stepped,
            one.lr,
            one.momentum,
            _DTYPES.index(self.dtype),
            self.token,
            self.layout,
        )
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, payload: Tensor | None) -> IslandPart:
        """What was sent.

        Raises:
            ValueError: If it is not that.
        """
        if payload is None or payload.numel() != _HELLO.size:
            raise ValueError("this is no island of the same version of lightning_pardist")
        islands, ranks, island, rank, numel, stepped, lr, momentum, dtype, token, layout = _HELLO.unpack(
            payload.numpy().tobytes()
        )
        if not (island < islands and rank < ranks and stepped <= numel and dtype < len(_DTYPES)):
            raise ValueError(f"island {island} of {islands}, rank {rank} of {ranks} cannot be")
        settings = OuterSettings(islands, ranks, lr, momentum)
        return cls(settings, island, rank, numel, stepped, _DTYPES[dtype], token, layout)


#: Bytes of a packed :class:`IslandPart`.
HELLO_BYTES = _HELLO.size


def send(connection: socket.socket, message: Message) -> None:
    """Send a message.

    Raises:
        OSError: If the other side has gone, or takes nothing for as long as the connection's timeout.
    """
    payload = memoryview(b"") if message.payload is None else as_bytes(message.payload).numpy().data
    header = _HEADER.pack(_MAGIC, message.kind, message.islands, message.generation, len(payload))
    for data in (memoryview(header), payload):
        sent = 0
        while sent < len(data):
            # The timeout is for each piece: how long all of them take is a matter of the link.
            sent += connection.send(data[sent : sent + _PIECE_BYTES])


def receive(connection: socket.socket, *, at_most: int) -> Message:
    """The next message.

    Args:
        connection: To the other side.
        at_most: Bytes that may follow the header.

    Raises:
        OSError: If the other side has gone, or sends nothing for as long as the connection's timeout.
        ValueError: If it sends something else.
    """
    head = _HEADER.unpack(_exactly(connection, _HEADER.size).numpy().tobytes())
    magic, kind, islands, generation, length = head
    if magic != _MAGIC or kind not in set(Kind):
        raise ValueError("the other side does not speak the outer server's protocol")
    if length > max(at_most, TEXT_BYTES):
        raise ValueError(f"the other side announces {length} bytes where at most {at_most} were agreed on")
    payload = _exactly(connection, length) if length else None
    return Message(Kind(kind), generation, islands, payload)


def numbers(message: Message, dtype: torch.dtype, numel: int) -> Tensor:
    """The numbers in a message, flat.

    Raises:
        ValueError: If they are not as many.
    """
    found = torch.empty(0, dtype=dtype) if message.payload is None else message.payload
    if found.numel() * found.element_size() != numel * dtype.itemsize:
        raise ValueError(f"{numel} numbers were agreed on, and {found.numel()} bytes came")
    return found.view(dtype)


def text(message: Message) -> str:
    """The words in a message."""
    return "" if message.payload is None else message.payload.numpy().tobytes().decode(errors="replace")


def refusal(why: str) -> Message:
    """A message that says why there will be no further ones."""
    data = bytearray(why.encode()[:TEXT_BYTES])
    return Message(Kind.REFUSED, payload=torch.frombuffer(data, dtype=torch.uint8) if data else None)


def _exactly(connection: socket.socket, length: int) -> Tensor:
    found = torch.empty(length, dtype=torch.uint8)
    view, have = found.numpy().data, 0
    while have < length:
        count = connection.recv_into(view[have:])
        if count == 0:
            raise ConnectionResetError("the other side has closed the connection")
        have += count
    return found
