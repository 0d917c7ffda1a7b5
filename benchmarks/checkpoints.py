"""Time and memory of a checkpoint: ``python -m benchmarks.checkpoints [--parameters M] [--ranks N] [--rounds R]``.

A model with its Adam state, replicated on every rank, is saved and loaded by

- ``lightning``: Lightning's own file, written by rank zero, as its ``ddp`` does;
- ``dcp``: torch's distributed checkpoint, written by all ranks;
- ``full``: this package's single file, complete or absent, flushed to disk, verified when it is loaded;
- ``sharded``: this package's folder, with the same guarantees, written by all ranks;
- ``sharded async``: the same in the background; ``save`` is the time for which training is blocked.

Candidates take turns in processes of their own. Peak memory is the largest rank's, beyond model and optimizer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CANDIDATES = ("lightning", "dcp", "full", "sharded", "sharded async")


def _model(million: float) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    width = 1024
    layers = max(1, round(million * 1e6 / width**2))
    module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.Adam(module.parameters())
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


class _Peak:
    """Peak anonymous memory of this process within a block, beyond its value at the start of the block, in MB."""

    def __enter__(self) -> _Peak:
        self.mb, self._begin, self._over = 0.0, _anonymous_mb(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.mb = max(self.mb, _anonymous_mb() - self._begin)


def _anonymous_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1e3
    return 0.0


def _steps(candidate: str, module: Any, optimizer: Any, path: str) -> tuple[Callable[[], Any], Callable[[], None]]:
    """Return a candidate's save and load functions; save returns a thread to join, or None."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from lightning.fabric.plugins import TorchCheckpointIO

    from lightning_pardist.checkpoint.coordination import GroupCoordinator, StoreCoordinator
    from lightning_pardist.checkpoint.folder import FolderReader, FolderSave
    from lightning_pardist.checkpoint.full_file import load_file, save_file, verify_file
    from lightning_pardist.checkpoint.manifest import verify_files
    from lightning_pardist.checkpoint.tensors import (
        FolderState,
        fill_module,
        fill_optimizer,
        full_slots,
        module_shards,
        optimizer_shards,
    )

    names = {param: name for name, param in module.named_parameters()}

    def whole() -> dict[str, Any]:
        return {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()]}

    def load_whole(state: dict[str, Any]) -> None:
        module.load_state_dict(state["state_dict"])
        optimizer.load_state_dict(state["optimizer_states"][0])

    def save_first(save: Callable[[Any, str], None]) -> None:
        if dist.get_rank() == 0:
            save(whole(), path)
        dist.barrier()

    def save_dcp() -> None:
        dcp.save(whole(), checkpoint_id=path)

    def save_sharded() -> Any:
        tensors, aliases, extra = module_shards(module.state_dict())
        boxes, rest = optimizer_shards(0, optimizer, full_slots(optimizer), names)
        save = FolderSave({**tensors, **boxes}, path, aliases=aliases)
        save.plan(GroupCoordinator())
        state = {"state_dict": extra, "optimizer_states": [rest]}
        if candidate == "sharded":
            save.write(GroupCoordinator(), state)
            return None
        save.stage()
        store = dist.distributed_c10d._get_default_store()
        exchange = StoreCoordinator(
            store, name=path, rank=dist.get_rank(), world_size=dist.get_world_size(), timeout_s=300
        )
        writer = threading.Thread(target=save.write, args=(exchange, state))
        writer.start()
        return writer

    def load_sharded() -> None:
        reader = FolderReader(path)
        verify_files(path, reader.manifest, share=dist.get_rank(), shares=dist.get_world_size())
        dist.barrier()
        state = reader.trainer_state()
        fill_module(module, FolderState(reader, state["state_dict"]))
        fill_optimizer(0, optimizer, full_slots(optimizer), state["optimizer_states"][0], reader)

    def load_full() -> None:
        if dist.get_rank() == 0:
            verify_file(path)
        dist.barrier()
        state = load_file(path)
        state["optimizer_states"] = torch.utils._pytree.tree_map_only(
            torch.Tensor, torch.clone, state["optimizer_states"]
        )
        load_whole(state)

    io = TorchCheckpointIO()
    if candidate == "lightning":
        return lambda: save_first(io.save_checkpoint), lambda: load_whole(io.load_checkpoint(path))
    if candidate == "dcp":
        return save_dcp, lambda: dcp.load(whole(), checkpoint_id=path)
    if candidate == "full":
        return lambda: save_first(save_file), load_full
    return save_sharded, load_sharded


def _rank(candidate: str, million: float, path: str) -> None:
    import lightning_pardist  # noqa: F401  # isort: skip
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module, optimizer = _model(million)
    save, load = _steps(candidate, module, optimizer, path)
    result: dict[str, float] = {}
    with _Peak() as peak:
        dist.barrier()
        begin = time.perf_counter()
        rest = save()
        result["save"] = time.perf_counter() - begin
        if rest is not None:
            rest.join()
        result["complete"] = time.perf_counter() - begin
    result["save MB"] = peak.mb
    with _Peak() as peak:
        dist.barrier()
        begin = time.perf_counter()
        load()
        dist.barrier()
        result["load"] = time.perf_counter() - begin
    result["load MB"] = peak.mb
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    if dist.get_rank() == 0:
        print(json.dumps({key: max(each[key] for each in results) for key in result}))
    dist.destroy_process_group()


def _measure(candidate: str, million: float, ranks: int, folder: str) -> dict[str, float]:
    path = os.path.join(folder, "checkpoint")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.checkpoints", "--rank", candidate, path, "--parameters", str(million)]
    setting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(command, env={**os.environ, **setting, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{candidate} failed: {outputs}")
    shutil.rmtree(path, ignore_errors=True)
    Path(path).unlink(missing_ok=True)
    found: dict[str, float] = json.loads(outputs[0].strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.checkpoints", description=__doc__)
    parser.add_argument("--parameters", type=float, default=32.0, help="of the model, in millions")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        _rank(options.rank[0], options.parameters, options.rank[1])
        return
    results: dict[str, list[dict[str, float]]] = {candidate: [] for candidate in CANDIDATES}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for _ in range(options.rounds):
            for candidate in CANDIDATES:
                results[candidate].append(_measure(candidate, options.parameters, options.ranks, folder))
    megabytes = options.parameters * 12
    print(f"{options.parameters:g} million parameters with Adam state, {megabytes:.0f} MB; {options.ranks} ranks,")
    load = os.getloadavg()[0]
    print(f"medians of {options.rounds} rounds, seconds and MB of the slowest or largest rank, load average {load:.1f}")
    columns = ("save", "complete", "save MB", "load", "load MB")
    print("".join([f"{'':14}", *(f"{column:>10}" for column in columns)]))
    for candidate, found in results.items():
        row = (statistics.median(each[column] for each in found) for column in columns)
        print("".join([f"{candidate:14}", *(f"{value:10.2f}" for value in row)]))


if __name__ == "__main__":
    main()
