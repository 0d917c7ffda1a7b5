"""Step time on slow links: two hosts in network namespaces with rate-limited, delayed links (root only).

``python -m benchmarks.slow_link`` prints, for each strategy and link, the median step next to its lower bound:
max(compute, traffic / bandwidth), where compute is the step time of the same two ranks training separately. Time beyond
this bound is communication that does not overlap with compute. All candidates train in the same processes, in turns.

A candidate that synchronises every ``sync_every`` steps takes two such intervals per turn, and reports its mean step:
``--rates 10mbit --strategies 'pardist_local_sgd@sync_every=100,outer_compression="int4"'``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.machine import describe, load_average
from benchmarks.settings import given_settings

_ROOT = Path(__file__).parents[1]
_BITS = {"1gbit": 1e9, "100mbit": 1e8, "10mbit": 1e7}
_ALONE, _BASELINE = "alone", "ddp"
_CANDIDATES = [
    *(
        "pardist_ddp",
        "pardist_ddp@bucket_size_mb=2",
        "pardist_zero1",
        "pardist_zero2",
        "pardist_zero2@bucket_size_mb=2",
    ),
    *("pardist_zero3", "pardist_fsdp@reshard_after_forward=false"),
]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.slow_link")
    parser.add_argument("--strategies", nargs="+", default=_CANDIDATES, help="NAME or NAME@setting=JSON,...")
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"], choices=list(_BITS))
    parser.add_argument("--delay-ms", type=float, default=1.0, help="one way; 0 takes the kernel's own links")
    parser.add_argument("--width", type=int, default=768, help="width of the four layers")
    parser.add_argument("--batch", type=int, default=256, help="samples per rank and step")
    parser.add_argument("--rounds", type=int, default=3, help="how often every candidate has its turn")
    parser.add_argument("--steps", type=int, default=7, help="of a turn, of which two are dropped")
    parser.add_argument("--output", type=Path, help="folder for the table and the numbers")
    options = parser.parse_args()
    from tests.helpers.hosts import Hosts, why_no_hosts

    if (reason := why_no_hosts()) is not None:
        sys.exit(f"cannot make hosts: {reason}")
    found: dict[str, dict[str, Any]] = {}
    with Hosts(2) as hosts:
        for rate in options.rates:
            if options.delay_ms:
                hosts.connect_slowly(options.delay_ms, rate)
            else:
                hosts.limit(rate)
            found[rate] = _run(hosts, rate, options)
    lines = [f"{' '.join(['python -m benchmarks.slow_link', *sys.argv[1:]])}", f"load {load_average()}", ""]
    for rate, rows in found.items():
        lines += _table(rate, rows)
    print("\n".join(lines))
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        path = options.output / f"{date.today()}-slow-link"
        path.with_suffix(".md").write_text("\n".join([*lines, "", json.dumps(describe(), indent=1)]) + "\n")
        path.with_suffix(".json").write_text(json.dumps({"machine": describe(), "steps": found}, indent=1) + "\n")


def _table(rate: str, rows: dict[str, Any]) -> list[str]:
    compute_s = statistics.median(rows[_ALONE]["times"])
    lines = [f"{rate}: one rank alone takes {compute_s * 1e3:.1f} ms a step", ""]
    lines += [
        "| strategy | step ms | quartiles | sent MB | max(compute, wire) ms | step / that | against ddp | of alone |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    baseline_s = statistics.median(rows[_BASELINE]["times"])
    for name, row in rows.items():
        if name == _ALONE:
            continue
        middle = statistics.mean if _interval(name) else statistics.median
        step_s, sent = middle(row["times"]), middle(row["sent"])
        low, _, high = statistics.quantiles(row["times"], n=4)
        best_s = max(compute_s, sent * 8 / _BITS[rate])
        lines.append(
            f"| {name} | {step_s * 1e3:.1f} | {low * 1e3:.1f}-{high * 1e3:.1f} | {sent / 1e6:.2f} |"
            f" {best_s * 1e3:.1f} | {step_s / best_s:.2f} | {baseline_s / step_s:.2f}x | {compute_s / step_s:.2f} |"
        )
    return [*lines, ""]


def _run(hosts: Any, rate: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        given = {key: getattr(options, key) for key in ("width", "batch", "rounds", "steps")}
        given |= {"strategies": [_ALONE, _BASELINE, *options.strategies], "result": f"{folder}/result.json"}
        code = f"from benchmarks.slow_link import rank; rank({json.dumps(given)!r})"
        running = []
        for index, name in enumerate(hosts.names):
            meet = ("--nnodes", "2", "--node-rank", str(index), "--master-addr", "h1", "--master-port", "29411")
            command = ("python", "-m", "torch.distributed.run", *meet, "--no-python", "python", "-c", code)
            running.append(hosts.start(name, *command, cwd=_ROOT, GLOO_SOCKET_IFNAME="eth0"))
        codes = [process.wait(600) for process in running]
        if any(codes):
            sys.exit("\n".join(process.output for process in running))
        print(f"{rate} done", file=sys.stderr, flush=True)
        return dict(json.loads(Path(given["result"]).read_text()))


def rank(given: str) -> None:
    """Train with every candidate in turns; rank zero writes step times and bytes sent."""
    import lightning_pardist  # noqa: F401  # isort: skip
    import torch.distributed as dist

    wishes = json.loads(given)
    found: dict[str, Any] = {name: {"times": [], "sent": []} for name in wishes["strategies"]}
    for _ in range(wishes["rounds"]):
        for name in wishes["strategies"]:
            clock = _train(name, wishes)
            found[name]["times"] += clock.times
            found[name]["sent"] += clock.sent
            # A rank that trains alone does not wait for the other.
            if dist.is_initialized():
                dist.barrier()
    if dist.get_rank() == 0:
        Path(wishes["result"]).write_text(json.dumps(found))


def _train(name: str, wishes: dict[str, Any]) -> Any:
    import lightning.pytorch as pl

    width, steps = wishes["width"], 2 * _interval(name) + 2 if _interval(name) else wishes["steps"]

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.GELU())]
            self.net = nn.Sequential(*layers, nn.Linear(width, 10))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Clock(pl.Callback):
        def __init__(self) -> None:
            self.moments: list[tuple[float, int]] = []

        def on_train_batch_start(self, *_: Any) -> None:
            self.moments.append((time.perf_counter(), _sent_bytes()))

        @property
        def times(self) -> list[float]:
            return [after[0] - before[0] for before, after in self._pairs]

        @property
        def sent(self) -> list[int]:
            return [after[1] - before[1] for before, after in self._pairs]

        @property
        def _pairs(self) -> list[Any]:
            return list(zip(self.moments, self.moments[1:], strict=False))[2:]

    torch.manual_seed(0)
    clock, batch, count = Clock(), wishes["batch"], 1 if name == _ALONE else 2
    samples = batch * (steps + 1) * count
    data = TensorDataset(torch.randn(samples, width), torch.randint(0, 10, (samples,)))
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=_strategy(name),
        devices=1,
        num_nodes=count,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    trainer.fit(Module(), DataLoader(data, batch_size=batch))
    return clock


def _strategy(name: str) -> Any:
    from lightning.pytorch.strategies import SingleDeviceStrategy

    from lightning_pardist.registry import TABLE

    if name == _ALONE:
        return SingleDeviceStrategy(device="cpu")
    settings = given_settings(name)
    name, _, _ = name.partition("@")
    if not settings:
        return name
    entry = next(entry for entry in TABLE if entry.name == name)
    return entry.make(**entry.preset | settings)


def _interval(name: str) -> int:
    """Return the steps between two synchronisations, 0 if ranks synchronise every step."""
    return int(given_settings(name).get("sync_every", 0))


def _sent_bytes() -> int:
    """Return the bytes that have left this host so far."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    return 0


if __name__ == "__main__":
    main()
