"""Main loop of a rank that only serves parameters."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pardist.checkpoint.tensors import restore_shared
from lightning_pardist.engines.servers.messages import Connection, Kind
from lightning_pardist.engines.servers.plain_values import unpack_plain
from lightning_pardist.engines.servers.roles import Roles
from lightning_pardist.engines.servers.served_updates import ServedUpdates, make_server
from lightning_pardist.engines.servers.server import ParameterServer
from lightning_pardist.engines.servers.worker_connections import WorkerThreads

#: Interval at which a server that waits for its workers checks whether it has failed.
_LOOK_S = 0.1
#: How long a server that has lost a worker waits for an outside report of the reason.
_HEARSAY_S = 3.0
#: How long it waits at the end for its threads of lost workers, which may be inside a library's code.
_GONE_S = 10.0


def serve(
    updates: Sequence[ServedUpdates],
    *,
    group: dist.ProcessGroup,
    roles: Roles,
    tags: tuple[int, int],
    max_staleness: int | None,
    timeout_s: float,
    gone: Callable[[], Mapping[int, str]] = dict,
    mark_lost: Callable[[int, str], object] = lambda worker, why: None,
    is_shared: bool = False,
) -> Any:
    """Serve until all workers have left. Values and state come from the worker that keeps them for checkpoints.

    A server waits for its workers as long as they live: if one hangs, whatever monitors the ranks ends the server.

    Args:
        updates: Updates of every optimizer, over this rank's own copy of the parameters.
        group: gloo group over all ranks, used for messages only.
        roles: Which of its ranks work, and which serve.
        tags: Tags of requests and replies, which nothing else uses on this group.
        max_staleness: As on the workers.
        timeout_s: Timeout of every wait of a worker.
        gone: Returns the workers that were seen to be gone by others than this server, with the reasons.
        mark_lost: Called with each worker that is gone, and the reason.
        is_shared: Whether the remaining workers take over the data of each that is gone.

    Returns:
        The outcome that the workers have sent; None if there is none.

    Raises:
        RuntimeError: If a worker is gone or failed, or has other parameters than this rank.
    """
    rank = group.rank()
    begin = Connection(group, roles.primary_worker(rank), tags[0], timeout_s)
    log_to: str | None = None
    for _ in updates:
        message = begin.receive()
        if message.kind != Kind.BEGIN:
            raise RuntimeError("The parameter server has failed: training ended before it began.")
        state = unpack_plain(message.payload)
        log_to = state["log_to"]
        _load_from_worker(updates[message.optimizer], rank, state)
    server = make_server(
        updates, rank=rank, roles=roles, max_staleness=max_staleness, timeout_s=timeout_s, log_to=log_to
    )
    threads = WorkerThreads(server, group, tags, timeout_s)
    threads.start()
    told = _LossExchange(server, gone, mark_lost, rank=rank if rank == roles.servers[0] else None, is_shared=is_shared)
    try:
        while not threads.join(0.0):
            server.check()
            server.mark_silent_lost()
            told.poll()
            # Sleep in this thread, where a search for ranks that wait for each other finds this one.
            time.sleep(_LOOK_S)
        server.check()
        told.poll(is_over=True)
        threads.join_lost(_GONE_S)
    finally:
        server.close()
    return None if threads.outcome is None else unpack_plain(threads.outcome)


class _LossExchange:
    """Passes workers that are gone to a server, and workers that the server has lost to all others.

    Args:
        server: The server.
        gone: As for :func:`serve`.
        mark_lost: As for :func:`serve`.
        rank: Rank of this server, if it prints messages.
        is_shared: As for :func:`serve`.
    """

    def __init__(
        self,
        server: ParameterServer,
        gone: Callable[[], Mapping[int, str]],
        mark_lost: Callable[[int, str], object],
        *,
        rank: int | None,
        is_shared: bool,
    ) -> None:
        self._server, self._gone, self._mark_lost = server, gone, mark_lost
        self._rank, self._is_shared = rank, is_shared
        self._seen: dict[int, float] = {}
        self._reported: set[int] = set()

    def poll(self, *, is_over: bool = False) -> None:
        """Check which workers are gone now. Called periodically, and at the end."""
        gone = self._gone()
        for worker, why in gone.items():
            if worker in self._server.may_be_lost:
                self._server.mark_lost(worker, why)
        for loss in self._server.lost_workers:
            since = self._seen.setdefault(loss.worker, time.monotonic())
            # The process that started the worker has the exit reason a moment later.
            if loss.worker in self._reported or not (
                is_over or loss.worker in gone or time.monotonic() - since > _HEARSAY_S
            ):
                continue
            self._reported.add(loss.worker)
            self._mark_lost(loss.worker, loss.why)
            if self._rank is not None:
                text = loss.describe(gone.get(loss.worker), is_shared=self._is_shared)
                # Servers continue even if nothing can be printed.
                with suppress(OSError, ValueError):
                    print(f"[rank {self._rank}] {text}", file=sys.stderr, flush=True)


@torch.no_grad()
def _load_from_worker(updates: ServedUpdates, rank: int, begin: dict[str, Any]) -> None:
    """Set an optimizer, and the parameters that this rank serves, from a worker's."""
    optimizer = updates.optimizer
    params = [param for param, owner in zip(updates.params, updates.owners, strict=True) if owner == rank]
    values: list[Tensor] = begin["values"]
    shapes, own = [tuple(value.shape) for value in values], [tuple(param.shape) for param in params]
    if shapes != own or len(begin["settings"]) != len(optimizer.param_groups):
        raise RuntimeError(
            f"{type(optimizer).__name__} has other parameters on rank {rank}, which only serves ({own}), than on its"
            f" workers ({shapes}). Build module and optimizers alike on every rank."
        )
    for group, settings in zip(optimizer.param_groups, begin["settings"], strict=True):
        group.update(settings)
    optimizer.state.clear()
    restore_shared(optimizer, begin["shared"])
    for place, (param, value) in enumerate(zip(params, values, strict=True)):
        param.copy_(value)
        if place in begin["state"]:
            optimizer.state[param] = begin["state"][place]
