"""``Trainer.fit`` on a workload, as in user code. Of the package, only names of strategies are used."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import yaml
from lightning.pytorch.strategies import StrategyRegistry
from torch.utils.data import DataLoader

from benchmarks.settings import Settings
from benchmarks.workloads import Task, make_loader


class _Data(pl.LightningDataModule):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings

    def train_dataloader(self) -> DataLoader:
        kwargs = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        return make_loader(self._settings, rank=kwargs["rank"], world_size=kwargs["num_replicas"])


def fit(settings: Settings, strategy: Any, *, devices: int, callback: pl.Callback) -> None:
    """Train :attr:`Settings.total_steps` steps with a plain Trainer without the parts that write files.

    Args:
        settings: Settings of the run.
        strategy: A value for ``Trainer(strategy=)``.
        devices: Number of ranks on this host.
        callback: Callback that passes the gate before every step.
    """
    warnings.filterwarnings("ignore")
    trainer = pl.Trainer(
        accelerator=settings.accelerator,
        precision=settings.precision,  # type: ignore[arg-type]
        devices=devices,
        strategy=strategy,
        max_steps=settings.total_steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[callback],
    )
    trainer.fit(Task(settings), datamodule=_Data(settings))


def parse(name: str) -> tuple[str, dict[str, Any]]:
    """Split ``pardist_ddp@bucket_size_mb=10,overlap=false`` into a strategy's name and its arguments."""
    base, _, text = name.partition("@")
    options = dict(part.partition("=")[::2] for part in text.split(",")) if text else {}
    return base, {key: yaml.safe_load(value) for key, value in options.items()}


def strategy_of(name: str) -> Any:
    """Return the value for ``Trainer(strategy=)`` of ``NAME``, ``NAME@key=value,...`` or ``auto``.

    Raises:
        ValueError: If no strategy is registered under the name.
    """
    base, options = parse(name)
    if name == "auto":
        return name
    if base not in StrategyRegistry:
        raise ValueError(f"{base!r} is not registered as a strategy. `pardist strategies` lists those of this package.")
    if not options:
        return base
    entry = StrategyRegistry[base]
    return entry["strategy"](**(entry["init_params"] | options))
