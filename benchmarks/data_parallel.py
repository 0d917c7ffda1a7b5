"""Threads of one process against one process per device: ``python -m benchmarks.data_parallel``.

Each turn is a separate process that trains an MLP with large layers or one with many small layers by the Trainer;
turns of the strategies alternate. Samples/s are medians over turns of the time of the steps after the warm-up.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import lightning_pardist  # isort: skip  # noqa: F401
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.machine import keep

STRATEGIES = ("auto", "pardist_dp", "pardist_ddp")
#: Width and number of layers.
MODELS = {"large layers": (1024, 4), "small layers": (64, 60)}
GLOBAL_BATCH, WARMUP = 256, 3


class Net(pl.LightningModule):
    """Plain MLP that records the start times of its steps."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))
        self.times: list[float] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Compute the loss of a regression on the inputs."""
        return F.mse_loss(self.layers(batch[0]), batch[0])

    def on_train_batch_start(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """Record the time."""
        self.times.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def one_turn(strategy: str, model: str, devices: int, steps: int) -> None:
    """Train, and print the seconds per step on rank zero."""
    ranks = devices if strategy == "pardist_ddp" else 1
    net = Net(*MODELS[model])
    data = TensorDataset(torch.randn(GLOBAL_BATCH * (steps + WARMUP + 1), MODELS[model][0]))
    pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=1 if strategy == "auto" else devices,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(net, DataLoader(data, batch_size=GLOBAL_BATCH // ranks))
    if net.global_rank == 0:
        print("seconds", (net.times[-1] - net.times[WARMUP]) / (len(net.times) - 1 - WARMUP))


def main() -> None:
    """Run the turns of all strategies and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path, help="folder for the table")
    parser.add_argument("--one", nargs=2, metavar=("STRATEGY", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one_turn(*options.one, options.devices, options.steps)
        return
    found: dict[tuple[str, str], list[float]] = {}
    settings = ["--devices", str(options.devices), "--steps", str(options.steps)]
    for _ in range(options.turns):
        for model in MODELS:
            for strategy in STRATEGIES:
                command = [sys.executable, "-m", "benchmarks.data_parallel", *settings, "--one", strategy, model]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                seconds = next((line for line in done.stdout.splitlines() if line.startswith("seconds")), None)
                if seconds is None:
                    raise SystemExit(f"{strategy}, {model}:\n{done.stdout}\n{done.stderr}")
                found.setdefault((model, strategy), []).append(GLOBAL_BATCH / float(seconds.split()[1]))
                print(f"{model}, {strategy}: {found[model, strategy][-1]:.0f} samples/s", file=sys.stderr, flush=True)
    lines = [f"| model | strategy | samples/s, {options.devices} devices | least - most of {options.turns} turns |"]
    lines.append("| --- | --- | --- | --- |")
    for (model, strategy), rates in found.items():
        spread = f"{min(rates):.0f} - {max(rates):.0f}"
        lines.append(f"| {model} | {strategy} | {statistics.median(rates):.0f} | {spread} |")
    keep(options.output, f"data-parallel-{options.devices}", lines)


if __name__ == "__main__":
    main()
