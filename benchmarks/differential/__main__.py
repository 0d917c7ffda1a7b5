"""``python -m benchmarks.differential``: every family under every strategy against one process, as a table of cells."""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning_pardist  # noqa: F401  (before lightning and torchvision)
from benchmarks.differential.cells import BATCH, degrees_of, difference, saved_weights, train
from benchmarks.differential.families import families
from tests.helpers.ranks import PRELOAD, RankFailed, close_pools, run_ranks

STRATEGIES = (
    "pardist_ddp",
    "pardist_zero1",
    "pardist_zero2",
    "pardist_zero3",
    "pardist_tp",
    "pardist_pp",
    "pardist_3d",
)
RTOL = 1e-5
#: Tolerance in fp64, used where fp32 is chaotic; a model that still computes its loss in fp32 gets the fp32 tolerance.
RTOL_FP64 = 1e-9
#: Strategies that split a rank's batch: their batch norms compute statistics over micro-batches.
CUT_BATCHES = ("pardist_pp", "pardist_pp_gpipe", "pardist_pp_interleaved", "pardist_pp_zb", "pardist_3d")
TIMEOUT_S = 150.0
#: Number of devices of strategies that need more than two ranks for all axes.
DEVICES = {"pardist_3d": 4, "pardist_cp_zero3": 4}
#: Strategies that run as threads of one process.
THREADED = ("pardist_dp",)
assert BATCH % 4 == 0


def main() -> None:
    """Run the requested cells, print each, and print the totals."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.differential", description=__doc__)
    parser.add_argument("--families", default="*", help="names such as 'decoder/*', with commas between them")
    parser.add_argument(
        "--strategies", default=",".join(STRATEGIES), help="names with commas, degrees such as cp2_tp2 among them"
    )
    parser.add_argument("--every", type=int, default=1, help="take every n-th family only")
    parser.add_argument("--offset", type=int, default=0, help="of the first one that is taken")
    parser.add_argument("--json", type=Path, help="one line a cell is added to this file; cells in it are not repeated")
    parser.add_argument(
        "--accelerator", default="cpu", choices=("cpu", "gpu"), help="gpu: one GPU that all ranks share"
    )
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="no family is begun after so many seconds")
    arguments = parser.parse_args()
    began = time.monotonic()
    patterns = arguments.families.split(",")
    every = [family.name for family in families()]
    names = list(dict.fromkeys(name for pattern in patterns for name in fnmatch.filter(every, pattern)))
    done = _done(arguments.json)
    # Ranks are forked from a process that has already imported the libraries of the models.
    PRELOAD.append("benchmarks.differential.preload")
    results: Counter[str] = Counter()
    for name in names[arguments.offset :: arguments.every]:
        strategies = [s for s in arguments.strategies.split(",") if not {(name, s), (name, "")} & done]
        if time.monotonic() - began > arguments.budget_s:
            print(f"{name} and what follows are left to another run")
            break
        for cell in cells(name, strategies, arguments.accelerator) if strategies else ():
            results[cell["result"]] += 1
            print(f"{cell['result']:9} {name:32} {cell['strategy']:16} {cell['detail']}", flush=True)
            if arguments.json:
                with arguments.json.open("a") as file:
                    file.write(json.dumps(cell) + "\n")
    close_pools()
    print(", ".join(f"{count} {result}" for result, count in results.most_common()))


def _done(file: Path | None) -> set[tuple[str, str]]:
    """Return family and strategy of every cell in a file of results."""
    lines = file.read_text().splitlines() if file and file.exists() else []
    return {(cell["family"], cell["strategy"]) for cell in map(json.loads, lines)}


def cells(name: str, strategies: list[str], accelerator: str = "cpu") -> Iterator[dict[str, Any]]:
    """Run one family under every strategy; yield a single ``left out`` cell if one process cannot train it."""
    wants: dict[bool, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            wants[False] = _one(name, Path(folder) / "one", accelerator, double=False)
        except Exception as error:
            yield {"family": name, "strategy": "", "result": "left out", "detail": _sentence(str(error))}
            return
        for strategy in strategies:
            started = time.monotonic()
            result, detail = _compare(name, strategy, Path(folder), wants, accelerator)
            seconds = round(time.monotonic() - started, 1)
            yield {"family": name, "strategy": strategy, "result": result, "detail": detail, "seconds": seconds}


def _one(name: str, folder: Path, accelerator: str, *, double: bool) -> dict[str, Any]:
    got = run_ranks(1, train, name, "auto", 1, str(folder), double, accelerator, timeout_s=TIMEOUT_S)[0]
    return got | {"saved": saved_weights(folder)}


def _compare(name: str, strategy: str, folder: Path, wants: dict[bool, Any], accelerator: str) -> tuple[str, str]:
    """Return ``equal``, ``equal in fp64``, ``limit``, ``refused``, ``different`` or ``failed``, with a detail."""
    devices = math.prod(degrees_of(strategy).values()) if degrees_of(strategy) else DEVICES.get(strategy, 2)
    errors: dict[bool, tuple[float, str]] = {}
    for double in (False, True):
        path = folder / f"{strategy}-{double}"
        try:
            if double not in wants:
                wants[double] = _one(name, folder / "one-fp64", accelerator, double=True)
        except RankFailed:
            return "different", f"{errors[False][0]:.1e}: {errors[False][1]} (the model has no fp64)"
        try:
            ranks = run_ranks(
                1 if strategy in THREADED else devices,
                train,
                name,
                strategy,
                devices,
                str(path),
                double,
                accelerator,
                timeout_s=TIMEOUT_S,
            )
        except RankFailed as failure:
            return _failed(str(failure))
        want = wants[double]
        found = [difference(rank[key], want[key]) for rank in ranks for key in ("weights", "logged")]
        found.append(difference(saved_weights(path), want["saved"]))
        errors[double] = max(found)
        if errors[double][0] <= (RTOL_FP64 if double and want["fp64 loss"] else RTOL):
            return ("equal in fp64" if double else "equal"), f"{errors[double][0]:.1e}"
    worst = f"{errors[False][0]:.1e} in fp32, {errors[True][0]:.1e} in fp64: {errors[True][1]}"
    if wants[True]["batch norms"] and (strategy in CUT_BATCHES or "pp" in strategy):
        return "limit", f"batch norms see micro-batches, {worst}"
    return "different", worst


def _failed(report: str) -> tuple[str, str]:
    """Classify a failure as ``refused``, for the package's own kinds of error, or ``failed``, with its message."""
    lines = [line for line in report.splitlines() if "Error" in line and not line.startswith((" ", "---"))]
    last = lines[-1] if lines else report.splitlines()[-1]
    refused = any(kind in last for kind in ("ValueError", "NotSupported", "PipelineError", "ConfigurationError"))
    return ("refused" if refused else "failed"), _sentence(last)


def _sentence(text: str) -> str:
    return " ".join(text.split())[:300]


if __name__ == "__main__":
    main()
