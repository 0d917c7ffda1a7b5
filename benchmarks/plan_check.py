"""The planner beside real runs: memory by the same count of the same step, and with --time seconds a step.

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
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.workloads import GPTLoss
from lightning_pardist.planner import find_profile, plan
from lightning_pardist.planner.measuring import measure_alone
from lightning_pardist.planner.planned_rank import Place, dims_of, stage_places, trace_rank, trace_ranks
from lightning_pardist.planner.step_ledger import StepLedger
from lightning_pardist.registry import TABLE

STRATEGIES = (
    "pardist_ddp",
    "pardist_zero1",
    "pardist_zero2",
    "pardist_zero3",
    "pardist_tp",
    "pardist_pp",
    "pardist_pp_gpipe",
)
_TIMED_STEPS, _WARM_STEPS = 16, 4


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


class _Timed(pl.Callback):
    """Writes the median of seconds from one step's end to the next to a file a rank."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.ends.append(time.perf_counter())
        if len(self.ends) == _TIMED_STEPS:
            took = [end - begin for begin, end in pairwise(self.ends[_WARM_STEPS:])]
            Path(self.folder, f"{trainer.global_rank}.json").write_text(json.dumps({"step": statistics.median(took)}))


def real(model: str, strategy: str, devices: int, batch_size: int, *, timed: bool = False) -> list[dict[str, float]]:
    """Bytes by kind at the peak of each rank, or seconds a step, by training."""
    entry = next(entry for entry in TABLE if entry.name == strategy)
    steps = _TIMED_STEPS if timed else 2
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        module = MODELS[model]()
        replicas = 1 if strategy.startswith(("pardist_tp", "pardist_pp")) else devices
        loader = DataLoader(module.data(steps * batch_size * replicas), batch_size=batch_size)
        trainer = pl.Trainer(
            strategy=entry.make(**{**entry.preset, "start_method": "fork"}),
            accelerator="cpu",
            devices=devices,
            max_steps=steps,
            callbacks=[_Timed(folder) if timed else _Written(folder)],
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
    first = Place(0, devices, 1, "gloo")
    stages = stage_places(dims_of(make(), first), first)
    if len(stages) > 1:
        return [trace.held.by_kind for trace in trace_ranks(module, batch, make, stages)]
    traces = (trace_rank(module, batch, make, replace(first, rank=rank)) for rank in range(devices))
    return [trace.held.by_kind for trace in traces]


def compare_times(options: argparse.Namespace) -> int:
    """Seconds a step beside those of a plan with a measured profile, model by model."""
    profile = find_profile(options.profile) if options.profile else measure_alone(options.devices)
    print(f"{profile.name}: {profile.flops['float32'] / 1e9:.1f} GFLOP/s fp32, {profile.bytes_per_s / 1e9:.1f} GB/s,"
          f" {profile.host_s_per_operator * 1e6:.1f} us an operator, link {profile.inside.latency_s * 1e6:.0f} us and"
          f" {profile.inside.bytes_per_s / 1e9:.2f} GB/s\n")  # fmt: skip
    print(
        "| model | strategy | real, ms | planned, ms | off by | 2 rounds, ms |\n| --- | --- | --- | --- | --- | --- |"
    )
    errors, orders = [], []
    for model in options.models:
        torch.manual_seed(0)
        module = MODELS[model]()
        batch = next(iter(DataLoader(module.data(options.batch_size), batch_size=options.batch_size)))
        made = plan(module, batch, devices=options.devices, device=profile, strategies=options.strategies)
        said = {row.candidate.strategy: row.time.step for row in reversed(made.rows)}
        # In turns, so that what else the machine does hits all of them.
        rounds = [
            {name: _in_process_of_its_own(model, name, options.devices, options.batch_size, timed=True)
             for name in said}
            for _ in range(2)
        ]  # fmt: skip
        took = {name: min(max(rank["step"] for rank in each[name]) for each in rounds) for name in said}
        for name in said:
            off = said[name] / took[name] - 1
            errors.append(abs(off))
            each = ", ".join(f"{max(rank['step'] for rank in one[name]) * 1e3:.1f}" for one in rounds)
            print(f"| {model} | {name} | {took[name] * 1e3:.1f} | {said[name] * 1e3:.1f} | {off:+.0%} | {each} |",
                  flush=True)  # fmt: skip
        orders.append(_kendall([took[name] for name in said], [said[name] for name in said]))
    taus = ", ".join(f"{tau:.2f}" for tau in orders)
    print(f"\nMedian error {statistics.median(errors):.0%}, worst {max(errors):.0%} of {len(errors)} cells; Kendall's"
          f" tau by model {taus}.")  # fmt: skip
    return 0


def _kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Pairs in the same order less those in the other one, over all."""
    pairs = list(combinations(range(len(first)), 2))
    same = sum(1 if (first[a] - first[b]) * (second[a] - second[b]) > 0 else -1 for a, b in pairs)
    return same / len(pairs) if pairs else 1.0


def _in_process_of_its_own(*cell: Any, timed: bool = False) -> list[dict[str, float]]:
    """Ranks are forked: by a process that has run nothing before."""
    command = [sys.executable, "-m", "benchmarks.plan_check", "--real", *map(str, cell), *(["--time"] * timed)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: list[dict[str, float]] = json.loads(out.strip().splitlines()[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare cell by cell; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_check", description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--real", nargs=4, metavar=("MODEL", "STRATEGY", "RANKS", "BATCH"), help="one cell's real run")
    parser.add_argument("--time", action="store_true", help="compare seconds a step in place of memory")
    parser.add_argument("--profile", help="of `pardist doctor --save`, for --time; measured here by default")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if options.real:
        model, strategy, devices, batch_size = options.real
        print(json.dumps(real(model, strategy, int(devices), int(batch_size), timed=options.time)))
        return 0
    if options.time:
        return compare_times(options)
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
        expected = max(planned(*cell), key=lambda kinds: sum(kinds.values()))
        was, said = sum(found.values()), sum(expected.values())
        errors.append(abs(said / was - 1))
        kinds = ", ".join(f"{kind} {found[kind] / 1e6:.2f}/{expected[kind] / 1e6:.2f}" for kind in found)
        print(
            f"| {cell[0]} | {cell[1]} | {was / 1e6:.2f} | {said / 1e6:.2f} | {said / was - 1:+.1%} | {kinds} |",
            flush=True,
        )
    print(f"\nMedian error {statistics.median(errors):.1%}, worst {max(errors):.1%} of {len(errors)} cells.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
