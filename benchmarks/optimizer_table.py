"""Every optimizer under every strategy against one process: ``python -m benchmarks.optimizer_table [--rows ...]``.

Prints the table of docs/optimizers.md: the largest relative difference of losses, weights and optimizer state after
four steps in fp64, with different data on every rank, learning rate schedules, accumulation and clipping.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import lightning_pardist  # noqa: F401
from tests.helpers.optimizers import ALL
from tests.helpers.ranks import run_ranks
from tests.integration import test_optimizers as cells


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.optimizer_table")
    parser.add_argument("--rows", nargs="+", default=list(cells.STRATEGIES), choices=list(cells.STRATEGIES))
    parser.add_argument(
        "--found", type=Path, help="JSON file of rows that are known and not run again; this run's are added"
    )
    options = parser.parse_args()
    known = options.found is not None and options.found.exists()
    found: dict[str, dict[str, str]] = json.loads(options.found.read_text()) if known else {}
    for row in options.rows:
        if row in found:
            continue
        found[row] = {name: _cell(row, name) for name in ALL}
        if options.found is not None:
            options.found.write_text(json.dumps(found, indent=1))
    print("| optimizer | " + " | ".join(found) + " |")
    print("| --- |" + " --- |" * len(found))
    for name in ALL:
        print(f"| {name} | " + " | ".join(of_row[name] for of_row in found.values()) + " |")


def _cell(row: str, name: str) -> str:
    if (row, name) in cells.REFUSED:
        return "refused"
    strategy, devices = cells.STRATEGIES[row]
    first = run_ranks(devices, cells.column, strategy, devices, [name])[0][name]
    wanted = cells.expected(name)
    return f"{max(_error(first[part], wanted[part]) for part in ('losses', 'weights', 'optimizer')):.0e}"


def _error(got: dict[str, Any], wanted: dict[str, Any]) -> float:
    if got.keys() != wanted.keys():
        raise RuntimeError(f"{sorted(got)} in place of {sorted(wanted)}")
    return max(
        (
            (got[key].double() - want.double()).abs().max().item() / max(want.abs().max().item(), 1e-3)
            for key, want in wanted.items()
            if want.numel()
        ),
        default=0.0,
    )


if __name__ == "__main__":
    main()
