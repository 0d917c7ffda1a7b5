"""The ZeRO paper's memory table (arXiv 1910.02054, table 1) from the real engines, on fake tensors.

One rank of N runs a real training step of a GPT in torch's ``FakeTensorMode`` and on its ``fake`` process group.
All storages are counted when they are allocated and freed: the bytes a rank holds after the optimizer step, and the
peak during the step. The batch is one short sequence, which makes model states dominate.
"""

from __future__ import annotations

import lightning_pardist  # noqa: F401  (before lightning)

# isort: split
import argparse
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from benchmarks import machine
from benchmarks.workloads import GPTLoss
from lightning_pardist.engines.fsdp import ShardedDataEngine, find_fsdp_units, shard
from lightning_pardist.engines.zero import ZeroEngine

#: 7.5 billion parameters.
SIZES = {"dim": 4096, "layers": 36, "heads": 32, "context": 1024, "vocab_size": 50257}
TINY = {"dim": 64, "layers": 4, "heads": 4, "context": 16, "vocab_size": 128}
WORLDS = (1, 4, 16, 64, 256, 1024)
#: GB per device at 7.5 billion parameters in mixed precision.
PAPER = {
    1: dict(zip(WORLDS, (120, 52.5, 35.6, 31.4, 30.4, 30.1), strict=True)),
    2: dict(zip(WORLDS, (120, 41.3, 21.6, 16.6, 15.4, 15.1), strict=True)),
    3: dict(zip(WORLDS, (120, 30, 7.5, 1.88, 0.47, 0.12), strict=True)),
}


@dataclass(frozen=True)
class Cell:
    """Bytes of one rank.

    Attributes:
        zero_stage: 1, 2 or 3.
        world_size: Number of ranks.
        mixed: bf16 parameters with fp32 masters, or fp32 throughout.
        psi: Number of parameters.
        held: Model states after the optimizer step, gradients included.
        peak: Peak during the step.
    """

    zero_stage: int
    world_size: int
    mixed: bool
    psi: int
    held: int
    peak: int

    @property
    def formula(self) -> float:
        """Bytes according to the paper's table for this number of parameters."""
        return self.psi * bytes_per_parameter(self.zero_stage, self.world_size, mixed=self.mixed)

    @property
    def expected(self) -> float:
        """Bytes that this package's engines are designed to hold."""
        return self.psi * bytes_per_parameter(self.zero_stage, self.world_size, mixed=self.mixed, ours=True)


