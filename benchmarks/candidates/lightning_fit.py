"""``Trainer.fit`` with any registered strategy: this package's and Lightning's own."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import StrategyRegistry

from benchmarks.candidates.protocol import Candidate, PassesBeforeSteps, held_by
from benchmarks.fit import fit, parse, strategy_of
from benchmarks.settings import Settings
from lightning_pardist.registry import TABLE

SINGLE = {"one_process": "one process, Lightning", "auto": "one process, Lightning, strategy='auto'"}


class _AtTheGate(pl.Callback):
    """Callback that passes the gate before every batch: a step is all the Trainer does from one batch to the next."""

    def __init__(self, gate: PassesBeforeSteps) -> None:
        self._gate = gate

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._gate.before_step(lambda: _held(trainer))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._gate.took(outputs["loss"])


@dataclass(frozen=True)
class LightningFit:
    """Plain Trainer without the parts that write files.

    Attributes:
        strategy: ``NAME`` or ``NAME@key=value,...``, or ``"auto"``.
    """

    name: str
    title: str
    strategy: str
    single: bool = False

    def run(self, settings: Settings, gate: PassesBeforeSteps) -> None:
        """See :class:`Candidate`."""
        devices = 1 if self.single else settings.devices
        fit(settings, strategy_of(self.strategy), devices=devices, callback=_AtTheGate(gate))


def _held(trainer: pl.Trainer) -> dict[str, int]:
    strategy = trainer.strategy
    count = getattr(strategy, "held", None)
    if count is not None:
        held = count()
        replicas = strategy.distributed_sampler_kwargs["num_replicas"]
        return asdict(held) | {"total": held.total, "replicas": replicas}
    return held_by(trainer.lightning_module, trainer.optimizers, wrapper=strategy.model)


def names() -> list[str]:
    """Return the names of this family; any other name in Lightning's registry works as well."""
    return [*SINGLE, "ddp", *(entry.name for entry in TABLE)]


def find(name: str) -> Candidate | None:
    """Return the candidate of this name, or None if no strategy is registered under it.

    ``pardist_ddp@bucket_size_mb=10,overlap=false`` stands for the strategy with these arguments.
    """
    base, _ = parse(name)
    if name in SINGLE:
        return LightningFit(name, SINGLE[name], "auto", single=True)
    if base not in StrategyRegistry:
        return None
    return LightningFit(name, f"Lightning, strategy={name!r}", name)
