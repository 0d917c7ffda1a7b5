"""Settings of one benchmark run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


def given_settings(name: str) -> dict[str, Any]:
    """Return the settings in a name ``NAME@setting=JSON,...``; none without ``@``."""
    text = name.partition("@")[2]
    return {key: json.loads(value) for key, _, value in (item.partition("=") for item in text.split(",") if item)}


@dataclass(frozen=True)
class Settings:
    """One run's settings from the command line, the same in every rank's process.

    Attributes:
        model: Name of the workload, see :mod:`benchmarks.workloads`.
        tiny: Whether the workload is shrunk to test sizes.
        model_options: Overrides of the workload's sizes, such as ``{"layers": 2}``.
        devices: Number of ranks of the candidates that run on several.
        batch_size: Samples per rank and step; 0 for the workload's own.
        rounds: Number of turns of each candidate.
        steps: Timed steps per round.
        warmup: Steps at the start of every round that are not timed.
        seed: Seed of weights and data.
        accelerator: ``"cpu"``, or ``"gpu"`` for the accelerator that torch finds.
        precision: ``"32-true"`` or ``"bf16-mixed"``, as for ``Trainer(precision=)``.
    """

    model: str = "gpt"
    tiny: bool = False
    model_options: dict[str, int] | None = None
    devices: int = 2
    batch_size: int = 0
    rounds: int = 5
    steps: int = 10
    warmup: int = 2
    seed: int = 0
    accelerator: str = "cpu"
    precision: str = "32-true"

    def __post_init__(self) -> None:
        for name, least in (("devices", 1), ("rounds", 1), ("steps", 1), ("warmup", 0), ("batch_size", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} is too small. Use {least} or more.")

    @property
    def steps_a_round(self) -> int:
        """Timed and dropped steps of a round."""
        return self.warmup + self.steps

    @property
    def total_steps(self) -> int:
        """Number of batches a candidate must provide: all rounds, and one step more, which closes the last round."""
        return self.rounds * self.steps_a_round + 1
