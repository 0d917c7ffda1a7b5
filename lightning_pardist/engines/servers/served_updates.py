"""Workers: their optimizers send gradients to the servers instead of stepping, and receive new values."""

from __future__ import annotations

import functools
import os
import time
import types
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pardist.checkpoint.tensors import restore_shared, shared_state
from lightning_pardist.collectives import as_bytes
from lightning_pardist.compat.optimizers import follow_schedulers, mark_step, post_hooks, pre_hooks
from lightning_pardist.engines.common.full_tensor_updates import FullTensorUpdates, HeldTensor
from lightning_pardist.engines.common.owner_plan import Owners
from lightning_pardist.engines.common.update_scope import ScopeSetting, find_scope
from lightning_pardist.engines.servers.foreign_writes import ForeignWrites
from lightning_pardist.engines.servers.messages import Kind, Message
from lightning_pardist.engines.servers.plain_values import is_plain, pack_plain
from lightning_pardist.engines.servers.roles import Roles
from lightning_pardist.engines.servers.server import ANY_MEETING, Changes, MeetingKey, ParameterServer
from lightning_pardist.engines.servers.share import GroupNumbers, Share, write_changes
from lightning_pardist.engines.servers.update_log import UpdateLog
from lightning_pardist.engines.servers.worker_connections import REST_DTYPES, RemoteServer, WorkerThreads, pack_update


class ServedUpdates(FullTensorUpdates):
    """An optimizer whose parameters are updated by servers, each of which holds the state of its share.

    Args:
        optimizer: The user's optimizer, over whole parameters on every rank.
        group: Process group of the workers; on a rank that only serves, of this rank alone.
        roles: Which ranks serve.
        rank: This rank, in the numbering of the roles.
        setting: What an update depends on; found by a trial if ``"auto"``.

    Raises:
        ValueError: If the optimizer cannot be divided over servers.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        group: dist.ProcessGroup,
        roles: Roles,
        rank: int,
        setting: ScopeSetting = "auto",
    ) -> None:
        found = find_scope(optimizer, form="flat", setting=setting)
        super().__init__(optimizer, group=group, held=HeldTensor.updated_in_place, found=found)
        if found.scope == "joint":
            raise ValueError(
                f"{type(optimizer).__name__} {found.describe()}, but each server has only a share of them. Use"
                " pardist_ps with its defaults, or pardist_ddp, or an optimizer such as AdamW or SGD."
            )
        owners = Owners(len(roles.servers), cost=_elements_of)
        owners.assign(self._shapes())
        self.owners = [roles.servers[owners.of(number) or 0] for number in range(len(self._params()))]
        self.loads = owners.loads
        self._primary_workers = [
            rank if rank in (owner, roles.primary_worker(owner)) else roles.primary_worker(owner)
            for owner in self.owners
        ]
        self._place = rank
        self._drop_unowned_state()

    @override
    def owns(self, number: int) -> bool:
        """Return whether this rank serves the parameter with this index, or keeps its state for a dedicated server."""
        return self._primary_workers[number] == self._place

    @property
    def params(self) -> list[nn.Parameter]:
        """The user's parameters, group by group."""
        return self._params()

    @override
    def describe(self) -> str:
        """Describe the optimizer's scope, and how evenly parameters are spread over servers."""
        uneven = max(self.loads) * len(self.loads) / max(sum(self.loads), 1.0)
        return (
            f"{type(self.optimizer).__name__} {self.found.describe()}: by one of {len(self.loads)} servers, which has"
            f" its state; the largest share is {uneven:.2f} times the mean"
        )


