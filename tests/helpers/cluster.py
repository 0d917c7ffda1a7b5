"""Helpers for tests of launchers: the script they start, and parsing of its output."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from typing import Any

from tests.helpers.scripts import ROOT, run_script

TRAIN = str(ROOT / "tests" / "scripts" / "cluster_train.py")
#: One of each kind of parallelism.
STRATEGIES = ["pardist_ddp", "pardist_zero2", "pardist_zero3", "pardist_tp", "pardist_pp"]
_LINE = re.compile(r"done (\S+) rank (\d+) of (\d+) on node (\d+) steps (\d+) (\w+) (\S+)")


@dataclass(frozen=True)
class Ended:
    """Result of one rank's training; ``weights`` is the sum over all weights, on rank zero."""

    world_size: int
    node: int
    steps: int
    environment: str
    weights: float


def ended(output: str, strategy: str = "pardist_ddp") -> dict[int, Ended]:
    """Return the results of the ranks that finished training with a strategy, by rank."""
    return {
        int(rank): Ended(int(size), int(node), int(steps), environment, float(weights))
        for name, rank, size, node, steps, environment, weights in _LINE.findall(output)
        if name == strategy
    }


def first(output: str, strategy: str = "pardist_ddp") -> Ended:
    """Return rank zero's result; if it is missing, fail with the whole output."""
    found = ended(output, strategy)
    assert 0 in found, output
    return found[0]


def alone(**given: Any) -> Ended:
    """Return the result of one process with the same global batches."""
    return _alone(json.dumps(given, sort_keys=True))


@functools.cache
def _alone(given: str) -> Ended:
    return first(run_script(TRAIN, given).output, "auto")