def bytes_per_parameter(zero_stage: int, world_size: int, *, mixed: bool, ours: bool = False) -> float:
    """Return the bytes of parameters, gradients and Adam's state per parameter.

    Args:
        zero_stage: 1, 2 or 3.
        world_size: Number of ranks.
        mixed: See :class:`Cell`.
        ours: Whether to count this package's engines: between steps, mixed precision holds only gradient slices, in
            stage 1 as well, and in fp32 where the paper's are in half precision: accumulation loses no precision.
    """
    shares = {1: (4, 12), 2: (2, 14), 3: (0, 16)} if mixed else {1: (8, 8), 2: (4, 12), 3: (0, 16)}
    kept, split = (2, 16) if ours and mixed and zero_stage < 3 else shares[zero_stage]
    return kept + split / world_size


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts the bytes of all live storages created inside it.

    Attributes:
        now: Current bytes.
        peak: Peak since :meth:`restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __enter__(self) -> LiveBytes:
        # fully_shard frees and allocates by resizing.
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._note(storage)
            return result

        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", resize_)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def restart(self) -> None:
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # A DTensor's own storage has the global size and no memory; the wrapped tensor is counted itself.
            if isinstance(leaf, torch.Tensor) and not is_traceable_wrapper_subclass(leaf):
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
        self.now += storage.nbytes() - self._sizes.get(key, 0)
        self._sizes[key] = storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def measure(zero_stage: int, world_size: int, *, mixed: bool, sizes: dict[str, int], tokens: int = 8) -> Cell:
    """Measure one step of one rank.

    Args:
        zero_stage: 1, 2 or 3.
        world_size: Number of ranks of the fake process group.
        mixed: See :class:`Cell`.
        sizes: Sizes of :class:`~benchmarks.workloads.GPTLoss`.
        tokens: Length of the single sequence.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        mesh = init_device_mesh("cpu", (world_size,))
        with FakeTensorMode(), LiveBytes() as live:
            # Fake parameters cannot be converted: they are created in their training dtype.
            with _default_dtype(torch.bfloat16 if mixed and zero_stage < 3 else torch.float32):
                model = GPTLoss(**sizes)
            psi = sum(parameter.numel() for parameter in model.parameters())
            batch = torch.zeros(1, tokens, dtype=torch.long), torch.zeros(1, tokens, dtype=torch.long)
            if zero_stage == 3:
                policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
                handle = shard(
                    model, mesh, units=find_fsdp_units(model), mp_policy=policy, sync_values=False, check=False
                )
                optimizer = torch.optim.AdamW(model.parameters(), fused=True)
                # A trial run of the optimizer would need values.
                engine: Any = ShardedDataEngine(handle, [optimizer], accumulate="sharded", update_scope="elementwise")
                live.restart()
                loss = handle.run(model, *batch)
            else:
                optimizer = torch.optim.AdamW(model.parameters(), fused=True)
                engine = ZeroEngine(
                    model, [optimizer], group=dist.group.WORLD, zero_stage=zero_stage, update_scope="elementwise"
                )
                live.restart()
                loss = model(*batch)
            with engine.backward(loss):
                loss.backward()
            del loss
            optimizer.step()
            return Cell(zero_stage, world_size, mixed, psi, live.now, live.peak)
    finally:
        dist.destroy_process_group()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def table(cells: Sequence[Cell]) -> str:
    """Return a Markdown table of measured and published values."""
    lines = [
        "| stage | precision | ranks | paper, 7.5 B | its formula, GB | held, GB | off by | peak in a step, GB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cell in cells:
        paper = f"{PAPER[cell.zero_stage].get(cell.world_size, '')}" if cell.mixed else ""
        lines.append(
            f"| ZeRO-{cell.zero_stage} | {'mixed' if cell.mixed else 'fp32'} | {cell.world_size} | {paper}"
            f" | {cell.formula / 1e9:.3g} | {cell.held / 1e9:.3g} | {cell.held / cell.formula - 1:+.1%}"
            f" | {cell.peak / 1e9:.3g} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zero_table", description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=list(WORLDS), help="numbers of ranks")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3], choices=[1, 2, 3])
    parser.add_argument("--precisions", nargs="+", default=["mixed", "fp32"], choices=["mixed", "fp32"])
    parser.add_argument("--tiny", action="store_true", help="a model of test size")
    parser.add_argument("--output", default="logs/benchmarks", metavar="FOLDER")
    options = parser.parse_args(arguments)
    started, cells = datetime.now(timezone.utc), []
    for precision in options.precisions:
        for stage in options.stages:
            for world_size in options.worlds:
                begin = time.monotonic()
                sizes = TINY if options.tiny else SIZES
                cells.append(measure(stage, world_size, mixed=precision == "mixed", sizes=sizes))
                row = table(cells[-1:]).splitlines()[-1]
                print(f"{row} ({time.monotonic() - begin:.0f} s)", flush=True)
    text = table(cells)
    print(text)
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{started:%Y-%m-%d}-zero-table{'-tiny' if options.tiny else ''}.md"
    command = " ".join(["python -m benchmarks.zero_table", *(sys.argv[1:] if arguments is None else arguments)])
    title = f"# ZeRO's memory table, {cells[0].psi:,} parameters"
    file.write_text("\n\n".join([title, f"`{command}`", str(machine.describe()), text]) + "\n")
    print(f"Written: {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
