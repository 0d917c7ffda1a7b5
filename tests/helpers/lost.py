"""Training from which a worker goes, and the same by one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from lightning_pardist.engines.servers import replay
from lightning_pardist.engines.servers.update_log import read_logs
from tests.helpers.parity import assert_close
from tests.helpers.scripts import ROOT, Finished, run_script
from tests.scripts.lose import BATCH, STEPS, Module, dataset

WORKERS = 3


def lose(
    folder: Path,
    fault: str,
    rank: int,
    *,
    staleness: int | None = 2,
    servers: int = 1,
    workers: int = WORKERS,
    timeout_s: float = 120.0,
    **variables: str,
) -> Finished:
    """Run the script."""
    script = str(ROOT / "tests" / "scripts" / "lose.py")
    arguments = (str(folder), str(workers + servers), fault, str(rank), str(staleness), str(servers))
    return run_script(script, *arguments, timeout_s=timeout_s, **variables)


def samples_of(folder: Path, worker: int) -> list[dict[str, Any]]:
    """The steps that a worker has begun with ``LOSE_SHARE``, and their samples."""
    path = folder / f"samples{worker}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def replayed(
    folder: Path, *, begin: Path | None = None, workers: int = WORKERS, size: int | None = None, accumulate: int = 1
) -> dict[str, Any]:
    """The same training by one process."""
    module = Module()
    optimizer = module.configure_optimizers()
    if begin is None:
        module.load_state_dict(torch.load(folder / "begin.pt"))
    else:
        saved = torch.load(begin, weights_only=False)
        module.load_state_dict(saved["state_dict"])
        optimizer.load_state_dict(saved["optimizer_states"][0])
    x, y = dataset(size or BATCH * STEPS * workers).tensors
    noted = {worker: _turns(samples_of(folder, worker)) for worker in range(workers)}

    def gradients(worker, turn, index):
        if any(noted.values()):
            for mine in noted[worker][turn]:
                (module.loss(x[mine], y[mine]) / accumulate).backward()
            return
        step = (turn - 1) % STEPS
        mine = torch.arange(worker, len(x), workers)[step * BATCH : (step + 1) * BATCH]
        module.loss(x[mine], y[mine]).backward()

    replay(folder / "updates", [optimizer], gradients)
    return dict(module.named_parameters())


def _turns(steps: list[dict[str, Any]], epoch: int | None = None) -> dict[int, list[list[int]]]:
    """Batches of each turn (from 1) of an epoch or of all, those that stand in for others left out."""
    turns: dict[int, list[list[int]]] = {}
    for step in steps:
        of_epoch = epoch in (None, step["epoch"])
        batches = turns.setdefault(step["turn"] - steps[0]["turn"] + 1, [])
        batches += [step["samples"]] if step["counts"] and of_epoch else []
    return turns


def check_replay(folder: Path, **more: Any) -> None:
    """Compare weights with those of the replay."""
    weights, want = torch.load(folder / "end.pt"), replayed(folder, **more)
    assert_close({name: weights[name] for name in want}, want, rtol=1e-12)


def done(finished: Finished) -> dict[int, dict[str, Any]]:
    """What ranks have found that came to the end."""
    lines = [line for line in finished.output.splitlines() if line.startswith("done")]
    return {(found := json.loads(line.removeprefix("done ")))["rank"]: found for line in lines}


def told(finished: Finished) -> list[str]:
    """Lines about workers that are gone."""
    return [line for line in finished.output.splitlines() if "has gone after" in line]


def trained(folder: Path, epoch: int) -> list[int]:
    """With ``LOSE_SHARE``, samples of an epoch whose updates the first server has made, each as often as it did."""
    log = read_logs(folder / "updates")[0]
    turns = {worker: _turns(samples_of(folder, worker), epoch) for worker in log.workers}
    made = {(entry.worker, entry.turn) for entry in log.entries if entry.did == "update"}
    return [sample for worker, turn in sorted(made) for batch in turns[worker].get(turn, ()) for sample in batch]
