"""What tests of launchers share: the script that they start, and what it tells when it has trained."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from typing import Any

from tests.helpers.scripts import ROOT, run_script

TRAIN = str(ROOT / "tests" / "scripts" / "cluster_train.py")
#: One of every kind of parallelism.
STRATEGIES = ["pardist_ddp", "pardist_zero2", "pardist_zero3", "pardist_tp", "pardist_pp"]
_LINE = re.compile(r"done (\S+) rank (\d+) of (\d+) on node (\d+) steps (\d+) (\w+) (\S+)")


@dataclass(frozen=True)
class Ended:
    """One rank's end of a training; ``weights`` is the sum of all of them, on the first rank."""

    world_size: int
    node: int
    steps: int
    environment: str
    weights: float


def ended(output: str, strategy: str = "pardist_ddp") -> dict[int, Ended]:
    """The ranks that trained to the end with a strategy, by their number."""
    return {
        int(rank): Ended(int(size), int(node), int(steps), environment, float(weights))
        for name, rank, size, node, steps, environment, weights in _LINE.findall(output)
        if name == strategy
    }


def first(output: str, strategy: str = "pardist_ddp") -> Ended:
    """The first rank's end, with the whole output in the message where there is none."""
    found = ended(output, strategy)
    assert 0 in found, output
    return found[0]


def alone(**given: Any) -> Ended:
    """What one process comes to with the same global batches."""
    return _alone(json.dumps(given, sort_keys=True))


@functools.cache
def _alone(given: str) -> Ended:
    return first(run_script(TRAIN, given).output, "auto")
