"""Connections of a server with the workers of other ranks: a thread for each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pardist.collectives import as_bytes
from lightning_pardist.engines.servers.messages import (
    Kind,
    Line,
    Message,
    Unpacked,
    is_broken_line,
    pack_parts,
    unpack_parts,
)
from lightning_pardist.engines.servers.plain_values import pack_plain, unpack_plain
from lightning_pardist.engines.servers.server import ANYWHERE, Changes, LeftOutError, ParameterServer, Place
from lightning_pardist.engines.servers.share import Share

#: For as long as both sides live.
_DAYS_S = 30 * 86400.0
#: In which the mean is taken of what no optimizer updates.
REST_DTYPES = (torch.float32, torch.float64)


class WorkerThreads:
    """Answers the workers of other ranks, each in a thread of its own.

    A worker has one request under way at a time, so that a server holds one message of each at most.

    Args:
        server: Who answers.
        group: A gloo group for messages alone.
        tags: Of requests and answers.
        timeout_s: Bound on the arrival of an answer, for which the worker waits; that of one whom the others can do
            without has none, since gloo ends all connections where time is up on one of them.
    """

    def __init__(
        self, server: ParameterServer, group: dist.ProcessGroup, tags: tuple[int, int], timeout_s: float
    ) -> None:
        self._server = server
        server.on_wait = self._let_wait
        self._waiting: dict[int, Line] = {}
        #: What a worker has left behind for servers that do nothing else.
        self.outcome: Tensor | None = None
        self._threads = {
            worker: threading.Thread(
                target=self._serve,
                args=(
                    worker,
                    *(Line(group, worker, tag, _DAYS_S if worker in server.may_go else timeout_s) for tag in tags),
                ),
                name=f"parameter-server-{worker}",
                daemon=True,
            )
            for worker in server.workers
            if worker != group.rank()
        }

    def start(self) -> None:
        """Begin to answer."""
        for thread in self._threads.values():
            thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for all workers to leave, ``timeout_s`` seconds in all; returns whether they have, or are gone."""
        deadline = time.monotonic() + timeout_s
        lost = self._server.lost
        threads = [thread for worker, thread in self._threads.items() if worker not in lost]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _let_wait(self, worker: int) -> None:
        # Whoever waits for the answer knows by it that there will be one.
        if worker in self._waiting:
            self._waiting[worker].send(Message(Kind.WAIT))

    def join_lost(self, timeout_s: float) -> None:
        """Wait for threads of workers that are gone, whose processes may take a moment to be ended."""
        deadline = time.monotonic() + timeout_s
        for worker in self._server.lost:
            if worker in self._threads:
                self._threads[worker].join(max(0.0, deadline - time.monotonic()))

    def _serve(self, worker: int, requests: Line, answers: Line) -> None:
        self._waiting[worker] = answers
        try:
            while (message := requests.receive()).kind not in (Kind.LEAVE, Kind.FAILED):
                if message.kind == Kind.OUTCOME:
                    self.outcome = message.payload
                    continue
                try:
                    self._answer(worker, message, answers)
                except Exception as error:
                    if isinstance(error, LeftOutError) or is_broken_line(error):
                        raise
                    self._server.fail(error)
                    answers.send(failed(error))
            if message.kind == Kind.FAILED:
                self._server.fail(RuntimeError(f"Worker {worker} ended by an error: {reason_of(message)}"))
            answers.flush()
        except LeftOutError as error:
            with suppress(RuntimeError):
                answers.send(failed(error))
                answers.flush()
        except RuntimeError as error:
            # The connection is gone, and with it the worker.
            if worker in self._server.may_go and is_broken_line(error):
                self._server.lose(worker, "its connection was closed")
            else:
                self._server.fail(error)
        finally:
            self._server.leave(worker)

    def _answer(self, worker: int, message: Message, answers: Line) -> None:
        server, index = self._server, message.optimizer
        if message.kind == Kind.MEET:
            _, dtype, *where = message.numbers
            rest, place = None if message.payload is None else message.payload.view(REST_DTYPES[dtype]), Place(*where)
            server.meet(worker, rest, place)
            try:
                if place != ANYWHERE:
                    gone = {loss.worker: (loss.position or (-1, 0))[:2] for loss in server.gone}
                    answers.send(Message(Kind.GONE, payload=pack_plain(gone)))
                if (rest := server.rest) is not None:
                    answers.send(Message(Kind.REST, payload=as_bytes(rest)))
                for number in range(len(server.shares)):
                    answers.send(Message(Kind.VALUES, number, payload=server.take_all(worker, number, _packed)))
                    if message.numbers[0]:
                        state = server.shares[number].state() | {"staleness": dict(server.staleness)}
                        answers.send(Message(Kind.STATE, number, payload=pack_plain(state)))
            finally:
                server.release(worker)
            return
        staleness = 0
        if message.kind == Kind.UPDATE:
            numbers, grads = unpack_update(message.payload, server.shares[index])
            staleness = server.update(worker, index, grads, numbers, _position(message))
        else:
            server.tick(worker, index, _position(message))
        answers.send(Message(Kind.VALUES, index, (staleness,), server.take_turn(worker, index, _packed)))


