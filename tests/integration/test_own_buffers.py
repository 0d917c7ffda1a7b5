"""Buffers whose shapes depend on a rank's batch, such as a mask that a forward keeps until the batch size changes."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from tests.helpers.models import Base
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer

BATCH = 8


class KeepsMask(Base):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.register_buffer("mask", None, persistent=False)
        self.size = -1

    def forward(self, x):
        if len(x) != self.size:
            self.mask = (torch.arange(6) >= 4).expand(len(x), 6).clone()
            self.size = len(x)
        return self.net(x).masked_fill(self.mask, -1e9).softmax(1)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val", F.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def fitted(name, devices, rows):
    """Return weights and the validation loss; ranks take every n-th sample, whatever their number."""
    torch.manual_seed(0)
    module, data = KeepsMask(), TensorDataset(torch.randn(rows, 6), torch.randn(rows, 6))
    trainer = quiet_trainer(strategy=name, devices=devices, max_epochs=2, use_distributed_sampler=False)
    place = trainer.strategy.distributed_sampler_kwargs if devices > 1 else {"rank": 0, "num_replicas": 1}
    train = DataLoader(Subset(data, range(place["rank"], rows, place["num_replicas"])), BATCH // place["num_replicas"])
    trainer.fit(module, train, DataLoader(data, BATCH))
    return snapshot(module), trainer.callback_metrics["val"]


def test_masks_for_each_ranks_batch():
    # 19: the last batches have 2 samples and 1; 17: one rank has a batch less.
    for rows in (19, 17):
        (alone,) = run_ranks(1, fitted, "auto", 1, rows)
        for name in ("pardist_ddp", "pardist_zero2", "pardist_zero3", "pardist_tp", "pardist_pp"):
            for found in run_ranks(2, fitted, name, 2, rows):
                assert_close(found[0], alone[0])
                torch.testing.assert_close(found[1], alone[1], rtol=1e-5, atol=0)
