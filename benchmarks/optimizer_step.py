"""Time, traffic, state and memory of Muon's step beside AdamW's: ``python -m benchmarks.optimizer_step [--ranks N]``.

On the matrices of a GPT, under one strategy, both train in turns in the same processes: AdamW steps on what each rank
holds, Muon on whole matrices that one rank each owns. Medians of the slowest rank's times. Columns:

- ``step``: ``optimizer.step()`` with all that it sends; ``training``: forward, backward and step.
- ``update``: the arithmetic of the update, counted apart: the same optimizer's step on all matrices in one process,
  plain torch on one thread while the other ranks wait, divided by the number of ranks. So an uneven distribution
  over owners, packing and waiting stay in what is not counted apart.
- ``ratio``: (training - update) of Muon by training of AdamW, whose own arithmetic stays in.
- ``ratio, both apart``: (training - update) of Muon by (training - update) of AdamW.
- ``ratio, CPU``: the first ratio of processor time of all ranks (threads that send and receive included) in place of
  time by the clock: what it is on a machine that others use too.
- ``sent``: bytes that a rank sends for the update beside what AdamW's step sends, by the plan, in models of fp32; and
  read off the network interface, what all ranks send in a training step, in models. ``state``: of the rank with most.
- ``peak``: with ``--peak``, in processes of their own, by how much resident memory rose at most from before the
  module was made, in MB, on the rank with most.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

_STRATEGIES = ("zero1", "zero2", "zero3")
#: The first one is what others are compared with.
_KINDS = ("AdamW", "Muon")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.optimizer_step")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategies", nargs="+", default=_STRATEGIES, choices=_STRATEGIES)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=4, help="sequences of 128 tokens a rank")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each optimizer, of which the first is dropped")
    parser.add_argument("--peak", action="store_true", help="memory too, in processes of its own")
    parser.add_argument("--output", type=Path, help="where the numbers go as well")
    options = parser.parse_args()
    rows = _run(options, options.strategies, _KINDS)
    if options.peak:
        options.rounds = 3
        for row in rows:
            row["peak_mb"] = _run(options, [row["strategy"]], [row["optimizer"]])[0]["rise_mb"]
    names = (
        "step",
        "update",
        "training",
        "ratio",
        "ratio, both apart",
        "ratio, CPU",
        "sent, plan",
        "sent, wire",
        "state",
        "peak",
    )
    print("| strategy | optimizer | " + " | ".join(names) + " |\n" + "| --- " * (len(names) + 2) + "|")
    for row in rows:
        print(_line(row, next(each for each in rows if each["strategy"] == row["strategy"])))
    if options.output is not None:
        options.output.write_text(json.dumps(rows, indent=1))


def _line(row: dict[str, Any], base: dict[str, Any]) -> str:
    rest = row["training_ms"] - row["update_ms"]
    ratios = (
        rest / base["training_ms"],
        rest / (base["training_ms"] - base["update_ms"]),
        (row["training_cpu_ms"] - row["update_cpu_ms"]) / base["training_cpu_ms"],
    )
    times = [f"{row[key]:.1f} ms" for key in ("step_ms", "update_ms", "training_ms")]
    shown = [f"{value:.2f}" for value in ratios] if row is not base else [""] * len(ratios)
    sent = [f"{row[key]:.3f}" for key in ("sent", "wire", "state")]
    peak = [f"{row['peak_mb']:.0f} MB" if "peak_mb" in row else ""]
    return "| " + " | ".join([row["strategy"], row["optimizer"], *times, *shown, *sent, *peak]) + " |"


def _run(options: Any, strategies: Sequence[str], kinds: Sequence[str]) -> list[dict[str, Any]]:
    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, args=(options, strategies, kinds, port, queue), nprocs=options.ranks)
    found: list[dict[str, Any]] = queue.get()
    return found


def _rank(rank: int, options: Any, strategies: Sequence[str], kinds: Sequence[str], port: int, queue: Any) -> None:
    import lightning_pardist  # noqa: F401, I001
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    rows = [row for strategy in strategies for row in _measure(strategy, kinds, options)]
    if rank == 0:
        queue.put(rows)
    dist.barrier()
    dist.destroy_process_group()


class _Run:
    """One optimizer's module, engine and times."""

    def __init__(self, strategy: str, kind: str, options: Any) -> None:
        import torch

        from recipes.gpt.model import GPT

        torch.manual_seed(0)
        self.module = GPT(dim=options.dim, layers=options.layers, heads=options.dim // 64, context=128, dropout=0.0)
        for param in self.module.parameters():
            param.requires_grad_(param.dim() == 2)
        self.step_s: list[float] = []
        self.training_s: list[float] = []
        self.update_s: list[float] = []
        self.training_cpu_s: list[float] = []
        self.update_cpu_s: list[float] = []
        self.wire_bytes: list[int] = []
        self._shapes = [param.shape for param in self.module.parameters() if param.requires_grad]
        if strategy == "zero3":
            from torch.distributed.device_mesh import init_device_mesh

            from lightning_pardist.engines.fsdp import ShardedDataEngine, find_fsdp_units, shard

            mesh = init_device_mesh("cpu", (options.ranks,))
            sharded = shard(self.module, mesh, units=find_fsdp_units(self.module, min_unit_bytes=1))
            self.optimizer = self._make(kind)
            self.engine: Any = ShardedDataEngine(sharded, [self.optimizer], accumulate="sharded")
            self.around: Any = sharded.run
        else:
            from lightning_pardist.collectives import world_group
            from lightning_pardist.engines.zero import ZeroEngine

            self.optimizer = self._make(kind)
            self.engine = ZeroEngine(self.module, [self.optimizer], group=world_group(), zero_stage=int(strategy[-1]))
            self.around = lambda step, *args: step(*args)
        self.kind = kind

    def _make(self, kind: str, params: Sequence[Any] | None = None) -> Any:
        import torch

        if params is None:
            params = [param for param in self.module.parameters() if param.requires_grad]
        return torch.optim.AdamW(params, fused=False) if kind == "AdamW" else torch.optim.Muon(params)

    def update_alone(self, times: int) -> None:
        """The update of all matrices in one process, while the other ranks wait."""
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 0:
            params = [torch.nn.Parameter(torch.randn(shape)) for shape in self._shapes]
            optimizer = self._make(self.kind, params)
            for _ in range(times):
                for param in params:
                    param.grad = torch.randn(param.shape)
                begin, cpu = time.perf_counter(), time.process_time()
                optimizer.step()
                self.update_s.append(time.perf_counter() - begin)
                self.update_cpu_s.append(time.process_time() - cpu)
        dist.barrier()

    def train(self, tokens: Any) -> None:
        import torch
        import torch.distributed as dist
        import torch.nn.functional as F

        from tests.helpers.wire import loopback_bytes

        def loss_of(x: Any, y: Any) -> Any:
            return F.cross_entropy(self.module(x).flatten(0, 1), y.flatten())

        dist.barrier()
        sent, begin, cpu = loopback_bytes(), time.perf_counter(), time.process_time()
        loss = self.around(loss_of, tokens[:, :-1], tokens[:, 1:])
        context: AbstractContextManager[None] = self.engine.backward(loss)
        with context:
            loss.backward()
        dist.barrier()
        middle = time.perf_counter()
        self.optimizer.step()
        self.engine.step_done()
        end = time.perf_counter()
        used = torch.tensor(time.process_time() - cpu)
        self.optimizer.zero_grad()
        dist.barrier()
        self.wire_bytes.append(loopback_bytes() - sent)
        slowest = torch.tensor([end - middle, end - begin])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.all_reduce(used)
        for times, value in zip(
            (self.step_s, self.training_s, self.training_cpu_s), [*slowest.tolist(), used.item()], strict=True
        ):
            times.append(value)


def _measure(strategy: str, kinds: Sequence[str], options: Any) -> list[dict[str, Any]]:
    import torch
    import torch.distributed as dist

    from lightning_pardist.engines.common.whole_updates import updates_of
    from lightning_pardist.local_tensors import own_part

    before = _resident_mb()
    runs = [_Run(strategy, kind, options) for kind in kinds]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for index in range(options.rounds):
        tokens = torch.randint(256, (options.batch, 129), generator=generator)
        for run in runs if index % 2 else runs[::-1]:
            run.train(tokens)
    rise = _peak_mb() - before
    for run in runs if len(runs) > 1 else ():
        run.update_alone(max(3, options.rounds // 2))
    rows = []
    for run in runs:
        psi = sum(param.numel() for param in run.module.parameters() if param.requires_grad)
        updates = updates_of(run.optimizer)
        sent = torch.tensor(0.0 if updates is None else updates.sent_bytes / options.rounds / 4 / psi)
        held = sum(
            own_part(value).numel()
            for state in run.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )
        found = torch.stack([sent, torch.tensor(held / psi), torch.tensor(rise)])
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        rows.append(
            {
                "strategy": strategy,
                "optimizer": run.kind,
                "ranks": options.ranks,
                "parameters": psi,
                "step_ms": statistics.median(run.step_s[1:]) * 1e3,
                "update_ms": statistics.median(run.update_s[1:] or [0.0]) / options.ranks * 1e3,
                "training_ms": statistics.median(run.training_s[1:]) * 1e3,
                "update_cpu_ms": statistics.median(run.update_cpu_s[1:] or [0.0]) * 1e3,
                "training_cpu_ms": statistics.median(run.training_cpu_s[1:]) * 1e3,
                "sent": found[0].item(),
                "wire": statistics.median(run.wire_bytes[1:]) / 4 / psi,
                "state": found[1].item(),
                "rise_mb": found[2].item(),
            }
        )
        run.engine.detach()
    return rows


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


if __name__ == "__main__":
    main()
