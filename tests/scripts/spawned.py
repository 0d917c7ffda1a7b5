"""Script whose ranks are started by spawn or fork: ``python spawned.py STRATEGY WHAT FOLDER``."""

import os
import signal
import sys
import time

import lightning_pardist  # noqa: F401  # isort: skip
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)
        self.functions = self.stops = False

    def training_step(self, batch, batch_idx):
        if self.stops:
            time.sleep(0.1)
            if self.trainer.global_step == 2 and self.global_rank == 1:
                # Like a scheduler, which signals only the process it has started.
                os.kill(os.getppid(), signal.SIGTERM)
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def predict_step(self, batch, batch_idx):
        return (lambda: 0) if self.functions else self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


def main() -> None:
    strategy, what, folder = sys.argv[1:]
    pl.seed_everything(0)
    data = TensorDataset(torch.randn(32, 8), torch.randint(0, 3, (32,)))
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=2,
        max_epochs=10 if what == "stop" else 1,
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    if what == "lambda":
        module.activation = lambda x: x
    module.stops = what == "stop"
    loader = DataLoader(data, batch_size=4)
    trainer.fit(module, loader)
    if what == "save":
        torch.save(trainer.model, f"{folder}/model.pt")
        torch.save(trainer, f"{folder}/trainer.pt")
        # Like Lightning's own tests in the launching process.
        checkpoint = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
        trainer.optimizers = [module.configure_optimizers()]
        trainer.strategy.load_model_state_dict(checkpoint)
        trainer.strategy.load_optimizer_state_dict(checkpoint)
        print("state", len(trainer.optimizers[0].state))
    if what.startswith("predict"):
        module.functions = what == "predict functions"
        outputs = trainer.predict(module, loader)
        print("predicted", outputs if outputs is None else f"{sum(map(len, outputs))} samples")


if __name__ == "__main__":
    main()
