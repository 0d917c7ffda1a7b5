"""A user's training script for clusters: the first argument is JSON with what the Trainer gets, and some wishes."""

import json
import os
import signal
import sys
import time

import lightning_pardist  # isort: skip
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Module(pl.LightningModule):
    def __init__(self, step_s: float, kill_at: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.step_s, self.kill_at = step_s, kill_at

    def training_step(self, batch, batch_idx):
        time.sleep(self.step_s)
        first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if self.kill_at and self.global_step == self.kill_at and first_start and self.trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98), "interval": "step"}]


class Data(pl.LightningDataModule):
    """The same global batches on any number of ranks."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(samples, 8, generator=generator)
        self.data = TensorDataset(inputs, torch.randint(0, 3, (samples,), generator=generator))

    def train_dataloader(self):
        kwargs = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        sampler = DistributedSampler(self.data, shuffle=False, **kwargs)
        return DataLoader(self.data, batch_size=12 // kwargs["num_replicas"], sampler=sampler)


def main() -> None:
    given = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    step_s, samples, kill_at = (given.pop(key, 0) for key in ("step_s", "samples", "kill_at"))
    checkpoints, settings = given.pop("checkpoint_every", 0), given.pop("ddp", None)
    if settings is not None:
        given["strategy"] = lightning_pardist.DDPStrategy(**settings)
    torch.manual_seed(3)
    module, data = Module(step_s, kill_at), Data(samples or 96)
    callbacks = [pl.callbacks.ModelCheckpoint(every_n_train_steps=checkpoints)] if checkpoints else []
    defaults = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": bool(checkpoints)}
    if given.get("devices") == "torchrun":
        given["devices"] = int(os.environ["LOCAL_WORLD_SIZE"])
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": False}
    trainer = pl.Trainer(**(defaults | quiet | given), callbacks=callbacks)
    trainer.fit(module, data)
    with torch.no_grad():
        whole = trainer.strategy.lightning_module_state_dict()
    total = sum(value.double().sum().item() for value in whole.values()) if trainer.is_global_zero else 0.0
    # One write, so that ranks do not print into each other's lines.
    sys.stdout.write(
        f"done rank {trainer.global_rank} of {trainer.world_size} on node {trainer.node_rank} steps"
        f" {trainer.global_step} {type(trainer.strategy.cluster_environment).__name__} {total:.9f}\n"
    )


if __name__ == "__main__":
    main()
