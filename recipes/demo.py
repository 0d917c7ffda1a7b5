"""Train the MNIST recipe on one process and on two and compare the results: ``python -m recipes.demo``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import lightning_pardist  # isort: skip  (first: it registers the strategies)
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.optim import Optimizer

from lightning_pardist.engines.common.memory import held_bytes
from recipes.mnist.data import DigitData
from recipes.mnist.model import DigitClassifier

GLOBAL_BATCH = 64


class Holdings(Callback):
    """Callback that records every rank's memory at its peak in a step: before the last optimizer step."""

    def __init__(self) -> None:
        self.here: dict[str, float] = {}
        self.by_rank: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, lightning_pardist.PardistStrategy):
            held = strategy.held()
        else:
            held = held_bytes([pl_module], trainer.optimizers)
        self.here = {"parameters": held.parameters, "gradients": held.gradients, "optimizer": held.optimizer}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.by_rank = [self.here]
        if trainer.world_size > 1:
            self.by_rank = [{} for _ in range(trainer.world_size)]
            dist.all_gather_object(self.by_rank, self.here)


def run(strategy: str, devices: int, epochs: int, result: Path, data_dir: str) -> None:
    """Train once and write the figures to compare to ``result``, as JSON."""
    seed_everything(0, verbose=False)
    holdings = Holdings()
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=devices,
        max_epochs=epochs,
        # In fp32, Adam turns rounding noise into full-size steps: two runs diverge after some hundred of them.
        precision="64-true",
        callbacks=[holdings],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = DigitClassifier(dropout=0.0)
    started = time.perf_counter()
    trainer.fit(model, DigitData(data_dir, batch_size=GLOBAL_BATCH // devices))
    seconds = time.perf_counter() - started
    metrics = trainer.callback_metrics
    if trainer.is_global_zero:
        summary = {
            "processes": devices,
            "accuracy": metrics["val_acc"].item(),
            "loss": metrics["val_loss"].item(),
            "seconds": seconds,
            "held": holdings.by_rank,
        }
        result.write_text(json.dumps(summary))


def main() -> None:
    """Start both runs and print their results side by side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="pardist_ddp")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--data-dir", default=".data/mnist", help="folder with MNIST's IDX files, if you have them")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.result is not None:
        run(args.strategy, args.devices, args.epochs, args.result, args.data_dir)
        return
    summaries = []
    with tempfile.TemporaryDirectory() as folder:
        for strategy, devices in (("auto", 1), (args.strategy, args.devices)):
            result = Path(folder) / f"{strategy}.json"
            print(f"\n=== {strategy} on {devices} process{'es' if devices > 1 else ''}", flush=True)
            command = [sys.executable, "-m", "recipes.demo", "--strategy", strategy, "--devices", str(devices)]
            command += ["--epochs", str(args.epochs), "--data-dir", args.data_dir, "--result", str(result)]
            subprocess.run(command, check=True)
            summaries.append({"name": strategy} | json.loads(result.read_text()))
    print(f"\n{'':24}{'one process':>18}{args.strategy + ' x ' + str(args.devices):>24}")
    for label, key, form in (
        ("validation accuracy", "accuracy", "{:.2%}"),
        ("validation loss", "loss", "{:.7f}"),
        ("seconds", "seconds", "{:.1f}"),
    ):
        one, many = (form.format(summary[key]) for summary in summaries)
        print(f"{label:24}{one:>18}{many:>24}")
    for kind in ("parameters", "gradients", "optimizer"):
        one, many = (" + ".join(f"{rank[kind] / 1e6:.2f}" for rank in summary["held"]) for summary in summaries)
        print(f"{'MB of ' + kind + ', by rank':24}{one:>18}{many:>24}")
    difference = abs(summaries[0]["loss"] - summaries[1]["loss"]) / summaries[0]["loss"]
    print(f"\nThe losses differ by {difference:.1e} of their size.")


if __name__ == "__main__":
    main()
