"""Effect of one slow worker on the others: ``python -m benchmarks.parameter_server``.

A step sleeps for the given milliseconds (standing for a device's work, which uses no host core), on the last rank four
times as long if it is the slow one. Every turn is a separate process; turns alternate. Steps/s are those of the ranks
that are not slow, from the start of their first step to the start of their last one, medians over turns.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning_pardist  # isort: skip
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.machine import keep

STRATEGIES: dict[str, dict[str, Any] | None] = {
    "pardist_ddp": None,
    "pardist_ps": {"max_staleness": 0},
    "pardist_ps_async, max_staleness=4": {"max_staleness": 4},
    "pardist_ps_async, max_staleness=None": {"max_staleness": None},
}
WIDTH, BATCH, SLOWER = 256, 8, 4


class Net(pl.LightningModule):
    """MLP whose steps take a given time.

    Args:
        step_s: Seconds of a step.
        slow: The rank that takes four times as long; None if there is none.
    """

    def __init__(self, step_s: float, slow: int | None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.step_s, self.slow = step_s, slow
        self.times: list[float] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Compute the loss of a regression on the inputs, after the step's sleep."""
        self.times.append(time.perf_counter())
        time.sleep(self.step_s * (SLOWER if self.trainer.global_rank == self.slow else 1))
        return F.mse_loss(self.layers(batch[0]), batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def one_turn(strategy: str, options: argparse.Namespace, slow: int | None) -> None:
    """Train, and print this rank's steps per second unless it is the last one."""
    settings = STRATEGIES[strategy]
    net = Net(options.step_ms / 1000, slow)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="pardist_ddp" if settings is None else lightning_pardist.ParameterServerStrategy(**settings),
        devices=options.ranks,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    samples = torch.randn(BATCH * options.ranks * options.steps, WIDTH)
    trainer.fit(net, DataLoader(TensorDataset(samples), batch_size=BATCH))
    if trainer.global_rank != options.ranks - 1:
        print(f"FOUND {(len(net.times) - 1) / (net.times[-1] - net.times[0])}", flush=True)


def main() -> None:
    """Run every strategy, with and without a slow worker, in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--output", type=Path, help="folder for the table")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--one", nargs=2, metavar=("STRATEGY", "SLOW"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one_turn(options.one[0], options, int(options.one[1]) if options.one[1] != "none" else None)
        return
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(options.turns):
        for strategy in options.strategies:
            for slow in ("none", str(options.ranks - 1)):
                command = [sys.executable, "-m", "benchmarks.parameter_server", *sys.argv[1:], "--one", strategy, slow]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                values = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("FOUND ")]
                if len(values) != options.ranks - 1:
                    raise SystemExit(f"{strategy}, slow worker {slow}:\n{done.stdout}\n{done.stderr}")
                found.setdefault((strategy, slow), []).append(statistics.mean(values))
                print(
                    f"{strategy}, slow worker {slow}: {statistics.mean(values):.1f} steps/s",
                    file=sys.stderr,
                    flush=True,
                )
    lines = ["| strategy | steps/s, all alike | one worker 4x slower | of that |", "| --- | --- | --- | --- |"]
    for strategy in options.strategies:
        alike, beside = (statistics.median(found[strategy, slow]) for slow in ("none", str(options.ranks - 1)))
        lines.append(f"| {strategy} | {alike:.1f} | {beside:.1f} | {beside / alike:.0%} |")
    keep(options.output, f"parameter-server-{options.ranks}", lines)


if __name__ == "__main__":
    main()
