"""Parameter-server training that loses a worker, and its replay in one process."""

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
    """Run tests/scripts/lose.py."""
    script = str(ROOT / "tests" / "scripts" / "lose.py")
    arguments = (str(folder), str(workers + servers), fault, str(rank), str(staleness), str(servers))
    return run_script(script, *arguments, timeout_s=timeout_s, **variables)


def samples_of(folder: Path, worker: int) -> list[dict[str, Any]]:
    """Return the steps that a worker has started with ``LOSE_SHARE``, with their samples."""
    path = folder / f"samples{worker}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def replayed(
    folder: Path, *, begin: Path | None = None, workers: int = WORKERS, size: int | None = None, accumulate: int = 1
) -> dict[str, Any]:
    """Replay the same training in one process, and return the parameters."""
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
    """Return the batches of each turn (from 1), of one epoch or of all, without batches that do not count."""
    turns: dict[int, list[list[int]]] = {}
    for step in steps:
        of_epoch = epoch in (None, step["epoch"])
        batches = turns.setdefault(step["turn"] - steps[0]["turn"] + 1, [])
        batches += [step["samples"]] if step["counts"] and of_epoch else []
    return turns


def check_replay(folder: Path, **more: Any) -> None:
    """Compare the final weights with those of the replay."""
    weights, want = torch.load(folder / "end.pt"), replayed(folder, **more)
    assert_close({name: weights[name] for name in want}, want, rtol=1e-12)


def done(finished: Finished) -> dict[int, dict[str, Any]]:
    """Return the results of the ranks that finished."""
    lines = [line for line in finished.output.splitlines() if line.startswith("done")]
    return {(found := json.loads(line.removeprefix("done ")))["rank"]: found for line in lines}


def told(finished: Finished) -> list[str]:
    """Return the output lines about lost workers."""
    return [line for line in finished.output.splitlines() if "has gone after" in line]


def trained(folder: Path, epoch: int) -> list[int]:
    """Return, with ``LOSE_SHARE``, the samples of an epoch in server zero's updates, each as often as it was used."""
    log = read_logs(folder / "updates")[0]
    turns = {worker: _turns(samples_of(folder, worker), epoch) for worker in log.workers}
    made = {(entry.worker, entry.turn) for entry in log.entries if entry.did == "update"}
    return [sample for worker, turn in sorted(made) for batch in turns[worker].get(turn, ()) for sample in batch]
