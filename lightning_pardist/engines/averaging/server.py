"""The outer server: holds the islands' shared parameters, and makes an outer step from the differences of each round.

A round is the time between two outer steps. It ends when every connected island has sent its differences, or a timeout
after the first island has: a late island receives the current parameters instead. Islands are independent jobs, so a
failed island is only a closed connection.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from lightning_pardist.engines.averaging.messages import (
    HELLO_BYTES,
    IslandPart,
    Kind,
    Message,
    OuterSettings,
    numbers,
    receive,
    refusal,
    send,
)

_log = logging.getLogger(__name__)
#: Seconds within which a new connection must send its ``HELLO``, and a reply must make progress.
_PATIENCE_S = 60.0
#: TCP keep-alive: idle seconds before the first probe and between probes, and number of probes.
_KEEPALIVE_S, _KEEPALIVE_COUNT = 10, 3


@dataclass(eq=False)
class _Island:
    """A connected island.

    Attributes:
        token: Identifier of the island's start.
        connections: Connection of each rank.
        ready: Ranks that have received the parameters, or are about to.
        differences: Differences of the current round, by rank.
        counted: Whether the island's differences were part of the last outer step.
    """

    token: bytes
    connections: dict[int, socket.socket] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    differences: dict[int, Tensor] = field(default_factory=dict)
    counted: bool = False


class _Part:
    """Parameters after the last outer step and outer optimizer state, for one rank index of all islands."""

    def __init__(self, part: IslandPart, values: Tensor, momentum: Tensor) -> None:
        self.like = part
        self.values = values
        self._stepped = nn.Parameter(values[: part.stepped])
        one = part.settings
        self._sgd = torch.optim.SGD([self._stepped], lr=one.lr, momentum=one.momentum, nesterov=one.momentum > 0)
        if one.momentum:
            self._sgd.state[self._stepped]["momentum_buffer"] = momentum
        #: Momentum before the last step.
        self.momentum_before: Tensor | None = None

    @property
    def momentum(self) -> Tensor:
        """Momentum of the values that the outer optimizer steps on."""
        found: Tensor | None = self._sgd.state[self._stepped].get("momentum_buffer")
        return torch.zeros_like(self._stepped.data) if found is None else found

    @torch.no_grad()
    def step(self, differences: list[Tensor]) -> None:
        """Make an outer step on the mean of the islands' differences."""
        mean = differences[0].clone()
        for other in differences[1:]:
            mean += other
        mean /= len(differences)
        if self.like.settings.momentum:
            self.momentum_before = self.momentum.clone()
        # A copy: another thread may still be sending the old values.
        self.values = self.values.clone()
        self._stepped.data = self.values[: self.like.stepped]
        self._stepped.grad = mean[: self.like.stepped]
        self._sgd.step()
        self._stepped.grad = None
        self.values[self.like.stepped :] -= mean[self.like.stepped :]


