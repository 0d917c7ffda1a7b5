"""Measured seconds per step compared with a plan's. Measurements are saved as they arrive and compared later."""

from __future__ import annotations

import lightning_pardist  # noqa: F401  (before lightning)

# isort: split
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.plan_modules import MODELS
from benchmarks.plan_runs import Cell, run_cells
from lightning_pardist.planner import DeviceProfile, find_profile, plan
from lightning_pardist.planner.measuring import measure_alone

_STEPS = 16


def measure(cells: Sequence[Cell], *, devices: int, rounds: int, limit_s: float, path: Path) -> dict[str, Any]:
    """Measure the seconds per step of every cell in several rounds, saving after each measurement.

    Args:
        cells: Cells to train, in the order of their turns.
        devices: Number of ranks.
        rounds: Turns of each cell, unless the time limit is reached.
        limit_s: Total time limit in seconds.
        path: File to save to.
    """
    ends = time.monotonic() + limit_s
    found: dict[str, Any] = {"devices": devices, "cells": [{**asdict(cell), "steps_s": []} for cell in cells]}
    turns = [(cell, _STEPS) for cell in cells] * rounds
    for number, took in enumerate(run_cells(turns, devices, timed=True, limit_s=ends - time.monotonic())):
        cell = turns[number][0]
        if not all(isinstance(each, float) for each in took):
            print(f"{cell.model} {cell.strategy}: {took[0]}", file=sys.stderr, flush=True)
            continue
        found["cells"][number % len(cells)]["steps_s"].append(max(took))
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{cell.model} {cell.batch_size} {cell.strategy}: {max(took) * 1e3:.1f} ms", file=sys.stderr, flush=True)
    return found


def planned(
    model: str, batch_size: int, strategies: Iterable[str], devices: int, profile: DeviceProfile
) -> Mapping[str, Any]:
    """Return the rows of a plan by strategy."""
    torch.manual_seed(0)
    batch = next(iter(DataLoader(MODELS[model].data(batch_size), batch_size=batch_size)))
    names = list(strategies)
    made = plan(MODELS[model](), batch, devices=devices, device=profile, strategies=names)
    rows = [
        row for row in made.rows if set(row.candidate.settings) <= {"tensor_parallel_size", "pipeline_parallel_size"}
    ]
    return {row.candidate.strategy: row for row in rows}


def compare(found: Mapping[str, Any], profile: DeviceProfile) -> Iterator[str]:
    """Yield lines of tables, one per cell, followed by the overall errors and rank correlations."""
    yield "| model, samples | strategy | real, ms | planned, ms | off by | rounds, ms |"
    yield "| --- | --- | --- | --- | --- | --- |"
    groups: dict[tuple[str, int], list[Any]] = {}
    for each in found["cells"]:
        if each["steps_s"]:
            groups.setdefault((each["model"], each["batch_size"]), []).append(each)
    errors: list[float] = []
    taus, chosen = [], []
    for (model, batch_size), cells in groups.items():
        rows = planned(model, batch_size, [each["strategy"] for each in cells], found["devices"], profile)
        cells = [each for each in cells if each["strategy"] in rows]
        took = [min(each["steps_s"]) for each in cells]
        said = [rows[each["strategy"]].time.step for each in cells]
        for each, was, expected in zip(cells, took, said, strict=True):
            errors.append(abs(expected / was - 1))
            rounds = ", ".join(f"{each_s * 1e3:.1f}" for each_s in each["steps_s"])
            yield (f"| {model}, {batch_size} | {each['strategy']} | {was * 1e3:.1f} | {expected * 1e3:.1f}"
                   f" | {expected / was - 1:+.0%} | {rounds} |")  # fmt: skip
        speeds = [rows[each["strategy"]].dims.batch_size / was for each, was in zip(cells, took, strict=True)]
        expected_speeds = [rows[each["strategy"]].samples_per_s for each in cells]
        taus.append(kendall(speeds, expected_speeds))
        best = max(range(len(cells)), key=lambda index: expected_speeds[index])
        chosen.append((f"{model}, {batch_size}", cells[best]["strategy"], speeds[best] / max(speeds)))
    if not errors:
        return
    yield f"\nMedian error {statistics.median(errors):.0%}, worst {max(errors):.0%} of {len(errors)} cells."
    yield f"Kendall's tau {', '.join(f'{tau:.2f}' for tau in taus)}: mean {statistics.mean(taus):.2f}."
    near = sum(share >= 0.95 for *_, share in chosen)
    each_text = "; ".join(f"{where}: {name} at {share:.0%}" for where, name, share in chosen)
    yield f"Chosen within 5% of the best measured in {near} of {len(chosen)}: {each_text}."


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Kendall's tau: concordant pairs minus the others, over all pairs."""
    pairs = list(combinations(range(len(first)), 2))
    same = sum(1 if (first[a] - first[b]) * (second[a] - second[b]) > 0 else -1 for a, b in pairs)
    return same / len(pairs) if pairs else 1.0


def main(cells: Sequence[Cell], *, devices: int, rounds: int, limit_s: float, profile: str | None, saved: str) -> int:
    """Measure what is not saved yet, and compare; return the exit status."""
    folder = Path(saved)
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "profile.json"
    path = Path(profile) if profile else kept
    if not path.exists():
        kept.write_text(json.dumps(measure_alone(devices, disk=str(kept.parent)).to_json(), indent=1) + "\n")
    made = find_profile(path)
    times = folder / "measured.json"
    if not times.exists():
        measure(cells, devices=devices, rounds=rounds, limit_s=limit_s, path=times)
    print(f"{made.name}: {made.flops['float32'] / 1e9:.1f} GFLOP/s fp32, {made.bytes_per_s / 1e9:.1f} GB/s,"
          f" {made.host_s_per_operator * 1e6:.1f} us an operator, link {made.inside.latency_s * 1e6:.0f} us and"
          f" {made.inside.bytes_per_s / 1e9:.2f} GB/s\n")  # fmt: skip
    for line in compare(json.loads(times.read_text()), made):
        print(line, flush=True)
    return 0
