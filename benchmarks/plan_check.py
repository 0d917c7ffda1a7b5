"""The planner's memory beside real runs: the same count of the same step, of tensors with values and without.

Each cell trains two steps under a strategy on real ranks of this machine, which communicate by gloo, and counts every
storage that comes and goes in the second step; then it plans the same rank. The largest of the ranks is shown.
"""

from __future__ import annotations

import lightning_pardist  # noqa: F401  (before lightning)

# isort: split
import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.workloads import GPTLoss
from lightning_pardist.planner.planned_rank import Place, trace_rank
from lightning_pardist.planner.step_ledger import StepLedger
from lightning_pardist.registry import TABLE

STRATEGIES = ("pardist_ddp", "pardist_zero1", "pardist_zero2", "pardist_zero3", "pardist_tp", "pardist_pp")


class _Module(pl.LightningModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class GPTModule(_Module):
    """A decoder of 3 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = GPTLoss(dim=192, layers=4, heads=4, context=128, vocab_size=4096)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(*batch)

    @staticmethod
    def data(count: int) -> TensorDataset:
        tokens = torch.randint(4096, (count, 129), generator=torch.Generator().manual_seed(1))
        return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


class ResNetModule(_Module):
    """ResNet-18 on images of 64 pixels."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models import resnet18

        self.net = resnet18(num_classes=10)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    @staticmethod
    def data(count: int) -> TensorDataset:
        return TensorDataset(torch.randn(count, 3, 64, 64), torch.randint(10, (count,)))


class LSTMModule(_Module):
    """Two LSTM layers over text, 2 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2000, 256)
        self.lstm = nn.LSTM(256, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 2000)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out, _ = self.lstm(self.embed(batch[0]))
        return F.cross_entropy(self.head(out).flatten(0, 1), batch[1].flatten())

    @staticmethod
    def data(count: int) -> TensorDataset:
        tokens = torch.randint(2000, (count, 65), generator=torch.Generator().manual_seed(1))
        return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


MODELS: dict[str, Any] = {"gpt": GPTModule, "resnet18": ResNetModule, "lstm": LSTMModule}


class _Written(StepLedger):
    """Writes what it has counted to a file a rank."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self.held is not None:
            kinds = self.held.by_kind
            Path(self.folder, f"{trainer.global_rank}.json").write_text(json.dumps(kinds))


def real(model: str, strategy: str, devices: int, batch_size: int) -> list[dict[str, int]]:
    """Bytes by kind at the peak of each rank, by training."""
    entry = next(entry for entry in TABLE if entry.name == strategy)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        module = MODELS[model]()
        replicas = 1 if strategy.startswith(("pardist_tp", "pardist_pp")) else devices
        loader = DataLoader(module.data(2 * batch_size * replicas), batch_size=batch_size)
        trainer = pl.Trainer(
            strategy=entry.make(**{**entry.preset, "start_method": "fork"}),
            accelerator="cpu",
            devices=devices,
            max_steps=2,
            callbacks=[_Written(folder)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(devices)]


def planned(model: str, strategy: str, devices: int, batch_size: int) -> list[dict[str, int]]:
    """The same by the planner."""
    entry = next(entry for entry in TABLE if entry.name == strategy)
    torch.manual_seed(0)
    module = MODELS[model]()
    batch = next(iter(DataLoader(module.data(batch_size), batch_size=batch_size)))
    make = partial(entry.make, **entry.preset, keep_freed_memory=False)
    traces = (trace_rank(module, batch, make, Place(rank, devices, 1, "gloo")) for rank in range(devices))
    return [trace.held.by_kind for trace in traces]


def _in_process_of_its_own(*cell: Any) -> list[dict[str, int]]:
    """Ranks are forked: by a process that has run nothing before."""
    command = [sys.executable, "-m", "benchmarks.plan_check", "--real", *map(str, cell)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: list[dict[str, int]] = json.loads(out.strip().splitlines()[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare cell by cell; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_check", description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--real", nargs=4, metavar=("MODEL", "STRATEGY", "RANKS", "BATCH"), help="one cell's real run")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if options.real:
        model, strategy, devices, batch_size = options.real
        print(json.dumps(real(model, strategy, int(devices), int(batch_size))))
        return 0
    print(
        "| model | strategy | real, MB | planned, MB | off by | by kind: real / planned, MB |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    cells = [
        (model, strategy, options.devices, options.batch_size)
        for model in options.models
        for strategy in options.strategies
    ]
    errors = []
    for cell in cells:
        found = max(_in_process_of_its_own(*cell), key=lambda kinds: sum(kinds.values()))
        plan = max(planned(*cell), key=lambda kinds: sum(kinds.values()))
        was, said = sum(found.values()), sum(plan.values())
        errors.append(abs(said / was - 1))
        kinds = ", ".join(f"{kind} {found[kind] / 1e6:.2f}/{plan[kind] / 1e6:.2f}" for kind in found)
        print(
            f"| {cell[0]} | {cell[1]} | {was / 1e6:.2f} | {said / 1e6:.2f} | {said / was - 1:+.1%} | {kinds} |",
            flush=True,
        )
    print(f"\nMedian error {statistics.median(errors):.1%}, worst {max(errors):.1%} of {len(errors)} cells.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
