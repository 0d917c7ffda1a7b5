"""Run one island that resumes where it stopped: ``python island.py SERVER ISLAND ISLANDS FOLDER STEPS``."""

import sys
import time
from pathlib import Path

import lightning_pardist  # isort: skip
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

#: Seconds per step, for kills to hit during training.
_STEP_S = 0.02


def dataset(seed: int = 0) -> TensorDataset:
    """Return samples of classes that a small network can learn."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(8192, 16, generator=draw)
    return TensorDataset(x, (x[:, :4].sum(1) > 0).long() + 2 * (x[:, 4:8].prod(1) > 0).long())


class Module(pl.LightningModule):
    """Classifier that sleeps in every step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))

    def training_step(self, batch, batch_idx):
        time.sleep(_STEP_S)
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    """Train up to the given number of steps."""
    server, island, islands, folder, steps = sys.argv[1:]
    strategy = lightning_pardist.LocalSGDStrategy(
        outer_server=server, island=int(island), outer_parallel_size=int(islands), sync_every=10, resume="always"
    )
    module = Module()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=int(steps),
        max_epochs=-1,
        logger=False,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(every_n_train_steps=10, save_last=True, save_top_k=0)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(dataset(), batch_size=16, shuffle=True))
    torch.save(module.state_dict(), Path(folder) / "weights.pt")
    print(f"island {island} ends after step {trainer.global_step}")


if __name__ == "__main__":
    main()
