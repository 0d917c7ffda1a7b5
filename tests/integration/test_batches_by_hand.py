"""Steps that take batches from ``dataloader_iter`` by themselves."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.helpers.models import Base
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer

BATCH, STEPS = 8, 3


class TakesBatches(Base):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    def training_step(self, dataloader_iter):
        (x, y), _, _ = next(dataloader_iter)
        return F.mse_loss(self.net(x), y)

    def validation_step(self, dataloader_iter):
        (x, y), _, _ = next(dataloader_iter)
        self.log("val", F.mse_loss(self.net(x), y), batch_size=len(x))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def fitted(name, devices):
    torch.manual_seed(0)
    module, data = TakesBatches(), TensorDataset(torch.randn(BATCH * STEPS, 6), torch.randn(BATCH * STEPS, 2))
    trainer = quiet_trainer(strategy=name, devices=devices, max_epochs=1, use_distributed_sampler=False)
    place = trainer.strategy.distributed_sampler_kwargs if devices > 1 else {"rank": 0, "num_replicas": 1}
    sampler = DistributedSampler(data, shuffle=False, **place)
    loader = DataLoader(data, BATCH // place["num_replicas"], sampler=sampler)
    trainer.fit(module, loader, loader)
    return snapshot(module), trainer.callback_metrics["val"]


@pytest.mark.parametrize("name", ["pardist_ddp", "pardist_zero2", "pardist_zero3"])
def test_data_parallel_ranks_take_their_own_batches(name):
    (alone,) = run_ranks(1, fitted, "auto", 1)
    for found in run_ranks(2, fitted, name, 2):
        assert_close(found[0], alone[0])
        torch.testing.assert_close(found[1], alone[1], rtol=1e-5, atol=0)
