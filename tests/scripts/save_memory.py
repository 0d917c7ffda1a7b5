"""Measure each rank's memory for saving a full checkpoint: ``save_memory.py STRATEGY WORLD FOLDER``, started once.

Every rank prints ``rank R share S peak P``: MB of model and optimizer state that it holds, and the peak MB beyond
that while the checkpoint was assembled and written. Needs fresh processes: memory freed earlier would be reused and
hide the peak.
"""

import sys
import threading

import lightning_pardist  # noqa: F401  # isort: skip
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import FSDPStrategy, HybridStrategy, PipelineStrategy, TensorParallelStrategy, ZeroStrategy

WIDTH, LAYERS = 1024, 8
STRATEGIES = {
    "zero2": ZeroStrategy,
    "zero3": FSDPStrategy,
    "tp": TensorParallelStrategy,
    "pp": PipelineStrategy,
    "pp_zero1": lambda **kwargs: PipelineStrategy(pipeline_parallel_size=2, data_parallel="zero1", **kwargs),
    "pp_zero3": lambda **kwargs: PipelineStrategy(pipeline_parallel_size=2, data_parallel="zero3", **kwargs),
    "tp_zero3": lambda **kwargs: TensorParallelStrategy(tensor_parallel_size=2, data_parallel="zero3", **kwargs),
    "3d": lambda **kwargs: HybridStrategy(pipeline_parallel_size=2, tensor_parallel_size=2, **kwargs),
}


class Wide(pl.LightningModule):
    """Model with matrices of 4 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def _anonymous_mb() -> float:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1e3


class Measure(pl.Callback):
    """Callback that saves a checkpoint after training and measures the peak memory."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer, pl_module) -> None:
        held = trainer.strategy.held()
        trainer.strategy.barrier()
        over, peak, before = threading.Event(), [0.0], _anonymous_mb()

        def watch() -> None:
            while not over.wait(0.001):
                peak[0] = max(peak[0], _anonymous_mb() - before)

        watcher = threading.Thread(target=watch)
        watcher.start()
        trainer.save_checkpoint(self.path)
        over.set()
        watcher.join()
        share = (held.parameters + held.optimizer) / 1e6
        print(f"rank {trainer.global_rank} share {share:.1f} peak {peak[0]:.1f}", flush=True)


def main() -> None:
    name, world, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.manual_seed(0)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=STRATEGIES[name](keep_freed_memory=False),
        callbacks=[Measure(f"{folder}/a.ckpt")],
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(torch.randn(32, WIDTH)), batch_size=8 // trainer.strategy.dims.data_parallel)
    trainer.fit(Wide(), loader)


if __name__ == "__main__":
    main()
