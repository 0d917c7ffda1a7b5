"""Step time on slow links: two hosts in network namespaces, the rate of their links limited (root, iproute2).

``python -m benchmarks.slow_link`` prints, for each strategy and rate, the median step beside the best that can be:
max(compute, traffic / bandwidth). What the ratio exceeds 1 by is traffic that did not hide behind the compute.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

_ROOT = Path(__file__).parents[1]
_STEPS, _WARM_UP = 12, 3
_BITS = {"1gbit": 1e9, "100mbit": 1e8}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.slow_link")
    parser.add_argument("--strategies", nargs="+", default=["ddp", "pardist_ddp", "pardist_zero2", "pardist_zero3"])
    parser.add_argument("--rates", nargs="+", default=["none", "1gbit", "100mbit"], choices=["none", *_BITS])
    parser.add_argument("--width", type=int, default=768, help="width of the four layers")
    parser.add_argument("--batch", type=int, default=256, help="samples per rank and step")
    options = parser.parse_args()
    from tests.helpers.hosts import Hosts, why_no_hosts

    if (reason := why_no_hosts()) is not None:
        sys.exit(f"cannot make hosts: {reason}")
    print(f"torch {torch.__version__}, {' '.join(sys.argv)}")
    print(f"{'rate':8} {'strategy':16} {'step ms':>9} {'sent MB':>8} {'best ms':>8} {'ratio':>6}")
    with Hosts(2) as hosts:
        compute_s = _run(hosts, 1, "pardist_ddp", options)["step_s"]
        print(f"{'-':8} {'one process':16} {compute_s * 1e3:9.1f}")
        for rate in options.rates:
            hosts.limit(None if rate == "none" else rate)
            for strategy in options.strategies:
                found = _run(hosts, 2, strategy, options)
                wire_s = found["sent"] * 8 / _BITS[rate] if rate in _BITS else 0.0
                best_s = max(compute_s, wire_s)
                shown = f"{found['step_s'] * 1e3:9.1f} {found['sent'] / 1e6:8.2f} {best_s * 1e3:8.1f}"
                print(f"{rate:8} {strategy:16} {shown} {found['step_s'] / best_s:6.2f}", flush=True)


def _run(hosts: Any, count: int, strategy: str, options: argparse.Namespace) -> dict[str, float]:
    given = json.dumps({"strategy": strategy, "hosts": count, "width": options.width, "batch": options.batch})
    code = f"from benchmarks.slow_link import rank; rank({given!r})"
    running = []
    for index, name in enumerate(hosts.names[:count]):
        meet = ("--nnodes", str(count), "--node-rank", str(index), "--master-addr", "h1", "--master-port", "29411")
        command = ("python", "-m", "torch.distributed.run", *meet, "--no-python", "python", "-c", code)
        running.append(hosts.start(name, *command, cwd=_ROOT, GLOO_SOCKET_IFNAME="eth0"))
    codes = [process.wait(600) for process in running]
    if any(codes):
        sys.exit("\n".join(process.output for process in running))
    line = next(line for line in running[0].output.splitlines() if line.startswith("{"))
    return dict(json.loads(line))


def rank(given: str) -> None:
    """One rank's training: prints, on the first, its median step and the bytes it sent in one."""
    import lightning_pardist  # noqa: F401  # isort: skip
    import lightning.pytorch as pl

    wishes = json.loads(given)
    width = wishes["width"]

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
            self.times: list[float] = []
            self.sent: list[int] = []

        def on_train_batch_start(self, *_: Any) -> None:
            self.times.append(time.perf_counter())
            self.sent.append(_sent_bytes())

    torch.manual_seed(0)
    clock, batch = Clock(), wishes["batch"]
    samples = batch * _STEPS * wishes["hosts"]
    data = TensorDataset(torch.randn(samples, width), torch.randint(0, 10, (samples,)))
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=wishes["strategy"],
        devices=1,
        num_nodes=wishes["hosts"],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    trainer.fit(Module(), DataLoader(data, batch_size=batch))
    if trainer.global_rank == 0:
        steps = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)][_WARM_UP:]
        sent = [after - before for before, after in zip(clock.sent, clock.sent[1:], strict=False)][_WARM_UP:]
        print(json.dumps({"step_s": statistics.median(steps), "sent": statistics.median(sent)}), flush=True)


def _sent_bytes() -> int:
    """What has left this host so far."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    return 0


if __name__ == "__main__":
    main()