class Worker:
    """One rank's part in training with parameter servers: a worker, and a server too if the rank has both roles.

    Replaces the optimizers' ``step``: gradients are sent to the servers, which update and send what has changed. A
    worker sends ``Psi`` and receives as much in each step, less its own server's share; sparse gradients are sent as
    rows.

    Args:
        updates: Updates of every optimizer, with loaded state, the same on all ranks.
        group: gloo group over all ranks, used for messages only.
        roles: Which of its ranks work, and which serve.
        tags: Tags of requests and replies, which nothing else uses on this group.
        max_staleness: Updates by which a worker may be ahead of the slowest; unbounded if None. With 0, gradients are
            averaged over workers beforehand, and one worker sends them.
        timeout_s: Timeout of every wait.
        log_to: Folder for the log of updates; none is written if None.
        has_gradients: Called in each step; False if there was no sample since the last one, regardless of ``.grad``
            (which may hold zeros that would decay weights).
        position: Returns the worker's position in its share of the data, see
            :class:`~lightning_pardist.engines.servers.server.LostWorker`.
        rest: Returns tensors that no optimizer updates, which the first server, a dedicated one, averages at meetings.

    Attributes:
        staleness: Staleness of the latest update; None before the first.
        gone: Workers that were gone at the latest meeting with a place, each with the epoch of its latest turn and the
            batches of its share that it had done by then, as recorded by the first server.
        shows_state: Whether optimizers have the state of a meeting after which training has not continued.
        sent_bytes: Bytes sent to servers on other ranks so far.
        received_bytes: Bytes received from servers on other ranks so far.
    """

    def __init__(
        self,
        updates: Sequence[ServedUpdates],
        *,
        group: dist.ProcessGroup,
        roles: Roles,
        tags: tuple[int, int],
        max_staleness: int | None,
        timeout_s: float,
        log_to: str | os.PathLike[str] | None = None,
        has_gradients: Callable[[], bool] = lambda: True,
        position: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0),
        rest: Callable[[], Sequence[Tensor]] = tuple,
    ) -> None:
        self._has_gradients, self._position, self._rest = has_gradients, position, rest
        self.rank = group.rank()
        self.staleness: int | None = None
        self.sent_bytes = self.received_bytes = 0
        self.gone: dict[int, tuple[int, int]] = {}
        self._updates = list(updates)
        self._params = [each.params for each in updates]
        self._numbers = [GroupNumbers(each.optimizer) for each in updates]
        self._stepped: set[int] = set()
        self._roles = roles
        owners = [each.owners for each in updates]
        servers = roles.in_use(owners)
        self.server: ParameterServer | None = None
        self._threads: WorkerThreads | None = None
        if self.rank in servers:
            self.server = make_server(
                updates, rank=self.rank, roles=roles, max_staleness=max_staleness, timeout_s=timeout_s, log_to=log_to
            )
            self._threads = WorkerThreads(self.server, group, tags, timeout_s)
        self._remote = [RemoteServer(group, rank, tags, timeout_s) for rank in servers if rank != self.rank]
        #: Servers on other ranks whose state this worker keeps for checkpoints.
        self._kept = [server for server in self._remote if roles.primary_worker(server.rank) == self.rank]
        self._log_to = None if log_to is None else os.fspath(log_to)
        self._is_synchronous = max_staleness == 0
        self.shows_state = True
        self._staleness: dict[int, Counter[int]] = {}
        self._watches = [ForeignWrites(each.optimizer) for each in updates]
        #: Whether this worker has taken a turn since the last meeting.
        self._has_moved = True

    def start(self) -> None:
        """Start to serve, and make optimizers send gradients from now on. Not collective.

        Raises:
            RuntimeError: If an optimizer's state cannot be sent to a rank that only serves.
        """
        for index in range(len(self._updates)):
            for server in self._kept:
                self._begin(index, server)
        self._drop_received_state()
        if self._threads is not None:
            self._threads.start()
        for index, each in enumerate(self._updates):
            _replace_step(each.optimizer, lambda index=index: self.step(index))  # type: ignore[misc]
            self._watches[index].add_placeholders()

    def _begin(self, index: int, server: RemoteServer) -> None:
        optimizer, params = self._updates[index].optimizer, self._params_of(index, server.rank)
        places = {place: optimizer.state[param] for place, param in enumerate(params) if optimizer.state.get(param)}
        settings = [
            {key: value for key, value in group.items() if key != "params" and is_plain(value)}
            for group in optimizer.param_groups
        ]
        values = [param.detach() for param in params]
        try:
            server.begin(
                index,
                {
                    "values": values,
                    "settings": settings,
                    "state": places,
                    "shared": shared_state(optimizer),
                    "log_to": self._log_to,
                },
            )
        except TypeError as error:
            raise RuntimeError(
                f"The state of {type(optimizer).__name__} cannot be sent to a dedicated server: {error}. Leave"
                " dedicated_servers out, so that every rank serves."
            ) from error

    def _drop_received_state(self) -> None:
        """Drop the state of servers on other ranks, which hold it again; two copies would take twice the memory."""
        if not self.shows_state:
            return
        self.shows_state = False
        for index, each in enumerate(self._updates):
            kept = [param for server in self._kept for param in self._params_of(index, server.rank)]
            for param in kept:
                each.optimizer.state.pop(param, None)
            if kept:
                self._watches[index].note_states()

    # --- a step ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, index: int) -> None:
        """Send an optimizer's gradients, and wait for this worker's turn and new values.

        Args:
            index: Index of the optimizer.

        Raises:
            RuntimeError: If parameters were written to otherwise, or a server is gone or failed.
            TimeoutError: If the slowest worker does not progress.
        """
        self._watches[index].check()
        self._stepped.add(index)
        self._has_moved = True
        if not self._has_gradients() or all(param.grad is None for param in self._params[index]):
            self._tick(index)
            return
        numbers = self._numbers[index].to_send()
        for server in self._remote:
            if self._is_synchronous and self._roles.primary_worker(server.rank) != self.rank:
                self.sent_bytes += server.request(Message(Kind.TICK, index, self._position()))
                continue
            grads = [param.grad for param in self._params_of(index, server.rank)]
            packed = pack_update(numbers, grads)
            self.sent_bytes += server.request(Message(Kind.UPDATE, index, self._position(), packed))
        staleness = 0
        if self.server is not None:
            own = [None if p.grad is None else p.grad.detach().cpu() for p in self._params_of(index, self.rank)]
            self.server.release(self.rank)
            staleness = self.server.update(self.rank, index, own, numbers)
        self.staleness = max(staleness, self._receive_values(index))

    def complete(self, index: int) -> None:
        """End a step of an optimizer; one that was skipped (by a gradient scaler, say) counts as a turn too."""
        if index not in self._stepped:
            self._has_moved = True
            self._tick(index)
        self._stepped.discard(index)

    def _tick(self, index: int) -> None:
        for server in self._remote:
            self.sent_bytes += server.request(Message(Kind.TICK, index, self._position()))
        if self.server is not None:
            self.server.release(self.rank)
            self.server.tick(self.rank, index)
        self._receive_values(index)

    def _receive_values(self, index: int) -> int:
        """Wait for new values of an optimizer's parameters; return the largest staleness on any remote server."""
        if self.server is not None:
            self.server.take_turn(self.rank, index, self._writer(index, self.rank))
        found = [self._answer(index, server) for server in self._remote]
        return max(found, default=0)

    def _answer(self, index: int, server: RemoteServer) -> int:
        staleness, size = server.answer(self._params_of(index, server.rank), self._writer(index, server.rank))
        self.received_bytes += size
        return staleness

    def _params_of(self, index: int, server: int) -> list[nn.Parameter]:
        owners = self._updates[index].owners
        return [param for param, owner in zip(self._params[index], owners, strict=True) if owner == server]

    def _writer(self, index: int, server: int) -> Callable[[Changes], None]:
        params, watch = self._params_of(index, server), self._watches[index]
        # At a meeting right after another one, parameters may hold other weights, which the user will swap back.
        is_checked = self._has_moved

        def write(changes: Changes) -> None:
            changed = [param for param, change in zip(params, changes, strict=True) if change is not None]
            if not is_checked:
                watch.check_values(changed)
            write_changes([param.detach() for param in params], changes)
            watch.note(changed)

        return write

    # --- meetings and the end -------------------------------------------------------------------------------------

    @torch.no_grad()
    def meet(self, place: MeetingKey = ANY_MEETING, *, with_state: bool = True) -> None:
        """Wait for all workers; afterwards parameters are the servers', and optimizers show the state of this rank's.

        Collective over all workers. Updates continue when this rank calls :meth:`resume_updates`, or steps again.

        Args:
            place: Identifies the meeting, if workers determine their meetings independently.
            with_state: Whether the state that this rank keeps for dedicated servers is included.

        Raises:
            RuntimeError: If something was changed without the servers, or a server is gone or failed.
            TimeoutError: If some workers do not arrive.
        """
        if self._has_moved:
            for watch in self._watches:
                watch.check()
        for watch in self._watches:
            watch.remove_placeholders()
        rest = [torch.view_as_real(each) if each.is_complex() else each for each in self._rest()]
        dtype = functools.reduce(torch.promote_types, [each.dtype for each in rest], torch.float32)
        for server in self._remote:
            wants = with_state and server in self._kept
            payload = None
            if rest and server is self._remote[0]:
                payload = as_bytes(torch.cat([each.detach().reshape(-1).to("cpu", dtype) for each in rest]))
            numbers = int(wants), REST_DTYPES.index(dtype), *astuple(place)
            self.sent_bytes += server.request(Message(Kind.MEET, numbers=numbers, payload=payload))
        if self.server is not None:
            self.server.meet(self.rank)
        if place != ANY_MEETING:
            # Servers may have recorded a different position of a worker that is gone: the first one's counts.
            told = [server.gone() for server in self._remote]
            self.gone = told[0]
        if rest:
            mean = self._remote[0].rest(dtype)
            for each, part in zip(rest, mean.split([each.numel() for each in rest]), strict=True):
                each.copy_(part.view(each.shape))
        for index in range(len(self._updates)):
            if self.server is not None:
                self.server.take_all(self.rank, index, self._writer(index, self.rank))
                share = self.server.shares[index]
                share.publish()
                self._numbers[index].publish(share.numbers.of_server())
            for server in self._remote:
                self._answer(index, server)
                if with_state and server in self._kept:
                    self._show(index, server)
            self._watches[index].note_states()
        self._has_moved = False
        self.shows_state = self.shows_state or with_state

    def _show(self, index: int, server: RemoteServer) -> None:
        """Make an optimizer show the state of a dedicated server."""
        found, optimizer = server.state(), self._updates[index].optimizer
        params = self._params_of(index, server.rank)
        optimizer.state.update({params[place]: state for place, state in found["state"].items()})
        restore_shared(optimizer, found["shared"])
        self._numbers[index].publish(found["numbers"])
        self._staleness[server.rank] = Counter(found["staleness"])

    def resume_updates(self) -> None:
        """Allow updates again after a meeting. Not collective."""
        self._drop_received_state()
        for watch in self._watches:
            watch.add_placeholders()
        if self.server is not None:
            self.server.release(self.rank)

    def histogram(self) -> Counter[int]:
        """Return the number of updates per staleness on this rank's server, or on the first whose state it keeps."""
        if self.server is None:
            return next(iter(self._staleness.values()), Counter())
        return Counter(self.server.staleness)

    def send_outcome(self, outcome: Callable[[], Any]) -> None:
        """Send the outcome with which dedicated servers continue after training. Not collective.

        Args:
            outcome: Returns it; called if there are such servers. See
                :func:`~lightning_pardist.engines.servers.plain_values.pack_plain`.
        """
        told = [server for server in self._remote if self._roles.is_dedicated(server.rank)]
        packed = pack_plain(outcome()) if told else None
        for server in told:
            if packed is not None:
                server.send_outcome(packed)

    def stop(self, timeout_s: float, failure: BaseException | None = None) -> None:
        """Leave, and wait until all other workers have left. Not collective: ranks that are gone are not waited for.

        Args:
            timeout_s: Timeout of the whole call.
            failure: Error by which this worker ended, if any: all servers fail with it, so that no meeting continues as
                if the worker had finished.
        """
        deadline = time.monotonic() + timeout_s
        for each in self._updates:
            each.optimizer.__dict__.pop("step", None)
        for watch in self._watches:
            watch.remove_placeholders()
        if self.server is not None:
            if failure is not None:
                self.server.fail(failure)
            self.server.leave(self.rank)
            self.server.release(self.rank)
        for server in self._remote:
            # A server that is gone already, or fails as well, is not notified.
            with suppress(RuntimeError):
                server.leave(failure, max(0.0, deadline - time.monotonic()))
        if self._threads is not None:
            self._threads.join(max(0.0, deadline - time.monotonic()))
        if self.server is not None:
            self.server.close()


