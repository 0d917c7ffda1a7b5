"""Time, traffic, state and memory of Muon's step compared with AdamW's: ``python -m benchmarks.optimizer_step``.

On the matrices of a GPT, under one strategy, both train in turns in the same processes: AdamW updates each rank's
shards, Muon whole matrices that are owned by one rank each. Medians of the slowest rank's times. Columns:

- ``step``: ``optimizer.step()`` with all of its communication; ``training``: forward, backward and step.
- ``update``: the arithmetic of the update, measured separately: the same optimizer's step on all matrices in one
  process, plain torch on one thread while the other ranks wait, divided by the number of ranks. An uneven distribution
  over owners, packing and waiting thus remain in (training - update).
- ``ratio``: (training - update) of Muon over training of AdamW, whose own arithmetic is included.
- ``ratio, both apart``: (training - update) of Muon over (training - update) of AdamW.
- ``ratio, CPU``: the first ratio with the CPU time of all ranks (including communication threads) in place of wall
  time, which is also valid on a shared machine.
- ``sent``: ``plan``: bytes that a rank sends for the update in addition to AdamW's step, in multiples of the fp32
  model; ``wire``: what all ranks send in a training step, in models, read from the network interface; ``formula``: its
  upper bound.
  ``state``: of the rank with most, in models.
- ``peak``: with ``--peak``, in separate processes, the peak rise of resident memory since before the module was
  created, in MB, on the rank with most.

With ``--peers``, also measures installed third-party Muon implementations under torch's own strategies by hand,
compared with AdamW there; see :mod:`benchmarks.optimizer_peers`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import socket
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks.network import isolate, loopback_bytes

_STRATEGIES = ("zero1", "zero2", "zero3")
_BY_HAND = ("fully_shard", "torch_ddp")
#: The first one is the baseline.
_KINDS = ("AdamW", "Muon")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.optimizer_step")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--strategies", nargs="+", default=_STRATEGIES, choices=_STRATEGIES)
    parser.add_argument("--peers", action="store_true", help="Muon of other packages too")
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=4, help="sequences of 128 tokens a rank")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each optimizer, of which the first is dropped")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds for all rounds on as many ranks")
    parser.add_argument("--peak", action="store_true", help="memory too, in processes of its own")
    parser.add_argument("--at-once", type=int, default=1, help="runs for memory at a time")
    parser.add_argument("--output", type=Path, help="where the numbers go as well")
    options = parser.parse_args()
    # Nothing else is counted on a loopback interface of our own.
    isolate()
    strategies = [*options.strategies, *(_BY_HAND if options.peers else ())]
    rows = []
    for ranks in options.ranks:
        rows += _run(options, ranks, [(strategy, _kinds(strategy)) for strategy in strategies])
        # An interrupted run keeps the rows so far.
        _show(rows, options.output)
    if options.peak:
        options.rounds = 3
        with ThreadPoolExecutor(options.at_once) as pool:
            peaks = pool.map(lambda row: _run(options, row["ranks"], [(row["strategy"], [row["optimizer"]])]), rows)
            for row, (found,) in zip(rows, peaks, strict=True):
                row["peak_mb"] = found["rise_mb"]
        _show(rows, options.output)


def _show(rows: Sequence[dict[str, Any]], output: Path | None) -> None:
    _print(rows)
    if output is not None:
        output.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1))


def _kinds(strategy: str) -> Sequence[str]:
    if strategy in _STRATEGIES:
        return _KINDS
    from benchmarks.optimizer_peers import peers

    return peers(strategy)


def _print(rows: Sequence[dict[str, Any]]) -> None:
    names = (
        "step",
        "update",
        "training",
        "ratio",
        "ratio, both apart",
        "ratio, CPU",
        "sent, plan",
        "sent, wire",
        "sent, formula",
        "state",
        "peak",
    )
    print("| ranks | strategy | optimizer | " + " | ".join(names) + " |\n" + "| --- " * (len(names) + 3) + "|")
    for row in rows:
        place = [row[key] for key in ("ranks", "strategy")]
        base = next(each for each in rows if [each[key] for key in ("ranks", "strategy")] == place)
        print(_line(row, base))


def _line(row: dict[str, Any], base: dict[str, Any]) -> str:
    rest = row["training_ms"] - row["update_ms"]
    ratios = (
        rest / base["training_ms"],
        rest / (base["training_ms"] - base["update_ms"]),
        (row["training_cpu_ms"] - row["update_cpu_ms"]) / base["training_cpu_ms"],
    )
    times = [f"{row[key]:.1f} ms" for key in ("step_ms", "update_ms", "training_ms")]
    shown = [f"{value:.2f}" for value in ratios] if row is not base else [""] * len(ratios)
    sent = [f"{row[key]:.3f}" if row[key] is not None else "" for key in ("sent", "wire", "most", "state")]
    peak = [f"{row['peak_mb']:.0f} MB" if "peak_mb" in row else ""]
    return (
        "| " + " | ".join([str(row["ranks"]), row["strategy"], row["optimizer"], *times, *shown, *sent, *peak]) + " |"
    )


def _run(options: Any, ranks: int, parts: Sequence[tuple[str, Sequence[str]]]) -> list[dict[str, Any]]:
    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, args=(options, ranks, parts, port, queue), nprocs=ranks)
    found: list[dict[str, Any]] = queue.get()
    return found


def _rank(
    rank: int, options: Any, ranks: int, parts: Sequence[tuple[str, Sequence[str]]], port: int, queue: Any
) -> None:
    # Compilation in other packages takes longer than a run.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", TORCHDYNAMO_DISABLE="1")
    import lightning_pardist  # noqa: F401, I001
    import torch
    import torch.distributed as dist

    # Imported here so that the memory of imports is excluded from the measurement.
    from lightning_pardist.engines.fsdp import shard  # noqa: F401
    from lightning_pardist.engines.zero import ZeroEngine  # noqa: F401
    from recipes.gpt.model import GPT  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    end = time.perf_counter() + options.limit
    rows: list[dict[str, Any]] = []
    for index, (strategy, kinds) in enumerate(parts):
        left = (end - time.perf_counter()) / (len(parts) - index)
        rows += _measure(strategy, kinds, options, left)
    if rank == 0:
        queue.put(rows)
    dist.barrier()
    dist.destroy_process_group()


#: By optimizer, wall and CPU times of its update in one process.
_ALONE: dict[str, tuple[list[float], list[float]]] = {}


class _Run:
    """Module, engine and times of one optimizer."""

    def __init__(self, strategy: str, kind: str, options: Any) -> None:
        import torch
        import torch.distributed as dist

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
        self.kind = kind
        self._forward: Any = self.module
        self._shapes = [param.shape for param in self.module.parameters() if param.requires_grad]
        if strategy in _BY_HAND:
            from benchmarks.optimizer_peers import ByHand

            by_hand = ByHand(strategy, self.module)
            self._forward, self.engine = by_hand.forward, by_hand
            self.optimizer = self._make(kind, mesh=by_hand.mesh)
            self.around: Any = lambda step, *args: step(*args)
        elif strategy == "zero3":
            from torch.distributed.device_mesh import init_device_mesh

            from lightning_pardist.engines.fsdp import ShardedDataEngine, find_fsdp_units, shard

            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            sharded = shard(self.module, mesh, units=find_fsdp_units(self.module, min_unit_bytes=1))
            self.optimizer = self._make(kind)
            self.engine: Any = ShardedDataEngine(sharded, [self.optimizer], accumulate="sharded")
            self.around = sharded.run
        else:
            from lightning_pardist.collectives import world_group
            from lightning_pardist.engines.zero import ZeroEngine

            self.optimizer = self._make(kind)
            self.engine = ZeroEngine(self.module, [self.optimizer], group=world_group(), zero_stage=int(strategy[-1]))
            self.around = lambda step, *args: step(*args)

    def _make(self, kind: str, params: Sequence[Any] | None = None, mesh: Any = None) -> Any:
        import torch

        if params is None:
            params = [param for param in self.module.parameters() if param.requires_grad]
        if kind in _KINDS:
            return torch.optim.AdamW(params, fused=False) if kind == "AdamW" else torch.optim.Muon(params)
        from benchmarks.optimizer_peers import make

        return make(params, mesh)

    def update_alone(self, times: int) -> None:
        """Time the update of all matrices in one process while the other ranks wait, once for each optimizer."""
        import torch
        import torch.distributed as dist

        known = _ALONE.setdefault(self.kind, (self.update_s, self.update_cpu_s))
        self.update_s, self.update_cpu_s = known
        if dist.get_rank() == 0 and not self.update_s:
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

        def loss_of(x: Any, y: Any) -> Any:
            return F.cross_entropy(self._forward(x).flatten(0, 1), y.flatten())

        dist.barrier()
        sent, begin, cpu = loopback_bytes() or 0, time.perf_counter(), time.process_time()
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
        self.wire_bytes.append((loopback_bytes() or 0) - sent)
        slowest = torch.tensor([end - middle, end - begin])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.all_reduce(used)
        for times, value in zip(
            (self.step_s, self.training_s, self.training_cpu_s), [*slowest.tolist(), used.item()], strict=True
        ):
            times.append(value)


def _measure(strategy: str, kinds: Sequence[str], options: Any, limit_s: float) -> list[dict[str, Any]]:
    import torch
    import torch.distributed as dist

    from lightning_pardist.engines.common.full_tensor_updates import updates_of
    from lightning_pardist.local_tensors import local_shard

    before = _resident_mb()
    runs = [_Run(strategy, kind, options) for kind in kinds]
    generator = torch.Generator().manual_seed(dist.get_rank())
    ranks, begin = dist.get_world_size(), time.perf_counter()
    for index in range(options.rounds):
        late = torch.tensor(float(index > 1 and time.perf_counter() - begin > limit_s))
        dist.all_reduce(late, op=dist.ReduceOp.MAX)
        if late.item():
            break
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
        sent = torch.tensor(0.0 if updates is None else updates.sent_bytes / len(run.step_s) / 4 / psi)
        held = sum(
            local_shard(value).numel()
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
                "ranks": ranks,
                "rounds": len(run.step_s),
                "parameters": psi,
                "step_ms": statistics.median(run.step_s[1:]) * 1e3,
                "update_ms": statistics.median(run.update_s[1:] or [0.0]) / ranks * 1e3,
                "training_ms": statistics.median(run.training_s[1:]) * 1e3,
                "update_cpu_ms": statistics.median(run.update_cpu_s[1:] or [0.0]) * 1e3,
                "training_cpu_ms": statistics.median(run.training_cpu_s[1:]) * 1e3,
                "sent": found[0].item(),
                "wire": statistics.median(run.wire_bytes[1:]) / 4 / psi,
                "most": _most_sent(strategy, run.kind, ranks),
                "state": found[1].item(),
                "rise_mb": found[2].item(),
            }
        )
        run.engine.detach()
    return rows


def _most_sent(strategy: str, kind: str, ranks: int) -> float | None:
    """Return what all ranks send in a training step, in models: ``2 Psi (N-1)/N`` a rank, ``3 Psi (N-1)/N`` for ZeRO-3.

    The update of whole matrices adds at most ``Psi/N (N-1)/N`` a rank for gradients and the same for new values, and
    under ZeRO-3 once more for values.
    """
    if strategy in _BY_HAND:
        return None
    ways = 3 if strategy == "zero3" else 2
    return ways * (ranks - 1) + (ways * (ranks - 1) / ranks if kind == "Muon" else 0.0)


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


if __name__ == "__main__":
    main()
