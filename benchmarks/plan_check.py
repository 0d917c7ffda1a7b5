"""Check the planner against real runs: memory by the same count of the same step; with --time, seconds per step.

Each cell trains under a strategy on real ranks of this machine over gloo. For memory, every storage that is allocated
and freed in the third step is counted, then the same rank is planned; the largest of the ranks is shown.
"""

from __future__ import annotations

import lightning_pardist  # noqa: F401  (before lightning)

# isort: split
import argparse
import logging
import statistics
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch.utils.data import DataLoader

from benchmarks import plan_time
from benchmarks.plan_modules import MODELS
from benchmarks.plan_runs import Cell, run_cells, serve
from lightning_pardist.planner.planned_rank import Place, dims_of, stage_places, trace_rank, trace_ranks

STRATEGIES = (
    "pardist_ddp",
    "pardist_zero1",
    "pardist_zero2",
    "pardist_zero3",
    "pardist_tp",
    "pardist_pp",
    "pardist_pp_gpipe",
)


def planned(cell: Cell, devices: int) -> list[dict[str, int]]:
    """Return the planned bytes by kind of each rank, or of each stage for a pipeline."""
    torch.manual_seed(0)
    module = MODELS[cell.model]()
    batch = next(iter(DataLoader(MODELS[cell.model].data(cell.batch_size), batch_size=cell.batch_size)))
    make = cell.candidate.make
    first = Place(0, devices, 1, "gloo")
    stages = stage_places(dims_of(make(), first), first)
    if len(stages) > 1:
        return [trace.held.by_kind for trace in trace_ranks(module, batch, make, stages)]
    traces = (trace_rank(module, batch, make, replace(first, rank=rank)) for rank in range(devices))
    return [trace.held.by_kind for trace in traces]


def compare_memory(cells: Sequence[Cell], devices: int, limit_s: float) -> Iterator[str]:
    """Yield the lines of a table, one per cell, followed by the overall error."""
    yield "| model | strategy | real, MB | planned, MB | off by | by kind: real / planned, MB |"
    yield "| --- | --- | --- | --- | --- | --- |"
    errors = []
    for cell, ranks in zip(
        cells, run_cells([(cell, 3) for cell in cells], devices, timed=False, limit_s=limit_s), strict=False
    ):
        if not all(isinstance(each, dict) for each in ranks):
            yield f"| {cell.model} | {cell.strategy} | {ranks[0]} | | | |"
            continue
        found = max(ranks, key=lambda kinds: sum(kinds.values()))
        try:
            expected = max(planned(cell, devices), key=lambda kinds: sum(kinds.values()))
        except Exception as error:
            yield f"| {cell.model} | {cell.strategy} | {sum(found.values()) / 1e6:.2f} | {error!r:.300} | | |"
            continue
        was, said = sum(found.values()), sum(expected.values())
        errors.append(abs(said / was - 1))
        kinds = ", ".join(f"{kind} {found[kind] / 1e6:.2f}/{expected[kind] / 1e6:.2f}" for kind in found)
        sizes = f"{was / 1e6:.2f} | {said / 1e6:.2f} | {said / was - 1:+.1%}"
        yield f"| {cell.model} | {cell.strategy} | {sizes} | {kinds} |"
    if errors:
        yield f"\nMedian error {statistics.median(errors):.1%}, worst {max(errors):.1%} of {len(errors)} cells."


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare cell by cell; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_check", description=__doc__)
    parser.add_argument("--models", nargs="+", default=["gpt", "resnet18", "lstm"], choices=list(MODELS))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), help="names, or NAME@key=value,...")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[8])
    parser.add_argument("--limit", type=float, default=450.0, metavar="SECONDS", help="of all real runs together")
    parser.add_argument("--time", action="store_true", help="compare seconds a step in place of memory")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each cell, for --time")
    parser.add_argument("--profile", help="of `pardist doctor --save`, for --time; measured by default")
    parser.add_argument(
        "--saved", default="logs/plan_time", metavar="FOLDER",
        help="where --time keeps the profile and what it measures; what is there is not measured again",
    )  # fmt: skip
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if options.serve:
        serve(options.serve, options.devices, timed=options.time)
        return 0
    cells = [
        Cell(model, batch_size, strategy)
        for model in options.models
        for batch_size in options.batch_size
        for strategy in options.strategies
    ]
    if options.time:
        return plan_time.main(
            cells, devices=options.devices, rounds=options.rounds, limit_s=options.limit, profile=options.profile,
            saved=options.saved,
        )  # fmt: skip
    for line in compare_memory(cells, options.devices, options.limit):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
