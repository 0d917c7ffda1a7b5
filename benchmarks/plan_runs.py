"""Real ranks on this machine that train one small module after another, for comparison with plans.

All cells run on the same processes, which start only once; timed cells take turns. A cell's result is a line of JSON on
each rank's output.
"""

from __future__ import annotations

import lightning_pardist  # noqa: F401  (before lightning)

# isort: split
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from threading import Timer
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from benchmarks.fit import parse
from benchmarks.harness import free_port
from benchmarks.plan_modules import MODELS
from lightning_pardist.planner.candidates import Candidate
from lightning_pardist.planner.step_ledger import StepLedger

_WARM_STEPS = 4


@dataclass(frozen=True)
class Cell:
    """One training run.

    Attributes:
        model: A name of :data:`~benchmarks.plan_modules.MODELS`.
        batch_size: Samples per batch.
        strategy: Registered name, with settings as ``NAME@key=value,...``.
    """

    model: str
    batch_size: int
    strategy: str

    @property
    def candidate(self) -> Candidate:
        """The planner's candidate for this strategy."""
        return Candidate(*parse(self.strategy))


class _Timed(pl.Callback):
    """Callback that records the end time of each step."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self._ends.append(time.perf_counter())

    @property
    def median(self) -> float:
        return statistics.median(end - begin for begin, end in pairwise(self._ends[_WARM_STEPS - 1 :]))


def train(cell: Cell, devices: int, steps: int, *, timed: bool) -> Any:
    """Return seconds per step, bytes by kind at the third step's peak, or a refusal's message. Collective."""
    torch.manual_seed(0)
    callback = _Timed() if timed else StepLedger(step=3)
    loader = DataLoader(MODELS[cell.model].data(steps * cell.batch_size), batch_size=cell.batch_size)
    candidate = cell.candidate
    try:
        trainer = pl.Trainer(
            strategy=candidate.entry.make(**{**candidate.entry.preset, **candidate.settings}),
            accelerator="cpu",
            devices=devices,
            max_steps=steps,
            callbacks=[callback],
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(MODELS[cell.model](), loader)
    except (ValueError, MisconfigurationException) as error:
        return str(error)
    if isinstance(callback, StepLedger):
        return None if callback.held is None else callback.held.by_kind
    return callback.median


def serve(text: str, devices: int, *, timed: bool) -> None:
    """Run one rank: train the cells of a JSON text, and print a line for each."""
    torch.set_num_threads(1)
    for model, batch_size, strategy, steps in json.loads(text):
        print(json.dumps(train(Cell(model, batch_size, strategy), devices, steps, timed=timed)), flush=True)


def run_cells(cells: Sequence[tuple[Cell, int]], devices: int, *, timed: bool, limit_s: float) -> Iterator[list[Any]]:
    """Yield all ranks' results for one cell after another; stop early if a rank exits or the time limit is reached.

    Args:
        cells: Cells with their numbers of steps.
        devices: Number of ranks.
        timed: Whether to measure seconds instead of bytes.
        limit_s: Seconds after which the ranks are killed.
    """
    text = json.dumps([[*asdict(cell).values(), steps] for cell, steps in cells])
    command = [sys.executable, "-m", "benchmarks.plan_check", "--serve", text, "--devices", str(devices)]
    command += ["--time"] * timed
    shared = {"WORLD_SIZE": str(devices), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"NODE_RANK": "0", "GROUP_RANK": "0", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=None if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(devices)
    ]

    def end() -> None:
        for rank in ranks:
            rank.kill()

    timer = Timer(limit_s, end)
    timer.start()
    try:
        for _ in cells:
            lines = [rank.stdout.readline() if rank.stdout else "" for rank in ranks]
            if not all(lines):
                return
            yield [json.loads(line) for line in lines]
    finally:
        timer.cancel()
        end()
        for rank in ranks:
            rank.wait()
