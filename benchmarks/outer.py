"""Local SGD and DiLoCo islands against ``pardist_ddp``: ``python -m benchmarks.outer --text input.txt --full``.

Without ``--full`` a small model trains for few steps with one seed.

Each way trains the GPT recipe's model on the same number of samples and then validates it on the last tenth of the
text, in a process of its own with four ranks by default. Bytes are those a rank has written to its sockets during
training, as counted by the system, next to the formula ``2 Psi (K-1)/K`` per synchronisation. Each line is printed as
soon as it is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning_pardist  # isort: skip
import lightning.pytorch as pl
from torch.utils.data import DataLoader

from benchmarks.machine import keep
from benchmarks.settings import given_settings
from recipes.gpt.data import Windows
from recipes.gpt.model import GPT

_DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9}
#: Name of a way -> arguments of ``LocalSGDStrategy``; None for ``pardist_ddp``.
WAYS: dict[str, dict[str, Any] | None] = {
    "ddp": None,
    "local-10": {"sync_every": 10},
    "local-50": {"sync_every": 50},
    "local-100": {"sync_every": 100},
    "diloco-10": {"sync_every": 10, **_DILOCO},
    "diloco-50": {"sync_every": 50, **_DILOCO},
    "diloco-100": {"sync_every": 100, **_DILOCO},
    "diloco-100-int4": {"sync_every": 100, **_DILOCO, "outer_compression": "int4"},
    "streaming-100-int4": {
        "sync_every": 100,
        **_DILOCO,
        "outer_compression": "int4",
        "fragments": 4,
        "fragment_sync_delay": 5,
        "fragment_mixing": 0.5,
    },
}
#: The recipe's settings.
_FULL = {"seeds": [0, 1, 2], "steps": 1000, "dim": 128, "layers": 4, "batch_size": 32}
_SMALL = {"seeds": [0], "steps": 200, "dim": 48, "layers": 2, "batch_size": 8}
_BITS = {None: 32, "bf16": 16, "int8": 8, "int4": 4}


class Sent(pl.Callback):
    """Bytes written by this process, and seconds, from the first step to the end of the last one."""

    def __init__(self) -> None:
        self.bytes = self.seconds = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the start."""
        self._bytes, self._start = _written(), time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Update the totals; the last step's exclude the synchronisation at the end of training."""
        self.bytes, self.seconds = _written() - self._bytes, time.perf_counter() - self._start


def _way(name: str) -> str:
    if name not in WAYS and not name.startswith("local@"):
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(WAYS)}, local@SETTING=JSON,...")
    return name


def _settings(way: str) -> dict[str, Any] | None:
    return WAYS[way] if way in WAYS else given_settings(way)


def _documentation() -> bytes:
    """Return the text of this project's documentation, which is always available."""
    pages = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    return b"".join(page.read_bytes() for page in pages)


def _written() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("wchar")).split()[1])


def run(options: argparse.Namespace, way: str, seed: int) -> None:
    """Train and validate one way, and print the result."""
    pl.seed_everything(seed, verbose=False)
    text = options.text.read_bytes() if options.text else _documentation()
    cut = len(text) * 9 // 10
    sizes = {"dim": options.dim, "layers": options.layers, "warmup_steps": options.steps // 10}
    module = GPT(**sizes, lr=options.lr, dropout=0.0, sample_tokens=0)
    settings = _settings(way)
    strategy = "pardist_ddp" if settings is None else lightning_pardist.LocalSGDStrategy(**settings)
    sent = Sent()
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=options.islands,
        max_steps=options.steps,
        gradient_clip_val=1.0,
        callbacks=[sent],
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Windows(text[:cut], 64), batch_size=options.batch_size, shuffle=True))
    trainer.limit_val_batches = 1.0
    found = trainer.validate(module, DataLoader(Windows(text[cut:], 64), batch_size=64), verbose=False)
    if trainer.is_global_zero:
        psi = sum(param.numel() for param in module.parameters())
        print("FOUND", json.dumps({"loss": found[0]["val_loss"], "bytes": sent.bytes, "s": sent.seconds, "psi": psi}))


def formula(options: argparse.Namespace, way: str, psi: int) -> float:
    """Return the bytes a rank sends for its outer synchronisations, or for the gradients of every step."""
    settings = _settings(way)
    once = 2 * psi * (options.islands - 1) / options.islands * 4
    if settings is None:
        return once * options.steps
    every, parts = settings["sync_every"], settings.get("fragments", 1)
    begins = [(index + 1) * every // parts for index in range(parts)]
    meetings = sum(max(0, (options.steps - first) // every + 1) for first in begins) / parts
    return once * meetings * _BITS[settings.get("outer_compression")] / 32


def main() -> None:
    """Run every way with every seed and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, help="the last tenth is for validation; by default the documentation")
    parser.add_argument("--full", action="store_true", help="1,000 steps and three seeds; else minutes on two cores")
    parser.add_argument("--output", type=Path, help="folder for the table")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), type=_way, help="or local@SETTING=JSON,...")
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--islands", type=int, default=4)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch-size", type=int, help="windows a rank and step")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate of each island")
    parser.add_argument("--dim", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name, value in (_FULL if options.full else _SMALL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.one:
        run(options, options.one[0], int(options.one[1]))
        return
    losses: dict[str, list[float]] = {}
    lines = ["| way | seed | validation loss | MB sent a rank | by the formula | s |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for seed in options.seeds:
        for way in options.ways:
            command = [sys.executable, "-m", "benchmarks.outer", *sys.argv[1:], "--one", way, str(seed)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            line = next((line for line in done.stdout.splitlines() if line.startswith("FOUND ")), None)
            if line is None:
                raise SystemExit(f"{way}, seed {seed}:\n{done.stdout}\n{done.stderr}")
            found = json.loads(line.removeprefix("FOUND "))
            losses.setdefault(way, []).append(found["loss"])
            wanted = formula(options, way, found["psi"])
            lines.append(
                f"| {way} | {seed} | {found['loss']:.4f} | {found['bytes'] / 1e6:.3f} | {wanted / 1e6:.3f} |"
                f" {found['s']:.1f} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    lines += ["", *(f"{way}: mean validation loss {statistics.mean(values):.4f}" for way, values in losses.items())]
    keep(options.output, f"outer-{options.islands}{'' if options.full else '-small'}", lines)


if __name__ == "__main__":
    main()
