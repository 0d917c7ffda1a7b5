"""Training script for clusters: the first argument is JSON with Trainer arguments and additional settings.

``strategy`` may be a list whose members train one after another; ``settings`` are arguments of the strategy;
``step_s`` and ``samples`` set the duration; ``batch_size`` is per rank, by default a share of 12; ``global_batch_size``
is maintained by accumulation; ``checkpoint_every`` is in steps; rank ``fault_rank`` triggers its ``fault`` at step
``fault_at``, but only in the first start of the job.
"""

import json
import os
import signal
import sys
import time

import lightning_pardist  # isort: skip
import lightning.pytorch as pl
import psutil
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_pardist.registry import TABLE


class Module(pl.LightningModule):
    def __init__(self, step_s: float = 0.0, fault: str = "", fault_at: int = 0, fault_rank: int = 1) -> None:
        super().__init__()
        hidden = [layer for _ in range(2) for layer in (nn.Linear(16, 16), nn.ReLU())]
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), *hidden, nn.Linear(16, 3))
        self.step_s, self.fault, self.fault_at, self.fault_rank = step_s, fault, fault_at, fault_rank

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_start(self, batch, batch_idx):
        time.sleep(self.step_s)
        first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        here = self.global_step == self.fault_at and self.trainer.global_rank == self.fault_rank
        if self.fault and here and first_start:
            print(f"fault at {time.time()}", flush=True)
            if self.fault == "raise":
                raise ValueError("the user's own mistake")
            if self.fault == "barrier":
                torch.distributed.barrier()
            if self.fault == "sleep":
                time.sleep(600)
            os.kill(os.getpid(), getattr(signal, self.fault))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98), "interval": "step"}]


class Data(pl.LightningDataModule):
    """Same global batches on any number of ranks, unless the batch size of a rank is given."""

    def __init__(self, samples: int = 96, batch_size: int | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(samples, 8, generator=generator)
        self.data = TensorDataset(inputs, torch.randint(0, 3, (samples,), generator=generator))
        self.batch_size = batch_size

    def train_dataloader(self):
        kwargs = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        sampler = DistributedSampler(self.data, shuffle=False, **kwargs)
        return DataLoader(self.data, batch_size=self.batch_size or 12 // kwargs["num_replicas"], sampler=sampler)


def main() -> None:
    given = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    names = given.pop("strategy", "auto")
    for name in [names] if isinstance(names, str) else names:
        train(name, **given)


def train(name, settings=None, checkpoint_every=0, samples=96, batch_size=None, global_batch_size=None, **given):
    wishes = {key: given.pop(key) for key in ("step_s", "fault", "fault_at", "fault_rank") if key in given}
    torch.manual_seed(3)
    module, data = Module(**wishes), Data(samples, batch_size)
    callbacks = [pl.callbacks.ModelCheckpoint(every_n_train_steps=checkpoint_every)] if checkpoint_every else []
    if global_batch_size is not None:
        callbacks.append(lightning_pardist.GlobalBatchSize(global_batch_size))
    if settings is not None:
        entry = next(entry for entry in TABLE if entry.name == name)
        given["strategy"] = entry.make(**entry.preset | settings)
    elif name != "auto":
        given["strategy"] = name
    defaults = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": bool(checkpoint_every)}
    if given.get("devices") == "torchrun":
        given["devices"] = int(os.environ["LOCAL_WORLD_SIZE"])
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": False}
    trainer = pl.Trainer(**(defaults | quiet | given), callbacks=callbacks)
    trainer.fit(module, data)
    with torch.no_grad():
        whole = trainer.strategy.lightning_module_state_dict()
    total = sum(value.double().sum().item() for value in whole.values()) if trainer.is_global_zero else 0.0
    sockets = [one.laddr.ip for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN]
    if beyond := {address for address in sockets if not address.startswith(("127.", "::1", "::ffff:127."))}:
        sys.stdout.write(f"listens at {sorted(beyond)}\n")
    environment = type(getattr(trainer.strategy, "cluster_environment", None)).__name__
    # A single write, to avoid interleaving with other ranks' output.
    sys.stdout.write(
        f"done {name} rank {trainer.global_rank} of {trainer.world_size} on node {trainer.node_rank} steps"
        f" {trainer.global_step} {environment} {total:.9f}\n"
    )


if __name__ == "__main__":
    main()
