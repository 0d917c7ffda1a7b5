"""Connections of a server with the workers of other ranks, one thread per worker."""

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
    Connection,
    Kind,
    Message,
    Unpacked,
    is_broken_connection,
    pack_parts,
    unpack_parts,
)
from lightning_pardist.engines.servers.plain_values import pack_plain, unpack_plain
from lightning_pardist.engines.servers.server import (
    ANY_MEETING,
    Changes,
    DroppedWorkerError,
    MeetingKey,
    ParameterServer,
)
from lightning_pardist.engines.servers.share import Share

#: Timeout of a connection that may last as long as both sides live.
_DAYS_S = 30 * 86400.0
#: Dtypes in which tensors that no optimizer updates are averaged.
REST_DTYPES = (torch.float32, torch.float64)


class WorkerThreads:
    """Serves the workers of other ranks, each in its own thread.

    A worker has one request in flight at a time, so a server holds at most one message per worker.

    Args:
        server: Server that handles the requests.
        group: gloo group used for messages only.
        tags: Tags of requests and replies.
        timeout_s: Timeout for the arrival of a reply, for which the worker waits. Replies to workers that may be lost
            have none, since gloo closes all connections when one of them times out.
    """

    def __init__(
        self, server: ParameterServer, group: dist.ProcessGroup, tags: tuple[int, int], timeout_s: float
    ) -> None:
        self._server = server
        server.on_wait = self._send_keep_alive
        self._waiting: dict[int, Connection] = {}
        #: What a worker has sent as the outcome for dedicated servers.
        self.outcome: Tensor | None = None
        self._threads = {
            worker: threading.Thread(
                target=self._serve,
                args=(
                    worker,
                    *(
                        Connection(group, worker, tag, _DAYS_S if worker in server.may_be_lost else timeout_s)
                        for tag in tags
                    ),
                ),
                name=f"parameter-server-{worker}",
                daemon=True,
            )
            for worker in server.workers
            if worker != group.rank()
        }

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads.values():
            thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` seconds for all workers to leave; return whether all have left or are gone."""
        deadline = time.monotonic() + timeout_s
        lost = self._server.lost
        threads = [thread for worker, thread in self._threads.items() if worker not in lost]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _send_keep_alive(self, worker: int) -> None:
        # Notifies a worker that waits for a reply that it will come.
        if worker in self._waiting:
            self._waiting[worker].send(Message(Kind.WAIT))

    def join_lost(self, timeout_s: float) -> None:
        """Wait for the threads of workers that are gone, whose processes may take a moment to end."""
        deadline = time.monotonic() + timeout_s
        for worker in self._server.lost:
            if worker in self._threads:
                self._threads[worker].join(max(0.0, deadline - time.monotonic()))

    def _serve(self, worker: int, requests: Connection, answers: Connection) -> None:
        self._waiting[worker] = answers
        try:
            while (message := requests.receive()).kind not in (Kind.LEAVE, Kind.FAILED):
                if message.kind == Kind.OUTCOME:
                    self.outcome = message.payload
                    continue
                try:
                    self._answer(worker, message, answers)
                except Exception as error:
                    if isinstance(error, DroppedWorkerError) or is_broken_connection(error):
                        raise
                    self._server.fail(error)
                    answers.send(failed(error))
            if message.kind == Kind.FAILED:
                self._server.fail(RuntimeError(f"Worker {worker} ended by an error: {reason_of(message)}"))
            answers.flush()
        except DroppedWorkerError as error:
            with suppress(RuntimeError):
                answers.send(failed(error))
                answers.flush()
        except RuntimeError as error:
            # The connection is closed, so the worker is gone.
            if worker in self._server.may_be_lost and is_broken_connection(error):
                self._server.mark_lost(worker, "its connection was closed")
            else:
                self._server.fail(error)
        finally:
            self._server.leave(worker)

    def _answer(self, worker: int, message: Message, answers: Connection) -> None:
        server, index = self._server, message.optimizer
        if message.kind == Kind.MEET:
            _, dtype, *where = message.numbers
            rest = None if message.payload is None else message.payload.view(REST_DTYPES[dtype])
            place = MeetingKey(*where)
            server.meet(worker, rest, place)
            try:
                if place != ANY_MEETING:
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
    """Return a message with the reason why one side of a connection has failed."""
    text = f"{type(error).__name__}: {error}".encode()
    return Message(Kind.FAILED, payload=torch.frombuffer(bytearray(text), dtype=torch.uint8))


def reason_of(message: Message) -> str:
    """Return the reason in a message of :func:`failed`."""
    return "" if message.payload is None else bytes(message.payload.tolist()).decode()


def _packed(changes: Changes) -> Tensor:
    return pack_parts((), changes)


def pack_update(numbers: Sequence[float], grads: Sequence[Tensor | None]) -> Tensor:
    """Pack a worker's gradients and settings into the bytes of a message."""
    count = torch.tensor([len(numbers)])
    return pack_parts([count, torch.tensor(numbers, dtype=torch.float64)], grads)


def unpack_update(packed: Tensor | None, share: Share) -> tuple[list[float], list[Tensor | None]]:
    """Unpack what :func:`pack_update` packed."""
    found = Unpacked(packed)
    count = int(found.take([1], torch.int64))
    numbers: list[float] = found.take([count], torch.float64).tolist()
    return numbers, unpack_parts(found, share.params)


class RemoteServer:
    """A worker's connection to a server on another rank.

    Args:
        group: gloo group used for messages only.
        rank: Rank of the server.
        tags: Tags of requests and replies.
        timeout_s: Timeout of waiting for a reply, or for a notice that it will come.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, tags: tuple[int, int], timeout_s: float) -> None:
        self.rank = rank
        self._requests, self._answers = (Connection(group, rank, tag, timeout_s) for tag in tags)
        self._timeout_s = timeout_s

    def request(self, message: Message) -> int:
        """Start to send a request; return its size in bytes."""
        return self._requests.send(message)

    def answer(self, likes: Sequence[Tensor], write: Callable[[Changes], None]) -> tuple[int, int]:
        """Wait for new values.

        Args:
            likes: The share's parameters.
            write: Called with the changes.

        Returns:
            Staleness of the requested update, and bytes received.

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
        """Receive the workers that are gone, each with its epoch and batches in it: the first reply at a meeting.

        Raises:
            RuntimeError: If the server is gone, or failed, with its reason.
        """
        found: dict[int, tuple[int, int]] = unpack_plain(self._received().payload)
        return found

    def rest(self, dtype: torch.dtype) -> Tensor:
        """Receive the mean of the tensors sent by workers, flat: precedes the new values of a meeting.

        Raises:
            RuntimeError: If the server is gone, or failed, with its reason.
        """
        payload = self._received().payload
        return torch.empty(0, dtype=dtype) if payload is None else payload.view(dtype)

    def begin(self, index: int, state: Any) -> None:
        """Send the initial state of an optimizer to a dedicated server."""
        self._requests.send(Message(Kind.BEGIN, index, payload=pack_plain(state)))

    def state(self) -> dict[str, Any]:
        """Receive the requested state of an optimizer: follows the new values of a meeting.

        Raises:
            RuntimeError: If the server is gone, or failed, with its reason.
        """
        found: dict[str, Any] = unpack_plain(self._received().payload)
        return found

    def send_outcome(self, outcome: Tensor) -> None:
        """Send the outcome with which a dedicated server continues after training."""
        self._requests.send(Message(Kind.OUTCOME, payload=outcome))

    def leave(self, failure: BaseException | None, timeout_s: float) -> None:
        """Notify the server that no further request follows.

        Args:
            failure: Error by which this worker ended, if any: its server fails with it.
            timeout_s: Timeout of the notification.

        Raises:
            RuntimeError: If the server is gone, or does not receive.
        """
        self._requests.flush(timeout_s)
        self._requests.send(Message(Kind.LEAVE) if failure is None else failed(failure))
        self._requests.flush(timeout_s)
