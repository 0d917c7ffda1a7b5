"""Buffers that change with the weights, not with samples, under pipelines: once per step, as on one process."""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from tests.helpers.checkpoints import STRATEGIES
from tests.helpers.models import points
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, Data, global_losses, quiet_trainer


class Averaged(nn.Module):
    """Multiplies by a moving average of its weights, and counts steps and samples."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))
        self.register_buffer("average", torch.zeros(8, 8))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.steps += 1
                self.average = torch.lerp(self.average, self.weight, 0.5 / self.steps)
        return x @ self.weight + x @ self.average


class Normed(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(6, 8)),
            nn.Tanh(),
            Averaged(),
            nn.Tanh(),
            spectral_norm(nn.Linear(8, 8)),
            nn.Tanh(),
            nn.Linear(8, 1),
        )
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(name, world):
    torch.manual_seed(3)
    module = Normed()
    trainer = quiet_trainer(
        strategy=STRATEGIES[name]() if world > 1 else "auto", devices=world, use_distributed_sampler=False
    )
    trainer.fit(module, datamodule=Data(points(BATCH * 5)))
    return {"losses": global_losses(module.losses, world)} | snapshot(module)


@pytest.mark.parametrize("name", ["pp", "pp_interleaved", "mp"])
def test_they_change_once_a_step(name):
    want = _fit("one", 1)
    for got in run_ranks(2, _fit, name, 2):
        assert_close(got, want)