def _position(message: Message) -> tuple[int, int, int] | None:
    epoch, done, batches, *_ = message.numbers
    return (epoch, done, batches) if done else None


def failed(error: BaseException) -> Message:
    """Says why a side of a line goes no further."""
    text = f"{type(error).__name__}: {error}".encode()
    return Message(Kind.FAILED, payload=torch.frombuffer(bytearray(text), dtype=torch.uint8))


def reason_of(message: Message) -> str:
    """What :func:`failed` said."""
    return "" if message.payload is None else bytes(message.payload.tolist()).decode()


def _packed(changes: Changes) -> Tensor:
    return pack_parts((), changes)


def pack_update(numbers: Sequence[float], grads: Sequence[Tensor | None]) -> Tensor:
    """A worker's gradients and settings as the bytes of a message."""
    count = torch.tensor([len(numbers)])
    return pack_parts([count, torch.tensor(numbers, dtype=torch.float64)], grads)


def unpack_update(packed: Tensor | None, share: Share) -> tuple[list[float], list[Tensor | None]]:
    """What :func:`pack_update` packed."""
    found = Unpacked(packed)
    count = int(found.take([1], torch.int64))
    numbers: list[float] = found.take([count], torch.float64).tolist()
    return numbers, unpack_parts(found, share.params)


class RemoteServer:
    """A server on another rank, as a worker sees it.

    Args:
        group: A gloo group for messages alone.
        rank: The server's.
        tags: Of requests and answers.
        timeout_s: Bound on waiting for an answer, or for a word that there will be one.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, tags: tuple[int, int], timeout_s: float) -> None:
        self.rank = rank
        self._requests, self._answers = (Line(group, rank, tag, timeout_s) for tag in tags)
        self._timeout_s = timeout_s

    def ask(self, message: Message) -> int:
        """Begin to send a request; returns its bytes."""
        return self._requests.send(message)

    def answer(self, likes: Sequence[Tensor], write: Callable[[Changes], None]) -> tuple[int, int]:
        """Wait for new values.

        Args:
            likes: The share's parameters.
            write: Given what has changed.

        Returns:
            Staleness of the update that was asked for, and bytes received.

        Raises:
            RuntimeError: If the server is gone, or failed, with its reason.
        """
        message = self._received()
        write(unpack_parts(Unpacked(message.payload), likes))
        return message.numbers[0], 0 if message.payload is None else message.payload.numel()

    def _received(self) -> Message:
        while (message := self._answers.receive(self._timeout_s)).kind == Kind.WAIT:
            pass
        if message.kind == Kind.FAILED:
            raise RuntimeError(f"The parameter server on rank {self.rank} failed: {reason_of(message)}")
        return message

    def gone(self) -> dict[int, tuple[int, int]]:
        """In front of everything else of a meeting, workers that are gone, each with its epoch and its batches in it.

        Raises:
            RuntimeError: If the server is gone, or failed, with its reason.
        """
        found: dict[int, tuple[int, int]] = unpack_plain(self._received().payload)
        return found

    def rest(self, dtype: torch.dtype) -> Tensor:
        """In front of the new values of a meeting, the mean of what workers have brought, flat.

        Raises:
            RuntimeError: If the server is gone, or failed, with its reason.
        """
        payload = self._received().payload
        return torch.empty(0, dtype=dtype) if payload is None else payload.view(dtype)

    def begin(self, index: int, state: Any) -> None:
        """Give a server that does nothing else what it begins with, of an optimizer."""
        self._requests.send(Message(Kind.BEGIN, index, payload=pack_plain(state)))

    def state(self) -> dict[str, Any]:
        """Behind the new values of a meeting, the state that was asked for.

        Raises:
            RuntimeError: If the server is gone, or failed, with its reason.
        """
        found: dict[str, Any] = unpack_plain(self._received().payload)
        return found

    def tell(self, outcome: Tensor) -> None:
        """Leave behind what a server that does nothing else goes on with when training has ended."""
        self._requests.send(Message(Kind.OUTCOME, payload=outcome))

    def leave(self, failure: BaseException | None, timeout_s: float) -> None:
        """No further request comes.

        Args:
            failure: Why, if this worker has not come to its end: its server fails with it.
            timeout_s: Bound on telling the server so.

        Raises:
            RuntimeError: If the server is gone, or does not listen.
        """
        self._requests.flush(timeout_s)
        self._requests.send(Message(Kind.LEAVE) if failure is None else failed(failure))
        self._requests.flush(timeout_s)
