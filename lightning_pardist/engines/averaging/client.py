"""Client of the outer server, one per rank of an island."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_pardist.engines.averaging.messages import IslandPart, Kind, Message, numbers, receive, send, text

#: Connecting to the server, in seconds: total limit, timeout of one attempt, pause between attempts.
_REACH_S, _ATTEMPT_S, _RETRY_S = 60.0, 10.0, 0.5
#: Seconds without a message after which the server counts as gone; it sends a keep-alive every second during a wait.
_SILENCE_S = 60.0


@dataclass(frozen=True)
class Meeting:
    """Result of a synchronisation with the server, from which an island continues.

    Attributes:
        values: The parameters after the last outer step, flat.
        generation: Number of outer steps so far.
        islands: Number of islands whose differences the last step averaged; 0 if this island's were not included.
    """

    values: Tensor
    generation: int
    islands: int


class OuterClient:
    """One rank's connection to the outer server; requests block until the server replies.

    Args:
        host: Host of the server.
        port: Port of the server.
        part: Description of this rank and its values, sent when joining.

    Raises:
        ConnectionError: If the server cannot be reached, or the connection is lost.
        ValueError: If the server refuses this island.
    """

    def __init__(self, host: str, port: int, part: IslandPart) -> None:
        self._part, self._where = part, f"{host}:{port}"
        self.generation = 0
        self._connection = self._connect(host, port)
        self._connection.settimeout(_SILENCE_S)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def join(self, values: Tensor, momentum: Callable[[], Tensor]) -> Meeting:
        """Join the run and return its current parameters; the first island initialises the server with its own.

        Args:
            values: This rank's parameters, flat.
            momentum: Returns the outer optimizer's momentum of the values that it steps on, flat.
        """
        answer = self._ask(Message(Kind.HELLO, payload=self._part.packed()))
        while answer.kind == Kind.BEGIN:
            state = momentum() if self._part.settings.momentum else values.new_empty(0)
            answer = self._ask(Message(Kind.BEGIN, payload=torch.cat([values, state])))
        return self._meeting(answer)

    def meet(self, differences: Tensor) -> Meeting:
        """Send the differences since the last synchronisation, and wait for the outer step."""
        return self._meeting(self._ask(Message(Kind.MEET, self.generation, payload=differences)))

    def fetch(self) -> Meeting:
        """Return the server's current parameters."""
        return self._meeting(self._ask(Message(Kind.FETCH)))

    def momentum(self) -> tuple[Tensor, int]:
        """Return the outer optimizer's flat momentum and its generation, that of the last exchange if available."""
        answer = self._ask(Message(Kind.MOMENTUM, self.generation))
        return numbers(answer, self._part.dtype, self._part.stepped), answer.generation

    def leave(self) -> None:
        """Leave the run and close the connection; the other islands continue without waiting for this one."""
        try:
            send(self._connection, Message(Kind.LEAVE))
        except OSError as error:
            raise self._connection_error(error) from error
        self.close()

    def close(self) -> None:
        """Close the connection; without a preceding :meth:`leave`, the server treats the island as failed."""
        self._connection.close()

    def _connect(self, host: str, port: int) -> socket.socket:
        deadline = time.monotonic() + _REACH_S
        while True:
            try:
                return socket.create_connection((host, port), timeout=_ATTEMPT_S)
            except OSError as error:
                if time.monotonic() + _RETRY_S > deadline:
                    raise ConnectionError(
                        f"The outer server cannot be reached at {self._where} within {_REACH_S:g} s ({error})."
                        f" Start it with `pardist outer-server --port {port}`, and set outer_server to where it is."
                    ) from error
                time.sleep(_RETRY_S)

    def _ask(self, message: Message) -> Message:
        part = self._part
        try:
            send(self._connection, message)
            while (answer := receive(self._connection, at_most=part.numel * part.dtype.itemsize)).kind == Kind.WAIT:
                pass
        except OSError as error:
            raise self._connection_error(error) from error
        if answer.kind == Kind.REFUSED:
            raise ValueError(f"The outer server at {self._where} refused this island: {text(answer)}.")
        return answer

    def _meeting(self, answer: Message) -> Meeting:
        self.generation = answer.generation
        values = numbers(answer, self._part.dtype, self._part.numel)
        return Meeting(values, answer.generation, answer.islands)

    def _connection_error(self, error: OSError) -> ConnectionError:
        return ConnectionError(
            f"The connection to the outer server at {self._where} was lost ({error}): the server has ended, or another"
            f" job has connected as island {self._part.island}. Restart the server, and the islands from their"
            " checkpoints."
        )
