"""Wire format between islands and the outer server: a fixed-length header followed by raw tensor bytes.

Nothing is pickled. The header contains the payload length, and a payload above the expected length is not read.
"""

from __future__ import annotations

import enum
import socket
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_pardist.collectives import as_bytes

#: Magic, kind, number of averaged islands, generation, payload bytes.
_HEADER = struct.Struct("!4sBxxxIQQ")
_MAGIC = b"pdo1"
_HELLO = struct.Struct("!IIIIQQddB16s32s")
_DTYPES = (torch.float32, torch.float64)
#: Bytes per call of ``socket.send``.
_PIECE_BYTES = 2**20
#: Maximum length of a refusal's text, in bytes.
TEXT_BYTES = 2000


class Kind(enum.IntEnum):
    """Message type."""

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
    """A message of the outer server's protocol.

    Attributes:
        kind: Message type.
        generation: Number of outer steps: the server's, or the one that the sent differences are relative to.
        islands: With ``VALUES``, the number of islands whose differences the last outer step averaged.
        payload: Bytes after the header.
    """

    kind: Kind
    generation: int = 0
    islands: int = 0
    payload: Tensor | None = None


@dataclass(frozen=True)
class OuterSettings:
    """Settings that must be equal on all islands of a run.

    Attributes:
        islands: Number of shards of the data, and so the maximum number of islands.
        ranks: Ranks per island.
        lr: Learning rate of the outer optimizer.
        momentum: Nesterov momentum of the outer optimizer.
    """

    islands: int
    ranks: int
    lr: float
    momentum: float


@dataclass(frozen=True)
class IslandPart:
    """Description of one rank of an island, sent to the server when it joins.

    Attributes:
        settings: Settings of the run.
        island: Index of the island and of its data shard, from 0.
        rank: Rank within the island.
        numel: Number of values that the rank averages.
        stepped: Number of leading values that the outer optimizer steps on; the remaining ones are averaged only.
        dtype: Dtype of the values, fp32 or fp64.
        token: Identifier of this start of the island, 16 bytes.
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
        """Return the payload of a ``HELLO`` message."""
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
        """Parse the payload of a ``HELLO`` message.

        Raises:
            ValueError: If its length is wrong or its fields are inconsistent.
        """
        if payload is None or payload.numel() != _HELLO.size:
            raise ValueError("the island does not run the same version of lightning_pardist as the server")
        islands, ranks, island, rank, numel, stepped, lr, momentum, dtype, token, layout = _HELLO.unpack(
            payload.numpy().tobytes()
        )
        if not (island < islands and rank < ranks and stepped <= numel and dtype < len(_DTYPES)):
            raise ValueError(f"island {island} of {islands}, rank {rank} of {ranks} is not valid")
        settings = OuterSettings(islands, ranks, lr, momentum)
        return cls(settings, island, rank, numel, stepped, _DTYPES[dtype], token, layout)


#: Bytes of a packed :class:`IslandPart`.
HELLO_BYTES = _HELLO.size


def send(connection: socket.socket, message: Message) -> None:
    """Send a message.

    Raises:
        OSError: If the peer has closed the connection, or accepts no data within the connection's timeout.
    """
    payload = memoryview(b"") if message.payload is None else as_bytes(message.payload).numpy().data
    header = _HEADER.pack(_MAGIC, message.kind, message.islands, message.generation, len(payload))
    for data in (memoryview(header), payload):
        sent = 0
        while sent < len(data):
            # The timeout applies to each piece: the total time depends on the bandwidth.
            sent += connection.send(data[sent : sent + _PIECE_BYTES])


def receive(connection: socket.socket, *, at_most: int) -> Message:
    """Receive the next message.

    Args:
        connection: Connection to the peer.
        at_most: Maximum length of the payload, in bytes; a text of up to :data:`TEXT_BYTES` is always accepted.

    Raises:
        OSError: If the peer has closed the connection, or sends no data within the connection's timeout.
        ValueError: If the header is invalid or announces a longer payload.
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
    """Return a message's payload as a flat tensor.

    Raises:
        ValueError: If the payload does not have ``numel`` elements of ``dtype``.
    """
    found = torch.empty(0, dtype=dtype) if message.payload is None else message.payload
    if found.numel() * found.element_size() != numel * dtype.itemsize:
        raise ValueError(f"{numel} numbers were agreed on, and {found.numel()} bytes came")
    return found.view(dtype)


def text(message: Message) -> str:
    """Return a message's payload as text."""
    return "" if message.payload is None else message.payload.numpy().tobytes().decode(errors="replace")


def refusal(why: str) -> Message:
    """Return a ``REFUSED`` message with the reason, truncated to :data:`TEXT_BYTES`."""
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
