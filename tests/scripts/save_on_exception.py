"""Script that saves on exception: ``python save_on_exception.py STRATEGY RANK EXCEPTION FOLDER``; RANK may be all."""

import builtins
import sys

import lightning_pardist  # noqa: F401  # isort: skip
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STRATEGY, RANK, EXCEPTION, FOLDER = sys.argv[1:]


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if self.trainer.global_step == 2 and RANK in ("all", str(self.global_rank)):
            if EXCEPTION == "SystemExit":
                sys.exit()
            raise getattr(builtins, EXCEPTION)("enough")
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


def main() -> None:
    pl.seed_everything(0)
    data = TensorDataset(torch.randn(32, 8), torch.randint(0, 3, (32,)))
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=STRATEGY,
        devices=2,
        max_epochs=1,
        logger=False,
        callbacks=[OnExceptionCheckpoint(FOLDER)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(data, batch_size=4))


if __name__ == "__main__":
    main()