def make_server(
    updates: Sequence[ServedUpdates],
    *,
    rank: int,
    roles: Roles,
    max_staleness: int | None,
    timeout_s: float,
    log_to: str | os.PathLike[str] | None,
) -> ParameterServer:
    """Create this rank's server from what its optimizers hold. The arguments are those of :class:`Worker`."""
    owners, log = [each.owners for each in updates], None
    if log_to is not None:
        log = UpdateLog(log_to, server=rank, owners=owners, workers=roles.workers)
    return ParameterServer(
        [Share(each.optimizer, [owner == rank for owner in each.owners], each.found) for each in updates],
        workers=roles.workers,
        # In synchronous training a worker continues when all have had their turn.
        max_staleness=1 if max_staleness == 0 else max_staleness,
        timeout_s=timeout_s,
        log=log,
        may_be_lost=roles.workers[1:] if roles.may_be_lost else (),
    )


def _replace_step(optimizer: Optimizer, send: Callable[[], None]) -> None:
    """Replace ``optimizer.step()``: it runs its closure and the step hooks, and ``send`` instead of the update."""

    def step(self: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if kwargs:
            raise TypeError(f"{type(self).__name__}.step was given {', '.join(kwargs)}, which servers do not get.")
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for before in pre_hooks(self):
            before(self, (), {})
        send()
        mark_step(self)
        for after in post_hooks(self):
            after(self, (), {})
        return result

    follow_schedulers(optimizer, step)
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


def _elements_of(shape: Sequence[int]) -> float:
    return float(torch.Size(shape).numel())
