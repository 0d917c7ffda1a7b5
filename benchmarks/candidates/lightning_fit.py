"""``Trainer.fit`` with any strategy that has a name: ours, and Lightning's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import lightning.pytorch as pl
import yaml
from lightning.pytorch.strategies import StrategyRegistry
from torch.utils.data import DataLoader

from benchmarks.candidates.protocol import Candidate, PassesBeforeSteps, held_by
from benchmarks.settings import Settings
from benchmarks.workloads import Task, make_loader
from lightning_pardist.registry import TABLE

SINGLE = "one_process"


class _AtTheGate(pl.Callback):
    """Passes the gate before every batch, so that a step is all that the Trainer does from one batch to the next."""

    def __init__(self, gate: PassesBeforeSteps) -> None:
        self._gate = gate

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._gate.before_step(lambda: _held(trainer))


class _Data(pl.LightningDataModule):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings

    def train_dataloader(self) -> DataLoader:
        kwargs = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        return make_loader(self._settings, rank=kwargs["rank"], world_size=kwargs["num_replicas"])


@dataclass(frozen=True)
class LightningFit:
    """An ordinary Trainer without the parts that write files.

    Attributes:
        strategy: A registered name, or ``"auto"``.
        options: Arguments of the strategy beside those that its name stands for.
    """

    name: str
    title: str
    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    single: bool = False

    def run(self, settings: Settings, gate: PassesBeforeSteps) -> None:
        """See :class:`Candidate`."""
        warnings.filterwarnings("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1 if self.single else settings.devices,
            strategy=self._strategy(),
            max_steps=settings.total_steps,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            callbacks=[_AtTheGate(gate)],
        )
        trainer.fit(Task(settings), datamodule=_Data(settings))

    def _strategy(self) -> Any:
        if not self.options:
            return self.strategy
        entry = StrategyRegistry[self.strategy]
        make: Callable[..., Any] = entry["strategy"]
        return make(**(entry["init_params"] | self.options))


def _held(trainer: pl.Trainer) -> dict[str, int]:
    strategy = trainer.strategy
    count = getattr(strategy, "held", None)
    if count is not None:
        held = count()
        replicas = strategy.distributed_sampler_kwargs["num_replicas"]
        return asdict(held) | {"total": held.total, "replicas": replicas}
    return held_by(trainer.lightning_module, trainer.optimizers, wrapper=strategy.model)


def names() -> list[str]:
    """Names that this family knows; any other name in Lightning's registry works as well."""
    return [SINGLE, "ddp", *(entry.name for entry in TABLE)]


def find(name: str) -> Candidate | None:
    """The candidate of this name, None if no strategy has it.

    ``pardist_ddp@bucket_size_mb=10,overlap=false`` stands for the strategy with these arguments.
    """
    base, _, text = name.partition("@")
    if base == SINGLE and not text:
        return LightningFit(name, "one process, Lightning", "auto", single=True)
    if base not in StrategyRegistry:
        return None
    options = dict(part.split("=", 1) for part in text.split(",")) if text else {}
    return LightningFit(
        name,
        f"Lightning, strategy={name!r}",
        base,
        options={key: yaml.safe_load(value) for key, value in options.items()},
    )
