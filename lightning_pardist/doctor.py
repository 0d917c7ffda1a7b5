"""``pardist doctor``: would training start here, and what would hurt it? Started by any launcher, like the training.

Each step needs only what the steps before it have shown to work: this process alone, then the store, then plain
connections between hosts, then a process group. A rank that cannot go on says why; the first rank prints the table.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lightning_pardist.engines.process_group import init_process_group
from lightning_pardist.engines.rendezvous import MeetingPoint, open_store
from lightning_pardist.environments.facts import Facts, gather_facts
from lightning_pardist.environments.find import find
from lightning_pardist.mesh import AXES, ParallelDims

_CONNECT_TIMEOUT_S = 3.0
_SMALL_ROUNDS, _LARGE_ROUNDS = 20, 3
#: A clock that is this far off makes logs of different hosts hard to compare.
_SKEW_S = 1.0


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: After ``pardist doctor``.

    Returns:
        0 if training could start, 1 if not.
    """
    parser = argparse.ArgumentParser(prog="pardist doctor", description="Checks what training needs, on any launcher.")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for other ranks, per step")
    parser.add_argument("--devices", type=int, help="what Trainer(devices=) will be")
    parser.add_argument("--num-nodes", type=int, default=1, help="what Trainer(num_nodes=) will be")
    parser.add_argument("--megabytes", type=float, default=16.0, help="size of the messages that measure bandwidth")
    for axis in AXES:
        parser.add_argument(f"--{axis.replace('_', '-')}-size", dest=axis, type=int, default=None)
    options = parser.parse_args(list(arguments))
    # Whatever a library waits for: this is how long it may take in all.
    limit = _end_after(6 * options.timeout + 60)
    try:
        return _Examination(options).run()
    finally:
        limit.cancel()


