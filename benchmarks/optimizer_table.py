"""Every optimizer under every strategy against one process: ``python -m benchmarks.optimizer_table --found FILE``.

Trains with every set of hyperparameters of torch's own table of tests (needs ``expecttest``) and with installed
optimizers from PyPI (transformers, pytorch-optimizer, schedulefree), in fp64, with different data on every rank,
learning rate schedules, accumulation and clipping, and prints the table of docs/optimizers.md: an optimizer's number of
sets, and the largest relative difference of losses, weights and optimizer state after four steps among them. Sets whose
result on one process already changes with the rounding have a row of their own (*).
The columns "rounding alone" and "one ulp" are one process that sums the samples of each batch in another order, and
one whose gradients are all moved to the next representable number (the worst of six draws): the algorithm's own
sensitivity to rounding.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning_pardist  # noqa: F401
from tests.helpers.optimizer_families import families
from tests.helpers.ranks import RankFailed, run_ranks
from tests.integration import test_optimizers as cells

#: Titles of the rows in docs/optimizers.md.
_TITLES = {
    "ddp-2": "DDP",
    "zero1-2": "ZeRO-1",
    "zero2-2": "ZeRO-2",
    "zero3-2": "ZeRO-3",
    "hsdp-4": "HSDP",
    "tp-2": "TP",
    "pp-2": "PP",
    "tp_zero3-4": "TP x ZeRO-3",
    "3d-8": "PP x TP x ZeRO-3",
    "islands_zero2-4": "islands x ZeRO-2",
}
#: Differences up to this are considered rounding.
_TOLERANCE = 1e-9
#: By set of hyperparameters, the error, or the message if it did not train.
Column = dict[str, float | str]
#: One process that sums the samples of each batch in another order, or whose gradients are off by an ulp. Where that
#: alone changes the result, a correct sum in another order (as over ranks) cannot be told from a wrong one.
ALONE: dict[str, list[Callable[[str], dict[str, Any]]]] = {
    "rounding alone": [cells.rounded_otherwise],
    "one ulp": [functools.partial(cells.moved_by_one_ulp, seed=seed) for seed in range(6)],
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.optimizer_table")
    rows = [*ALONE, *cells.STRATEGIES]
    parser.add_argument("--rows", nargs="+", default=rows, choices=rows)
    parser.add_argument("--only", nargs="+", help="optimizers whose names begin like this")
    parser.add_argument("--found", type=Path, required=True, help="JSON file of what is known; this run's is added")
    parser.add_argument("--show", action="store_true", help="print the table of what is known, and run nothing")
    options = parser.parse_args()
    found: dict[str, Column] = json.loads(options.found.read_text()) if options.found.exists() else {}
    for row in () if options.show else options.rows:
        known = found.setdefault(row, {})
        for sets in families().values():
            names = [name for name in sets if name not in known and _wanted(name, options.only)]
            if names:
                known.update(_measured(row, names))
                options.found.write_text(json.dumps(found, indent=1))
    _print(found)


def _wanted(name: str, only: list[str] | None) -> bool:
    return only is None or any(name.startswith(begin) for begin in only)


def _measured(row: str, names: list[str]) -> Column:
    found: Column = {}
    trains = []
    for name in names:
        try:
            cells.expected(name)
            trains.append(name)
        except Exception as error:
            found[name] = f"does not train on one process: {type(error).__name__}: {error}"
    if row in ALONE:
        for name in trains:
            found[name] = max(_largest_error(run(name), cells.expected(name)) for run in ALONE[row])
        return found
    if not trains:
        return found
    strategy, devices = cells.STRATEGIES[row]
    try:
        first = run_ranks(devices, column_or_refusals, strategy, devices, trains, timeout_s=300.0)[0]
        wanted = cells.references(row, [name for name in trains if not isinstance(first[name], str)])
    except RankFailed as error:
        # Run them one by one to find the failing one.
        if len(trains) > 1:
            return found | {key: value for name in trains for key, value in _measured(row, [name]).items()}
        return found | {trains[0]: f"fails: {str(error)[-2000:]}"}
    for name, got in first.items():
        found[name] = got if isinstance(got, str) else _largest_error(got, wanted[name])
    return found


def column_or_refusals(strategy: Any, devices: int, names: list[str]) -> dict[str, Any]:
    """Return each optimizer's result, or the message of its refusal. Collective over all ranks."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            found |= cells.column(strategy, devices, [name])
        except ValueError as error:
            found[name] = f"refused: {error}"
    return found


def _largest_error(got: dict[str, Any], wanted: dict[str, Any]) -> float:
    if not all(value.isfinite().all() for value in wanted["weights"].values()):
        raise RuntimeError("An optimizer ends without numbers where it is compared with.")
    return max(_error(got[part], wanted[part]) for part in ("losses", "weights", "optimizer"))


def _error(got: dict[str, Any], wanted: dict[str, Any]) -> float:
    if got.keys() != wanted.keys():
        return math.inf
    return max(
        (
            (got[key].double() - want.double()).abs().max().item() / max(want.abs().max().item(), 1e-3)
            for key, want in wanted.items()
            if want.numel()
        ),
        default=0.0,
    )


def _print(found: dict[str, Column]) -> None:
    order = [row for row in (*ALONE, *_TITLES) if row in found]
    order += [row for row in found if row not in order]
    print("| optimizer | sets | " + " | ".join(_TITLES.get(row, row) for row in order) + " |")
    print("| --- | --- |" + " --- |" * len(order))
    said: dict[str, int] = {}
    for family, sets in families().items():
        moved = [name for name in sets if _moves_alone(name, found)]
        for title, names in ((family, [name for name in sets if name not in moved]), (f"{family} *", moved)):
            of_rows = [[found[row][name] for name in names if name in found[row]] for row in order]
            if any(of_rows):
                print(f"| {title} | {len(names)} | " + " | ".join(_cell(values, said) for values in of_rows) + " |")
    for text, number in said.items():
        print(f"\n{number}. {text}")


def _moves_alone(name: str, found: dict[str, Column]) -> bool:
    """Return whether rounding alone changes the result on one process."""
    alone = [found[row][name] for row in ALONE if name in found.get(row, {})]
    return any(not isinstance(error, str) and error > _TOLERANCE for error in alone)


def _cell(values: list[float | str], said: dict[str, int]) -> str:
    errors = [value for value in values if not isinstance(value, str)]
    parts = [f"{max(errors):.0e}"] if errors else []
    texts = [value for value in values if isinstance(value, str)]
    parts += [f"[{said.setdefault(text, len(said) + 1)}] {texts.count(text)}" for text in dict.fromkeys(texts)]
    return ", ".join(parts)


if __name__ == "__main__":
    main()
