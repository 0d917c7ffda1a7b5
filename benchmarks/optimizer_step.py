"""Time, traffic and state of an optimizer's step: ``python -m benchmarks.optimizer_step [--ranks N]``.

On the matrices of a GPT, under one strategy, AdamW and Muon take steps in turns in the same processes: AdamW on what
each rank holds, Muon on whole matrices that one rank each owns. What Muon's arithmetic takes is measured inside of its
step, and shown apart: the rest is what bringing matrices to their owners and back costs.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

_STRATEGIES = ("zero1", "zero2", "zero3")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.optimizer_step")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategies", nargs="+", default=_STRATEGIES, choices=_STRATEGIES)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=4, help="sequences of 128 tokens a rank")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each optimizer, of which two are dropped")
    parser.add_argument("--output", type=Path, help="where the numbers go as well")
    options = parser.parse_args()
    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, args=(options, port, queue), nprocs=options.ranks)
    rows = queue.get()
    print("| strategy | optimizer | step, ms | its arithmetic, ms | training step, ms | sent, Psi | state, Psi |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row['strategy']} | {row['optimizer']} | {row['step_ms']:.1f} | {row['arithmetic_ms']:.1f} |"
            f" {row['training_ms']:.1f} | {row['sent']:.3f} | {row['state']:.3f} |"
        )
    if options.output is not None:
        options.output.write_text(json.dumps(rows, indent=1))


def _rank(rank: int, options: Any, port: int, queue: Any) -> None:
    import lightning_pardist  # noqa: F401, I001
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    rows = [row for strategy in options.strategies for row in _measure(strategy, options)]
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
        self.module = GPT(dim=options.dim, layers=options.layers, heads=6, context=128, dropout=0.0)
        for param in self.module.parameters():
            param.requires_grad_(param.dim() == 2)
        self.step_s: list[float] = []
        self.training_s: list[float] = []
        self.arithmetic_s: list[float] = []
        self._arithmetic = 0.0
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

    def _make(self, kind: str) -> Any:
        import torch

        run = self

        class TimedMuon(torch.optim.Muon):
            def step(self, closure: Any = None) -> Any:
                begin = time.perf_counter()
                result = super().step(closure)
                run._arithmetic += time.perf_counter() - begin
                return result

        params = [param for param in self.module.parameters() if param.requires_grad]
        return torch.optim.AdamW(params, fused=False) if kind == "AdamW" else TimedMuon(params)

    def train(self, tokens: Any) -> None:
        import torch
        import torch.distributed as dist
        import torch.nn.functional as F

        def loss_of(x: Any, y: Any) -> Any:
            return F.cross_entropy(self.module(x).flatten(0, 1), y.flatten())

        dist.barrier()
        begin = time.perf_counter()
        loss = self.around(loss_of, tokens[:, :-1], tokens[:, 1:])
        context: AbstractContextManager[None] = self.engine.backward(loss)
        with context:
            loss.backward()
        dist.barrier()
        self._arithmetic, middle = 0.0, time.perf_counter()
        self.optimizer.step()
        self.engine.step_done()
        end = time.perf_counter()
        self.optimizer.zero_grad()
        slowest = torch.tensor([end - middle, end - begin, self._arithmetic])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        for times, value in zip((self.step_s, self.training_s, self.arithmetic_s), slowest.tolist(), strict=True):
            times.append(value)


def _measure(strategy: str, options: Any) -> list[dict[str, Any]]:
    import torch
    import torch.distributed as dist

    from lightning_pardist.engines.common.whole_updates import updates_of
    from lightning_pardist.local_tensors import own_part

    runs = [_Run(strategy, kind, options) for kind in ("AdamW", "Muon")]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for index in range(options.rounds):
        tokens = torch.randint(256, (options.batch, 129), generator=generator)
        for run in runs if index % 2 else runs[::-1]:
            run.train(tokens)
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
        found = torch.stack([sent, torch.tensor(held / psi)])
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        rows.append(
            {
                "strategy": strategy,
                "optimizer": run.kind,
                "ranks": options.ranks,
                "parameters": psi,
                "step_ms": statistics.median(run.step_s[2:]) * 1e3,
                "arithmetic_ms": statistics.median(run.arithmetic_s[2:]) * 1e3,
                "training_ms": statistics.median(run.training_s[2:]) * 1e3,
                "sent": found[0].item(),
                "state": found[1].item(),
            }
        )
        run.engine.detach()
    return rows


if __name__ == "__main__":
    main()
