"""Checks whether training can start, and what would slow it down. Started by any launcher, like the training.

Each step depends only on what earlier steps have verified: this process alone, then the store, then plain connections
between hosts, then a process group. A rank that cannot continue reports why; the first rank prints the table. Settings
are validated by the Trainer itself, which is created as for training.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_pardist.compat.process_groups import Store
from lightning_pardist.engines.common.devices import device_of_rank, rank_devices, synchronize
from lightning_pardist.mesh import ParallelDims
from lightning_pardist.planner.measuring import measure_alone, measure_rank
from lightning_pardist.planner.profiles import DeviceProfile
from lightning_pardist.planner.words import sentence
from lightning_pardist.registry import TABLE
from lightning_pardist.runtime.environments.facts import Facts, gather_facts
from lightning_pardist.runtime.environments.find import find
from lightning_pardist.runtime.process_exit import exit_now, write_stderr
from lightning_pardist.runtime.process_group import init_process_group
from lightning_pardist.runtime.rendezvous import RendezvousEndpoint, open_store
from lightning_pardist.strategies.hybrid import HybridStrategy
from lightning_pardist.strategies.strategy import PardistStrategy

_CONNECT_TIMEOUT_S = 3.0
_SMALL_ROUNDS, _LARGE_ROUNDS = 20, 3
#: Clock difference above which logs of different hosts are hard to compare.
_SKEW_S = 1.0


@dataclass(frozen=True)
class Options:
    """Settings of the Trainer, and of the examination.

    Attributes:
        strategy: A registered name, or None for one with the degrees below.
        devices: ``Trainer(devices=)``, or None if it is unknown.
        num_nodes: ``Trainer(num_nodes=)``.
        accelerator: ``Trainer(accelerator=)``.
        sizes: Settings of the strategy, such as ``{"tensor_parallel_size": 2}``.
        timeout_s: Seconds to wait for other ranks, per step.
        megabytes: Size of the messages that measure bandwidth.
        save: Path for the profile of devices and links; None for no profile.
        disk: Folder whose disk is measured for the profile; None writes no file, and uses a data sheet's rate.
    """

    strategy: str | None = None
    devices: int | None = None
    num_nodes: int = 1
    accelerator: str = "auto"
    sizes: dict[str, int] = field(default_factory=dict)
    timeout_s: float = 60.0
    megabytes: float = 16.0
    save: str | None = None
    disk: str | None = None

    def make_strategy(self) -> PardistStrategy:
        """Create the Trainer's strategy.

        Raises:
            ValueError: If it does not accept one of the sizes, or its value.
        """
        if self.strategy is None:
            data = "zero3" if "data_shard_size" in self.sizes else "ddp"
            return HybridStrategy(data_parallel=data, **self.sizes)  # type: ignore[arg-type]
        entry = next(entry for entry in TABLE if entry.name == self.strategy)
        try:
            return entry.make(**{**entry.preset, **self.sizes})
        except TypeError as error:
            raise ValueError(f"strategy={self.strategy!r} does not take {', '.join(self.sizes)}: {error}") from None


def examine(options: Options) -> int:
    """Examine the ranks, all of them if a launcher started several, and print the result.

    Args:
        options: Settings of the Trainer and of the examination.

    Returns:
        0 if training could start, 1 if not, 2 if the profile could not be saved at the given path.
    """
    # Limits the total time, including waits inside libraries.
    limit = _end_after(6 * options.timeout_s + 60)
    try:
        return _Examination(options).run()
    finally:
        limit.cancel()


class _Examination:
    """One rank's part of the examination."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._dims, self._environment, refusal = _as_the_trainer_would(options)
        self._facts, self._meeting = gather_facts(self._environment)
        if refusal and refusal not in self._facts.problems:
            self._facts.problems.append(refusal)

    def run(self) -> int:
        facts = self._facts
        # Only the first rank writes the profile.
        unwritable = _unwritable(self._options.save) if facts.rank == 0 else ""
        alone = facts.world_size == 1 or not self._environment.creates_processes_externally
        if alone or self._meeting is None:
            if unwritable:
                return _refused(unwritable)
            _show([facts], {}, {}, _compare([facts]), facts.problems, self._not_examined(alone))
            if self._options.save is not None:
                # The default on CPU is two ranks, because a single rank cannot measure a link.
                ranks = max(self._options.devices or len(rank_devices()) or 2, 1)
                _announce_measurement(ranks)
                try:
                    self._write(measure_alone(ranks, disk=self._options.disk))
                except (OSError, RuntimeError) as error:
                    print(f"error: nothing was saved: {error}", file=sys.stderr)
                    return 1
            return 1 if facts.problems else 0
        try:
            return self._examine_with_peers(self._meeting, unwritable)
        except Exception as error:
            # Ranks may be unable to exchange results at this point, so every rank prints its own.
            problem = f"{type(error).__name__}: {sentence(error)}"
            _show([self._facts], {}, {}, [], [*self._facts.problems, problem], [])
            if not isinstance(error, (OSError, RuntimeError, ValueError)):
                # Not caused by the environment: a defect of this module or of a library.
                raise
            return 1

    def _not_examined(self, alone: bool) -> list[str]:
        found = []
        if self._options.devices is None:
            like_the_training = ", or launch doctor like the training (srun, torchrun, mpirun)" if alone else ""
            found.append(
                "the Trainer's devices and num_nodes, and whether the strategy's degrees match them. Pass"
                f" --devices and --num-nodes{like_the_training}."
            )
        elif alone and (ranks := self._options.devices * self._options.num_nodes) > 1:
            found.append(
                f"connections among the {ranks} ranks, because no launcher started them. The Trainer accepts its"
                " settings."
            )
        return found

    def _examine_with_peers(self, meeting: RendezvousEndpoint, unwritable: str) -> int:
        rank, size = self._facts.rank, self._facts.world_size
        wait = timedelta(seconds=self._options.timeout_s)
        store = open_store(meeting, rank=rank, world_size=size, timeout=wait)
        listener = socket.create_server((self._facts.address, 0))
        store.set(f"doctor/facts/{rank}", json.dumps([asdict(self._facts), listener.getsockname()[1], unwritable]))
        answers = [self._read(store, f"doctor/facts/{other}", f"rank {other} did not connect") for other in range(size)]
        everyone, ports = [Facts(**facts) for facts, _, _ in answers], [port for _, port, _ in answers]
        if answers[0][2]:
            listener.close()
            self._wait_for_peers(store)
            return _refused(unwritable) if rank == 0 else 2
        skews = self._clock(store)
        problems = self._probe_connections(everyone, ports)
        # Keep the port open until all ranks have tried to connect.
        store.set(f"doctor/problems/{rank}", json.dumps(problems))
        lists = [
            self._read(store, f"doctor/problems/{other}", f"rank {other} did not report its connections")
            for other in range(size)
        ]
        listener.close()
        problems = [problem for found in lists for problem in found]
        problems += [f"rank {facts.rank}: {problem}" for facts in everyone for problem in facts.problems]
        measured: dict[str, tuple[float, float]] = {}
        if not problems:
            measured = self._measure(meeting, store, [facts.host for facts in everyone])
        if rank == 0:
            _show(everyone, skews, measured, _compare(everyone, skews), problems, self._not_examined(alone=False))
        self._wait_for_peers(store)
        if dist.is_initialized():
            dist.destroy_process_group()
        return 1 if problems else 0

    def _wait_for_peers(self, store: Store) -> None:
        """Wait on the first rank, which hosts the store and ends last, for the other ranks."""
        rank, size = self._facts.rank, self._facts.world_size
        store.add("doctor/done", 1)
        deadline = time.monotonic() + 10
        while rank == 0 and store.add("doctor/done", 0) < size and time.monotonic() < deadline:
            time.sleep(0.05)

    def _read(self, store: Store, key: str, otherwise: str) -> Any:
        deadline = time.monotonic() + self._options.timeout_s
        while not store.check([key]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{otherwise} within {self._options.timeout_s:g} s ({key}).")
            time.sleep(0.05)
        return json.loads(store.get(key))

    def _clock(self, store: Store) -> dict[int, float]:
        """Return the seconds by which each rank's clock is ahead of the first's, measured rank by rank."""
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

    def _probe_connections(self, everyone: list[Facts], ports: list[int]) -> list[str]:
        """Try a plain connection to the next and the first rank, to detect firewalls that would cause a hang."""
        rank, size = self._facts.rank, self._facts.world_size
        found = []
        for other in sorted({0, (rank + 1) % size} - {rank}):
            # With a shared file as the rendezvous, ranks have no address.
            where = (everyone[other].address or everyone[other].host, ports[other])
            try:
                socket.create_connection(where, timeout=_CONNECT_TIMEOUT_S).close()
            except OSError as error:
                found.append(
                    f"rank {rank} on {self._facts.host} cannot connect to rank {other} on {everyone[other].host} at"
                    f" {where[0]} port {where[1]} ({error}). Open the ports above 1024 between the hosts, or set"
                    " GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface of the right network."
                )
        return found

    def _measure(self, meeting: RendezvousEndpoint, store: Store, hosts: list[str]) -> dict[str, tuple[float, float]]:
        """Return the seconds of a small, and bytes per second of a large all-reduce in each axis' slowest group."""
        options, facts = self._options, self._facts
        dims = self._dims or options.make_strategy().resolve_dims(facts.world_size)
        device = device_of_rank(facts.local_rank)
        init_process_group(
            None,
            rank=facts.rank,
            world_size=facts.world_size,
            meeting=meeting,
            device=device,
            timeout=timedelta(seconds=options.timeout_s),
            store=store,
        )
        mesh = dims.build(device.type).all
        found = {}
        for axis in dims.layout:
            group = mesh.get_group(axis)
            size = group.size()
            small = _seconds(torch.zeros(1, device=device), group, _SMALL_ROUNDS)
            large = torch.zeros(int(options.megabytes * 2**20 / 4), device=device)
            # Bytes that each rank sends in an all-reduce over n ranks: 2 (n-1)/n of the message.
            sent = 2 * (size - 1) / size * large.numel() * 4
            rate = sent / _seconds(large, group, _LARGE_ROUNDS)
            slowest = torch.tensor([small, -rate], dtype=torch.float64, device=device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            found[axis] = (float(slowest[0]), -float(slowest[1]))
        if options.save is not None:
            if facts.rank == 0:
                _announce_measurement(facts.world_size)
            profile = measure_rank(device, hosts=hosts, disk=options.disk)
            if facts.rank == 0:
                self._write(profile)
        return found

    def _write(self, profile: DeviceProfile) -> None:
        path = Path(str(self._options.save))
        path.write_text(json.dumps(profile.to_json(), indent=2) + "\n")
        print(f"The profile of {profile.name} was written to {path}. Use it with: pardist plan --device {path}")


def _unwritable(path: str | None) -> str:
    """Return why a profile cannot be written to a path; empty if it can, or path is None. Keeps an existing file."""
    if path is None:
        return ""
    existed = os.path.lexists(path)
    try:
        Path(path).open("ab").close()
    except OSError as error:
        return f"--save {path} cannot be written: {error.strerror}."
    if not existed:
        Path(path).unlink()
    return ""


def _refused(message: str) -> int:
    print(f"pardist doctor: {message}", file=sys.stderr)
    return 2


def _announce_measurement(num_ranks: int) -> None:
    print(f"Measuring devices and links on {num_ranks} rank(s), which takes about a minute.", flush=True)


def _as_the_trainer_would(options: Options) -> tuple[ParallelDims | None, ClusterEnvironment, str]:
    """Create the Trainer without starting ranks, and return its degrees, its launcher, and its error, if any.

    If its devices are unknown, the degrees are compared with the ranks that a launcher has started.
    """
    environment, dims = find(), None
    # Suppress Lightning's messages about devices and its tips.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    try:
        strategy = options.make_strategy()
        if options.devices is None:
            if environment.creates_processes_externally:
                dims = strategy.resolve_dims(environment.world_size())
            return dims, environment, ""
        pl.Trainer(
            strategy=strategy,
            devices=options.devices,
            num_nodes=options.num_nodes,
            accelerator=options.accelerator,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    except (ValueError, RuntimeError, MisconfigurationException) as error:
        return None, environment, str(error)
    return strategy.dims, strategy.cluster_environment or environment, ""


def _seconds(tensor: torch.Tensor, group: dist.ProcessGroup, rounds: int) -> float:
    """Return the mean duration of an all-reduce over ``group``. Collective over it."""

    dist.all_reduce(tensor, group=group)
    synchronize(tensor.device)
    started = time.perf_counter()
    for _ in range(rounds):
        dist.all_reduce(tensor, group=group)
    synchronize(tensor.device)
    return (time.perf_counter() - started) / rounds


def _compare(everyone: list[Facts], skews: dict[int, float] | None = None) -> list[str]:
    """Return warnings from a comparison of all ranks."""
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
                f"{len(here)} rank(s) with {here[0].threads} thread(s) each share {cores} core(s) on {host}. Set"
                f" OMP_NUM_THREADS={max(1, cores // len(here))}."
            )
        numbers = sorted(facts.rank for facts in here)
        if numbers[-1] - numbers[0] >= len(here):
            found.append(
                f"the ranks on {host} are not consecutive, so tensor-parallel groups would span hosts. Place ranks"
                " host by host (`srun --distribution=block`, `mpirun --map-by slot`)."
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
    not_examined: list[str],
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
    lines += [f"not examined: {text}" for text in not_examined if not problems]
    lines.append("training could not start" if problems else "training could start")
    # One write, so that ranks do not print into each other's lines.
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _end_after(seconds: float) -> threading.Timer:
    def end() -> None:
        write_stderr(f"error: no result within {seconds:.0f} s\ntraining could not start")
        exit_now()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer
