"""Run functions on N ranks that are started once per test session.

Imports cost seconds; a rank forked from a server that has made them costs milliseconds. There is a pool of ranks for
each world size, each rank keeps its gloo process group between calls, and a call that fails, hangs or leaves something
behind throws the pool away, so that one test cannot spoil the next.
"""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.distributed import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DEFAULT_TIMEOUT_S = 120.0
#: Threads of a rank from which on its pool is not used again: gloo has three for each group, which stay with the meshes
#: that runs keep, and one of them wakes a hundred times a second.
_CROWDED = 60
#: Seconds after which a pool of another size is closed: its threads wake all the same, and new ranks start in 0.2 s.
_IDLE_S = 5.0

#: Modules that the server imports which ranks are forked from; who has more to import adds to it before the first pool.
PRELOAD = ["tests.helpers.preload"]

_pools: dict[int, RankPool] = {}


class RankFailed(AssertionError):
    """A rank raised, died or did not answer in time; the message holds every rank's report."""


class RankPool:
    """``world_size`` processes joined in one gloo group, answering calls until closed."""

    def __init__(self, world_size: int, start_method: str = "forkserver") -> None:
        self.world_size = world_size
        self.used_at = time.monotonic()
        context = mp.get_context(start_method)
        if start_method == "forkserver":
            context.set_forkserver_preload(PRELOAD)
        # Listens from here on: a port that is only found free may be somebody else's when a rank takes it.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self._store.port
        self.inboxes = [context.Queue() for _ in range(world_size)]
        self.outbox: Any = context.Queue()
        self.processes = [
            context.Process(target=_serve, args=(rank, world_size, port, self.inboxes[rank], self.outbox), daemon=False)
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        """Call ``function(*args)`` on every rank; the results by rank."""
        # Pickled here, so that an argument that cannot travel fails in the test and not in a queue's thread.
        payload = pickle.dumps((function, args))
        for inbox in self.inboxes:
            inbox.put(payload)
        answers: dict[int, tuple[bool, Any, int]] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < self.world_size:
            try:
                rank, good, result, threads = self.outbox.get(timeout=0.2)
                answers[rank] = (good, result, threads)
                if not good:
                    # The others may wait for this rank in a collective: give them a moment to report, not more.
                    deadline = min(deadline, time.monotonic() + 5.0)
                continue
            except queue.Empty:
                pass
            dead = [r for r, p in enumerate(self.processes) if p.exitcode is not None and r not in answers]
            if dead or time.monotonic() > deadline:
                break
        if len(answers) == self.world_size and all(good for good, _, _ in answers.values()):
            if max(threads for _, _, threads in answers.values()) > _CROWDED:
                self.close()
            return [pickle.loads(answers[rank][1]) for rank in range(self.world_size)]
        report = []
        for rank, process in enumerate(self.processes):
            if rank in answers:
                good, result, _ = answers[rank]
                report.append(f"--- rank {rank}: {'finished' if good else result}")
            elif process.exitcode is not None:
                report.append(f"--- rank {rank}: died with exit code {process.exitcode}")
            else:
                report.append(f"--- rank {rank}: no answer within {timeout_s:.0f} s")
        self.close(kill=True)
        raise RankFailed(f"{getattr(function, '__name__', function)} on {self.world_size} ranks:\n" + "\n".join(report))

    def close(self, kill: bool = False) -> None:
        """End the processes, at once or after they have answered."""
        if _pools.get(self.world_size) is self:
            del _pools[self.world_size]
        for inbox, process in zip(self.inboxes, self.processes, strict=True):
            if kill:
                process.kill()
            else:
                inbox.put(None)
        for process in self.processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join(timeout=10)
        for channel in (*self.inboxes, self.outbox):
            channel.close()
            channel.cancel_join_thread()


@functools.cache
def cpu_mesh(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh, made once a rank: every new one leaves process groups and their threads behind. Collective."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[Any]:
    """Call a module-level ``function(*args)`` on ``world_size`` gloo ranks; returns the results by rank.

    The default process group exists when the function runs; the RNG is seeded with 0 on every rank.

    Raises:
        RankFailed: With the traceback of every rank that raised, and what became of the others.
    """
    for other in list(_pools.values()):
        if other.world_size != world_size and time.monotonic() - other.used_at > _IDLE_S:
            other.close()
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = RankPool(world_size)
    try:
        return pool.run(function, args, timeout_s)
    finally:
        pool.used_at = time.monotonic()


def run_fresh_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[Any]:
    """:func:`run_ranks` on processes that have done nothing else and end afterwards: for measuring memory.

    Raises:
        RankFailed: As :func:`run_ranks`.
    """
    pool = RankPool(world_size, start_method="spawn")
    try:
        return pool.run(function, args, timeout_s)
    finally:
        pool.close()


def close_pools() -> None:
    """End every pool."""
    for pool in list(_pools.values()):
        pool.close()


atexit.register(close_pools)


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _threads() -> int:
    """Threads of this process, those of libraries included where the system shows them."""
    tasks = "/proc/self/task"
    return len(os.listdir(tasks)) if os.path.isdir(tasks) else threading.active_count()


def _leave_with(parent: int) -> None:
    """A pytest that is killed takes its ranks along."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _serve(rank: int, world_size: int, port: int, inbox: Any, outbox: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        # A seed that the first test had set when the server of all ranks was started.
        os.environ.pop(name, None)
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
    import lightning_pardist  # noqa: F401  (first, as users are told to)
    from lightning_pardist.runtime.ranks_apart import make_whole

    torch.set_num_threads(1)
    timeout = timedelta(seconds=DEFAULT_TIMEOUT_S)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    while True:
        payload = inbox.get()
        if payload is None:
            break
        environment = dict(os.environ)
        try:
            function, args = pickle.loads(payload)
            torch.manual_seed(0)
            good, result = True, pickle.dumps(function(*args))
        except BaseException:
            good, result = False, traceback.format_exc()
        make_whole()
        # A seed that one test has set (PL_GLOBAL_SEED) is every later Trainer's seed.
        os.environ.clear()
        os.environ.update(environment)
        outbox.put((rank, good, result, _threads()))
        sys.stdout.flush()
        sys.stderr.flush()
    torch.distributed.destroy_process_group()
