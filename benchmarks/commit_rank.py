"""Run one rank of one commit for :mod:`benchmarks.compare`: workload from this checkout, package from the commit.

``python -m benchmarks.commit_rank FILE_DESCRIPTOR SETTINGS STRATEGY``; ``PYTHONPATH`` must list the package first.
"""

from __future__ import annotations

import lightning_pardist  # isort: skip  (first: it registers the strategies)

import json
import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks import machine
from benchmarks.fit import fit, strategy_of
from benchmarks.rank import Channel, Gate
from benchmarks.settings import Settings


class _Recorder(pl.Callback):
    """Callback that passes the gate before every batch and records the losses of a round, including dropped steps."""

    def __init__(self, settings: Settings, channel: Channel) -> None:
        self._gate = Gate(settings, channel, more=self._losses_of_round)
        self._losses: list[float] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._gate.before_step(lambda: {"total": trainer.strategy.held().total})

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._losses.append(float(outputs["loss"]))

    def _losses_of_round(self) -> dict[str, Any]:
        found, self._losses = self._losses, []
        return {"losses": found}


def main(descriptor: str, settings_json: str, strategy: str) -> None:
    """Train until the harness kills this process."""
    channel = Channel(Connection(int(descriptor)))
    try:
        torch.set_num_threads(1)
        settings = Settings(**json.loads(settings_json))
        channel.send("imported", resident=machine.peak_resident_bytes(), package=lightning_pardist.__path__[0])
        channel.wait()
        fit(settings, strategy_of(strategy), devices=settings.devices, callback=_Recorder(settings, channel))
    except BaseException:
        channel.send("failed", trace=traceback.format_exc())
    # Another rank may be blocked in a collective with this one: the harness kills both.
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
