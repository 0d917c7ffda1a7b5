"""Run functions on N ranks that are started once per test session.

Imports take seconds; forking a rank from a server that has made them takes milliseconds. There is one pool of ranks
per world size, each rank keeps its gloo process group between calls, and a call that fails, hangs or leaves too many
threads discards the pool: one test cannot affect the next.
"""

from __future__ import annotations

import atexit
import faulthandler
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
#: Thread count of a rank from which on its pool is discarded: gloo runs three threads per group, which persist with
#: the meshes that runs keep, and one of them wakes a hundred times a second.
_CROWDED = 60
#: Idle seconds after which a pool of another size is closed: its threads keep waking, and new ranks start in 0.2 s.
_IDLE_S = 5.0

#: Modules imported by the fork server; further ones must be added before the first pool starts.
PRELOAD = ["tests.helpers.preload"]

_pools: dict[int, RankPool] = {}


class RankFailed(AssertionError):
    """Failure of a rank that raised, died or timed out; the message contains every rank's report."""


class RankPool:
    """Pool of ``world_size`` processes in one gloo group that execute calls until closed."""

    def __init__(self, world_size: int, start_method: str = "forkserver") -> None:
        self.world_size = world_size
        self.used_at = time.monotonic()
        context = mp.get_context(start_method)
        if start_method == "forkserver":
            context.set_forkserver_preload(PRELOAD)
        # The store binds its port here: a port that is only probed may be taken before a rank binds it.
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
        """Call ``function(*args)`` on every rank, and return the results by rank."""
        # Pickled here: an argument that cannot be pickled then fails in the test, not in a queue's thread.
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
                    # The others may be blocked in a collective with this rank: give them a few seconds to report.
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
        """End the processes, by killing them or after their current call."""
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
    """Return a mesh, created once per rank: every new one adds process groups and threads. Collective."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[Any]:
    """Call a module-level ``function(*args)`` on ``world_size`` gloo ranks, and return the results by rank.

    The default process group exists when the function runs; the RNG is seeded with 0 on every rank.

    Raises:
        RankFailed: With the traceback of every rank that raised, and the status of the others.
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
    """Like :func:`run_ranks`, but on fresh processes that exit afterwards: for measuring memory.

    Raises:
        RankFailed: As for :func:`run_ranks`.
    """
    pool = RankPool(world_size, start_method="spawn")
    try:
        return pool.run(function, args, timeout_s)
    finally:
        pool.close()


def close_pools() -> None:
    """Close every pool."""
    for pool in list(_pools.values()):
        pool.close()


atexit.register(close_pools)


def free_port() -> int:
    """Return a TCP port on loopback that was free at the time of the call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _threads() -> int:
    """Return the number of threads of this process, including those of libraries if the system shows them."""
    tasks = "/proc/self/task"
    return len(os.listdir(tasks)) if os.path.isdir(tasks) else threading.active_count()


def _leave_with(parent: int) -> None:
    """Exit when the parent process is gone, so that ranks do not outlive a killed pytest."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _serve(rank: int, world_size: int, port: int, inbox: Any, outbox: Any) -> None:
    # A rank that native code ends (SIGABRT, SIGSEGV) shows the stack of each thread.
    faulthandler.enable(all_threads=True)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        # Drop a seed that the first test had set before the fork server started.
        os.environ.pop(name, None)
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
    import lightning_pardist  # noqa: F401  (first, as users are told to)
    from lightning_pardist.runtime.isolated_ranks import restore_world

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
        restore_world()
        # A seed set by one test (PL_GLOBAL_SEED) would otherwise apply to every later Trainer.
        os.environ.clear()
        os.environ.update(environment)
        outbox.put((rank, good, result, _threads()))
        sys.stdout.flush()
        sys.stderr.flush()
    torch.distributed.destroy_process_group()
