"""Time and memory of a planner search: a small model on 16 ranks, and 7.5 billion parameters on 1,024."""

from __future__ import annotations

import time

_BEGIN = time.perf_counter(), time.process_time()

import lightning_pardist  # noqa: E402  (before lightning)

# isort: split
import argparse  # noqa: E402
import resource  # noqa: E402
import sys  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from typing import Any  # noqa: E402

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402

from benchmarks.workloads import GPTLoss  # noqa: E402

#: Width, layers, heads, context, vocabulary; samples per rank; devices per node, nodes.
CASES: dict[str, tuple[tuple[int, int, int, int, int], int, tuple[int, int]]] = {
    "small": ((192, 4, 4, 128, 4096), 8, (8, 2)),
    "7.5B": ((4096, 36, 32, 2048, 51200), 1, (8, 128)),
}


class _Model(pl.LightningModule):
    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        dim, layers, heads, context, vocab = sizes
        self.net = GPTLoss(dim=dim, layers=layers, heads=heads, context=context, vocab_size=vocab)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(*batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a search and print its time and memory; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_speed", description=__doc__)
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("--device", default="h100")
    parser.add_argument("--strategies", nargs="+")
    options = parser.parse_args(arguments)
    sizes, samples, (devices, num_nodes) = CASES[options.case]
    imported = time.perf_counter() - _BEGIN[0], time.process_time() - _BEGIN[1]
    with torch.device("meta"):
        model = _Model(sizes)
    tokens = torch.randint(sizes[-1], (samples, sizes[3] + 1))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    begin = time.perf_counter(), time.process_time()
    found = lightning_pardist.plan(
        model,
        batch,
        devices=devices,
        num_nodes=num_nodes,
        device=options.device,
        strategies=options.strategies,
        precision="bf16-mixed",
    )
    took = time.perf_counter() - begin[0], time.process_time() - begin[1]
    print(found)
    count = sum(param.numel() for param in model.parameters())
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"\n{count / 1e9:.2f} billion parameters on {devices * num_nodes} ranks: {len(found.rows)} planned,"
        f" {len(found.refused)} not, in {took[0]:.1f} s ({took[1]:.1f} s of processor time), {most:.2f} GB resident at"
        f" most; imports {imported[0]:.1f} s ({imported[1]:.1f} s) before."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