class OuterServer:
    """Server that makes outer steps for islands, which may join and leave at any time.

    The first island initialises the parameters. An island that joins later receives those of the last outer step at the
    end of the current round, in step with the others. When the last island has left regularly, the state is dropped and
    the next island may start another run; if an island has failed, the state is kept for its restart.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 for any free one.
        timeout_s: Seconds after the first island's differences at which a round ends without the missing islands.

    Raises:
        OSError: If the port is in use, or the address is not one of this host's.

    Attributes:
        generation: Number of outer steps so far.
    """

    def __init__(self, host: str, port: int, *, timeout_s: float = 60.0) -> None:
        self.timeout_s = timeout_s
        self.generation = 0
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        #: Guards everything below; notified on every change of state.
        self._changed = threading.Condition()
        self._settings: OuterSettings | None = None
        self._islands: dict[int, _Island] = {}
        self._parts: dict[int, _Part] = {}
        self._initializing_island: _Island | None = None
        self._last_count = 0
        #: Islands that have failed and not reconnected.
        self._failed_islands: set[int] = set()
        self._closed = False
        self._ends_at: float | None = None

    def serve(self) -> None:
        """Accept connections until :meth:`close`, each handled by its own thread."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                # A connection that was aborted before accept(), or too many open files.
                _log.warning("a connection could not be accepted: %s", error)
                time.sleep(0.1)
                continue
            threading.Thread(target=self._serve_connection, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """Stop the server and shut down the connections of all islands."""
        self._closed = True
        # A thread blocked in accept() would keep the port in use.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._changed:
            for island in list(self._islands.values()):
                _shut_down_connections(island)

    # --- connection of one rank, in its own thread ----------------------------------------------------------------

    def _serve_connection(self, connection: socket.socket) -> None:
        part: IslandPart | None = None
        island: _Island | None = None
        try:
            _keep_alive(connection)
            connection.settimeout(_PATIENCE_S)
            part = IslandPart.unpacked(receive(connection, at_most=HELLO_BYTES).payload)
            island = self._join(part, connection)
            self._send_weights(part, island, connection)
            while self._answer(part, island, connection):
                pass
        except ValueError as error:
            with contextlib.suppress(OSError):
                send(connection, refusal(str(error)))
        except OSError as error:
            if part is not None:
                _log.info("island %d, rank %d: %s", part.island, part.rank, error)
        finally:
            if part is not None and island is not None:
                self._remove_island(part, island)
            connection.close()

    def _join(self, part: IslandPart, connection: socket.socket) -> _Island:
        with self._changed:
            if self._settings is not None and not self._islands and not self._parts:
                self._settings = None
            if self._settings is None:
                self._settings = part.settings
            elif part.settings != self._settings:
                raise ValueError(
                    f"this island has {part.settings}, but the islands before it have {self._settings}. Use the same"
                    " settings for all islands, or restart the server"
                )
            island = self._islands.get(part.island)
            if island is not None and island.token != part.token:
                _log.info("island %d has connected again: its earlier connections are closed", part.island)
                self._forget(part.island, island)
                island = None
            if island is None:
                island = self._islands[part.island] = _Island(part.token)
            island.connections[part.rank] = connection
            self._failed_islands.discard(part.island)
            return island

    def _send_weights(self, part: IslandPart, island: _Island, connection: socket.socket) -> None:
        """Send a rank the current parameters; from the first island's ranks, receive them first."""
        while self._must_initialize(part, island, connection):
            send(connection, Message(Kind.BEGIN))
            momentum = part.stepped if part.settings.momentum else 0
            begun = receive(connection, at_most=(part.numel + momentum) * part.dtype.itemsize)
            values, state = numbers(begun, part.dtype, part.numel + momentum).split([part.numel, momentum])
            with self._changed:
                if self._initializing_island is island:
                    self._parts[part.rank] = _Part(part, values.clone(), state.clone())
                    self._changed.notify_all()
        with self._changed:
            begun_at = self.generation
            while (
                begun_at
                and self.generation == begun_at
                and not island.ready
                and self._is_connected(part, island)
                and any(other.ready for other in self._islands.values() if other is not island)
            ):
                self._wait(connection)
                self._end_round_if_due()
            self._require_connected(part, island)
            island.ready.add(part.rank)
            values_now = self._values(part)
        send(connection, values_now)

    def _must_initialize(self, part: IslandPart, island: _Island, connection: socket.socket) -> bool:
        """Wait until the parameters are initialised; return True earlier if this rank has to initialise its part.

        Raises:
            ValueError: If the server's parameters belong to another module.
        """
        with self._changed:
            while self._is_connected(part, island) and len(self._parts) < part.settings.ranks:
                if self._initializing_island is None:
                    # Drop the parts of an island that failed before it had initialised all of them.
                    self._parts.clear()
                    self._initializing_island = island
                if self._initializing_island is island and part.rank not in self._parts:
                    return True
                self._wait(connection)
            self._require_connected(part, island)
            there = self._parts[part.rank].like
            if (there.layout, there.numel, there.dtype) != (part.layout, part.numel, part.dtype):
                raise ValueError("this island's parameters differ from the server's: names, shapes or dtypes")
        return False

    def _answer(self, part: IslandPart, island: _Island, connection: socket.socket) -> bool:
        """Handle one request; return whether the connection stays open."""
        # No timeout between requests, since a rank trains for an arbitrary time; TCP keep-alive detects a lost host.
        connection.settimeout(None)
        asked = receive(connection, at_most=part.numel * part.dtype.itemsize)
        connection.settimeout(_PATIENCE_S)
        if asked.kind == Kind.MEET:
            answer = self._meet(part, island, connection, asked.generation, numbers(asked, part.dtype, part.numel))
        elif asked.kind == Kind.FETCH:
            with self._changed:
                answer = self._values(part)
        elif asked.kind == Kind.MOMENTUM:
            with self._changed:
                held, now = self._parts[part.rank], self.generation
                # The momentum at the island's generation, if at most one outer step has been made since.
                before = asked.generation == now - 1 and held.momentum_before is not None
                momentum = held.momentum_before if before else held.momentum.clone()
                answer = Message(Kind.MOMENTUM, asked.generation if before else now, payload=momentum)
        elif asked.kind == Kind.LEAVE:
            self._leave(part, island)
            return False
        else:
            raise ValueError(f"the server does not handle {asked.kind.name} messages")
        send(connection, answer)
        return True

    def _meet(
        self, part: IslandPart, island: _Island, connection: socket.socket, generation: int, differences: Tensor
    ) -> Message:
        if not torch.isfinite(differences).all():
            raise ValueError("its differences contain NaN or infinity, which would spread to all islands")
        with self._changed:
            if generation != self.generation:
                return replace(self._values(part), islands=0)
            island.differences[part.rank] = differences
            if self._ends_at is None and self._is_complete(island):
                self._ends_at = time.monotonic() + self.timeout_s
            self._end_round_if_due()
            while self.generation == generation and self._is_connected(part, island):
                self._wait(connection)
                self._end_round_if_due()
            self._require_connected(part, island)
            found = self._values(part)
            return found if island.counted else replace(found, islands=0)

    def _leave(self, part: IslandPart, island: _Island) -> None:
        with self._changed:
            if not self._is_connected(part, island):
                return
            island.connections.pop(part.rank, None)
            if island.connections:
                return
            del self._islands[part.island]
            if not self._islands and self._failed_islands:
                _log.info(
                    "weights are kept for islands that died: %s", ", ".join(map(str, sorted(self._failed_islands)))
                )
            elif not self._islands:
                _log.info("the last island has finished after %d outer steps", self.generation)
                self._parts, self._settings, self.generation = {}, None, 0
                self._initializing_island = None
            self._end_round_if_due()
            self._changed.notify_all()

    def _remove_island(self, part: IslandPart, island: _Island) -> None:
        """Handle a lost connection: remove the whole island, whose differences are incomplete without this rank."""
        with self._changed:
            if part.rank not in island.connections or not self._is_connected(part, island):
                return
            _log.info("island %d has gone", part.island)
            self._forget(part.island, island)
            self._failed_islands.add(part.island)
            self._end_round_if_due()
            self._changed.notify_all()

    # --- called with the lock held --------------------------------------------------------------------------------

    def _wait(self, connection: socket.socket) -> None:
        """Send a ``WAIT`` message as a keep-alive, and wait for a change of state for at most a second.

        Raises:
            OSError: If the peer has closed the connection.
        """
        _require_open(connection)
        send(connection, Message(Kind.WAIT))
        self._changed.wait(1.0 if self._ends_at is None else min(1.0, max(0.0, self._ends_at - time.monotonic())))

    def _is_connected(self, part: IslandPart, island: _Island) -> bool:
        return self._islands.get(part.island) is island

    def _require_connected(self, part: IslandPart, island: _Island) -> None:
        if not self._is_connected(part, island):
            raise ConnectionResetError("the island has been disconnected")

    def _forget(self, number: int, island: _Island) -> None:
        del self._islands[number]
        if self._initializing_island is island and len(self._parts) < (self._settings.ranks if self._settings else 0):
            self._initializing_island = None
        _shut_down_connections(island)

    def _values(self, part: IslandPart) -> Message:
        return Message(Kind.VALUES, self.generation, self._last_count, self._parts[part.rank].values)

    def _is_complete(self, island: _Island) -> bool:
        return self._settings is not None and len(island.differences) == self._settings.ranks

    def _end_round_if_due(self) -> None:
        """Make the outer step if all connected islands have sent their differences, or the round has timed out."""
        complete = {number: island for number, island in self._islands.items() if self._is_complete(island)}
        late = {number for number, island in self._islands.items() if island.ready and number not in complete}
        if self.generation == 0 and self._settings is not None:
            # The first round also waits for islands that have not connected yet.
            late |= set(range(self._settings.islands)) - set(complete)
        if not complete:
            # The islands that had sent their differences have disconnected.
            self._ends_at = None
            return
        if late and (self._ends_at is None or time.monotonic() < self._ends_at):
            return
        if late:
            _log.info("outer step %d without island %s", self.generation + 1, ", ".join(map(str, sorted(late))))
        try:
            for rank, held in self._parts.items():
                # In order of island, so that the sum does not depend on the order of arrival.
                held.step([complete[number].differences[rank] for number in sorted(complete)])
        except Exception:
            # Only some parts may have stepped: the state is inconsistent and must not be used.
            _log.exception("an outer step failed: the server ends")
            self.close()
            raise
        self.generation += 1
        self._last_count, self._ends_at = len(complete), None
        for number, island in self._islands.items():
            island.counted = number in complete
            island.differences.clear()
        self._changed.notify_all()


def _require_open(connection: socket.socket) -> None:
    """Check that the peer has not closed the connection.

    Raises:
        ConnectionResetError: If it has.
    """
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    if poller.poll(0) and not connection.recv(1, socket.MSG_PEEK):
        raise ConnectionResetError("the other side has closed the connection")


def _shut_down_connections(island: _Island) -> None:
    for connection in island.connections.values():
        # Unblocks threads that read from the connection.
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_S),
        ("TCP_KEEPINTVL", _KEEPALIVE_S),
        ("TCP_KEEPCNT", _KEEPALIVE_COUNT),
    ):
        # Not available on every platform.
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