class _Examination:
    """One rank's part of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._environment = find()
        self._facts, self._meeting = gather_facts(self._environment)

    def run(self) -> int:
        facts, options = self._facts, self._options
        if options.devices is not None:
            try:
                self._environment.validate_settings(options.devices, options.num_nodes)
            except (ValueError, RuntimeError) as error:
                facts.problems.append(str(error))
        if facts.world_size == 1 or self._meeting is None:
            _show([facts], {}, {}, _compare([facts]), facts.problems)
            return 1 if facts.problems else 0
        try:
            return self._with_others(self._meeting)
        except Exception as error:
            # One rank's view is all there is now, so every rank shows its own.
            problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            _show([facts], {}, {}, [], [*facts.problems, problem])
            return 1

    def _with_others(self, meeting: MeetingPoint) -> int:
        rank, size = self._facts.rank, self._facts.world_size
        wait = timedelta(seconds=self._options.timeout)
        store = open_store(meeting, rank=rank, world_size=size, timeout=wait)
        listener = socket.create_server((self._facts.address, 0))
        store.set(f"doctor/facts/{rank}", json.dumps([asdict(self._facts), listener.getsockname()[1]]))
        answers = [self._read(store, f"doctor/facts/{other}", f"rank {other} did not come") for other in range(size)]
        everyone, ports = [Facts(**facts) for facts, _ in answers], [port for _, port in answers]
        skews = self._clock(store)
        problems = self._reach(everyone, ports)
        # Nobody closes its port while others may still try it.
        store.set(f"doctor/problems/{rank}", json.dumps(problems))
        lists = [self._read(store, f"doctor/problems/{other}", f"rank {other} went silent") for other in range(size)]
        listener.close()
        problems = [problem for found in lists for problem in found]
        problems += [f"rank {facts.rank}: {problem}" for facts in everyone for problem in facts.problems]
        measured: dict[str, tuple[float, float]] = {}
        if not problems:
            measured = self._measure(meeting, store)
        if rank == 0:
            _show(everyone, skews, measured, _compare(everyone, skews), problems)
        # The first rank holds the store: it ends last.
        store.add("doctor/done", 1)
        deadline = time.monotonic() + 10
        while rank == 0 and store.add("doctor/done", 0) < size and time.monotonic() < deadline:
            time.sleep(0.05)
        if dist.is_initialized():
            dist.destroy_process_group()
        return 1 if problems else 0

    def _read(self, store: Store, key: str, otherwise: str) -> Any:
        deadline = time.monotonic() + self._options.timeout
        while not store.check([key]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{otherwise} within {self._options.timeout:g} s ({key}).")
            time.sleep(0.05)
        return json.loads(store.get(key))

    def _clock(self, store: Store) -> dict[int, float]:
        """Seconds by which each rank's clock is ahead of the first's, asked in turns."""
        rank, size = self._facts.rank, self._facts.world_size
        if rank != 0:
            asked = time.time()
            store.set(f"doctor/ask/{rank}", "1")
            theirs = float(store.get(f"doctor/time/{rank}"))
            store.set(f"doctor/skew/{rank}", str((asked + time.time()) / 2 - theirs))
            return {}
        skews = {0: 0.0}
        for other in range(1, size):
            store.get(f"doctor/ask/{other}")
            store.set(f"doctor/time/{other}", str(time.time()))
            skews[other] = float(store.get(f"doctor/skew/{other}"))
        return skews

    def _reach(self, everyone: list[Facts], ports: list[int]) -> list[str]:
        """Try a plain connection to the next rank and to the first: a firewall shows here, and not as a hang."""
        rank, size = self._facts.rank, self._facts.world_size
        found = []
        for other in sorted({0, (rank + 1) % size} - {rank}):
            # Through a shared file ranks meet without an address.
            where = (everyone[other].address or everyone[other].host, ports[other])
            try:
                socket.create_connection(where, timeout=_CONNECT_TIMEOUT_S).close()
            except OSError as error:
                found.append(
                    f"rank {rank} on {self._facts.host} does not reach rank {other} on {everyone[other].host} at"
                    f" {where[0]} port {where[1]} ({error}). Open the ports above 1024 between the hosts, or name the"
                    " right network with GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
                )
        return found

    def _measure(self, meeting: MeetingPoint, store: Store) -> dict[str, tuple[float, float]]:
        """Seconds of a small all-reduce, and bytes a second of a large one, of the slowest group of each axis."""
        options, facts = self._options, self._facts
        degrees = {axis: size for axis in AXES if (size := getattr(options, axis)) is not None}
        dims = ParallelDims.resolve(facts.world_size, **({"data_replicate": "auto"} | degrees))
        device = torch.device("cuda", facts.local_rank) if facts.device.startswith("cuda") else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        init_process_group(
            None,
            rank=facts.rank,
            world_size=facts.world_size,
            meeting=meeting,
            device=device,
            timeout=timedelta(seconds=options.timeout),
            store=store,
        )
        mesh, _ = dims.build(device.type)
        found = {}
        for axis in AXES:
            group = mesh.get_group(axis)
            size = group.size()
            if size == 1:
                continue
            small = _seconds(torch.zeros(1, device=device), group, _SMALL_ROUNDS)
            large = torch.zeros(int(options.megabytes * 2**20 / 4), device=device)
            # What a rank sends in an all-reduce among n: 2 (n-1)/n of the message.
            sent = 2 * (size - 1) / size * large.numel() * 4
            rate = sent / _seconds(large, group, _LARGE_ROUNDS)
            slowest = torch.tensor([small, -rate], dtype=torch.float64, device=device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            found[axis] = (float(slowest[0]), -float(slowest[1]))
        return found


def _seconds(tensor: torch.Tensor, group: dist.ProcessGroup, rounds: int) -> float:
    """Mean duration of an all-reduce over ``group``. Collective over it."""

    def wait() -> None:
        if tensor.is_cuda:
            torch.cuda.synchronize()

    dist.all_reduce(tensor, group=group)
    wait()
    started = time.perf_counter()
    for _ in range(rounds):
        dist.all_reduce(tensor, group=group)
    wait()
    return (time.perf_counter() - started) / rounds


def _compare(everyone: list[Facts], skews: dict[int, float] | None = None) -> list[str]:
    """What will hurt, seen over all ranks."""
    found = [f"rank {facts.rank} on {facts.host}: {text}" for facts in everyone for text in facts.warnings]
    for package in sorted({name for facts in everyone for name in facts.versions}):
        versions: dict[str, list[int]] = {}
        for facts in everyone:
            versions.setdefault(facts.versions.get(package, "none"), []).append(facts.rank)
        if len(versions) > 1:
            shown = ", ".join(f"{version} on rank {_ranks(ranks)}" for version, ranks in versions.items())
            found.append(f"versions of {package} differ: {shown}. Use one environment everywhere.")
    kinds = {facts.device.partition(" ")[2] or facts.device for facts in everyone}
    if len(kinds) > 1:
        found.append(f"devices differ: {', '.join(sorted(kinds))}. Every step waits for the slowest.")
    owners: dict[tuple[str, str], list[int]] = {}
    for facts in everyone:
        if facts.device_id:
            owners.setdefault((facts.host, facts.device_id), []).append(facts.rank)
    for (host, _), ranks in owners.items():
        if len(ranks) > 1:
            found.append(f"ranks {_ranks(ranks)} on {host} share one GPU. Start one rank for each.")
    for host in sorted({facts.host for facts in everyone}):
        here = [facts for facts in everyone if facts.host == host]
        cores = max(facts.cores for facts in here)
        if sum(facts.threads for facts in here) > cores and here[0].device == "cpu":
            found.append(
                f"{len(here)} rank(s) of {here[0].threads} thread(s) share {cores} core(s) on {host}."
                f" Set OMP_NUM_THREADS={max(1, cores // len(here))}."
            )
        numbers = sorted(facts.rank for facts in here)
        if numbers[-1] - numbers[0] >= len(here):
            found.append(
                f"the ranks on {host} are not neighbours, so that tensor groups would span hosts. Place ranks host by"
                " host (`srun --distribution=block`, `mpirun --map-by slot`)."
            )
    for rank, skew in (skews or {}).items():
        if abs(skew) > _SKEW_S:
            found.append(f"the clock of rank {rank} is {skew:+.1f} s off rank 0's. Synchronise clocks (NTP).")
    return found


def _show(
    everyone: list[Facts],
    skews: dict[int, float],
    measured: dict[str, tuple[float, float]],
    warnings: list[str],
    problems: list[str],
) -> None:
    first = everyone[0]
    lines = [
        f"environment  {first.environment}: {first.why}",
        f"ranks        {first.world_size}, meeting at {first.meeting}",
        f"versions     {', '.join(f'{name} {version}' for name, version in first.versions.items())}",
        "",
    ]
    rows: list[tuple[str, ...]] = [
        ("rank", "node", "local", "host", "address", "interface", "device", "cores", "clock")
    ]
    for facts in everyone:
        clock = f"{skews[facts.rank] * 1e3:+.1f} ms" if facts.rank in skews else "-"
        own = (facts.rank, facts.node_rank, facts.local_rank, facts.host, facts.address, facts.interface, facts.device)
        rows.append(tuple(str(value) for value in (*own, facts.cores, clock)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for axis, (latency, rate) in measured.items():
        lines.append(f"{axis}: all-reduce of one number {latency * 1e6:.0f} us, {rate / 1e6:.0f} MB/s per rank")
    lines += [f"warning: {text}" for text in warnings]
    lines += [f"error: {text}" for text in problems]
    lines.append("training could not start" if problems else "training could start")
    # One write, so that ranks do not print into each other's lines.
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _end_after(seconds: float) -> threading.Timer:
    def end() -> None:
        print(f"error: no result within {seconds:.0f} s\ntraining could not start", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer
