"""One rank of one candidate: a process that trains a round when the harness releases it, and waits in between.

[Note: turns] Every candidate's ranks run for the whole benchmark, each in one uninterrupted training. Before the first
step of a round they block in the :class:`Gate` until the harness releases them, while all other candidates' ranks wait
at theirs. A round thus has no start-up cost, a drift of the machine's load affects all candidates equally, peak memory
is a candidate's own, and a ``Trainer.fit`` is measured as its user would see it.
"""

from __future__ import annotations

import lightning_pardist  # noqa: F401  (before lightning)

# isort: split
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import machine, network
from benchmarks.devices import Clock
from benchmarks.settings import Settings

#: The harness's ends of all pipes so far; a forked rank inherits them and must close them.
harness_ends: list[Connection] = []


class Channel:
    """Connection to the harness: reports go out, releases come in.

    Args:
        connection: Pipe to the harness.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, event: str, **values: Any) -> None:
        """Send an event with its values to the harness."""
        self._connection.send({"event": event, **values})

    def wait(self) -> None:
        """Block until the harness sends "go"; exit the process if the harness is gone."""
        try:
            self._connection.recv()
        except (EOFError, OSError):
            # A single rank cannot continue: no collective would complete.
            os._exit(3)


class Gate:
    """Gate that a candidate's training passes before every step; it measures times and bytes.

    Args:
        settings: Settings of the run.
        channel: Channel to the harness.
        more: Called at the end of every round for additional values of its report.
    """

    def __init__(
        self, settings: Settings, channel: Channel, *, more: Callable[[], dict[str, Any]] | None = None
    ) -> None:
        self._settings = settings
        self._channel = channel
        self._more = more or dict
        self._index = 0
        self._clock = Clock(settings.accelerator)
        self._loss: Tensor | None = None
        self._sent_before: int | None = None
        self._worked_before = 0.0
        self._faults_before = 0
        self._start = time.perf_counter()

    def before_step(self, held: Callable[[], dict[str, int]]) -> None:
        """Call before every one of :attr:`Settings.total_steps` steps. Collective over the candidate's ranks.

        Args:
            held: Returns the bytes of model states on this rank, with ``num_parameters`` and ``total`` among the keys.
        """
        index, position = self._index, self._index % self._settings.steps_a_round
        self._index += 1
        if index > 0 and position == 0:
            self._close_round(held)
        if position == 0:
            if index == 0:
                self._clock.make_room()
                setup_s = time.perf_counter() - self._start
                self._channel.send("ready", setup_s=setup_s, device=self._clock.device_name)
            self._channel.wait()
        if position == self._settings.warmup:
            _barrier()
            self._sent_before, self._worked_before = network.loopback_bytes(), time.process_time()
            self._faults_before = machine.page_faults()
            self._clock.start()
        elif position > self._settings.warmup:
            self._clock.stamp()

    def took(self, loss: Tensor) -> None:
        """Record the loss of a step; its value is not synchronized to the host before the round ends."""
        self._loss = loss.detach()

    def _close_round(self, held: Callable[[], dict[str, int]]) -> None:
        step_s = self._clock.stop()
        worked, faults = time.process_time() - self._worked_before, machine.page_faults() - self._faults_before
        # The round's traffic is complete only once all ranks are here.
        _barrier()
        sent_after = network.loopback_bytes()
        memory = self._clock.memory()
        self._clock.make_room()
        self._channel.send(
            "round",
            step_s=step_s,
            cpu_s=worked,
            faults=faults,
            held=held(),
            peak=machine.peak_resident_bytes(),
            sent=None if sent_after is None or self._sent_before is None else sent_after - self._sent_before,
            loss=None if self._loss is None else float(self._loss),
            **memory,
            **self._more(),
        )


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def serve(name: str, settings: Settings, connection: Connection, environment: dict[str, str], log: Path) -> None:
    """Run one rank's process.

    Args:
        name: Name of the candidate.
        settings: Settings of the run.
        connection: Pipe to the harness.
        environment: This rank's environment variables, named as torchrun sets them.
        log: File for the output.
    """
    # Imported here: a comparison of commits uses only the gate, with another version of the candidates' imports.
    from benchmarks.candidates import find

    for inherited in harness_ends:
        # Otherwise a rank would not receive EOF when the harness exits.
        inherited.close()
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    if settings.accelerator == "cpu":
        torch.set_num_threads(1)
    channel = Channel(connection)
    candidate = find(name)
    channel.send("imported", resident=machine.peak_resident_bytes())
    channel.wait()
    try:
        candidate.run(settings, Gate(settings, channel))
    except BaseException:
        channel.send("failed", trace=traceback.format_exc())
    # Another rank may be blocked in a collective with this one: the harness kills both.
    os._exit(1)
