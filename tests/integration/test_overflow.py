"""16-mixed: one scale and one overflow decision, whichever rank's part of the gradients overflowed."""

import functools

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import TensorDataset

from lightning_pardist import FSDPStrategy
from tests.helpers.models import Base
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, Data, quiet_trainer

STRATEGIES = {
    "ddp": "pardist_ddp",
    "zero1": "pardist_zero1",
    "zero2": "pardist_zero2",
    "zero2_offload": "pardist_zero2_offload",
    "zero3": functools.partial(FSDPStrategy, min_unit_size_mb=0),
}


class Overflows(Base):
    """The last element's gradient overflows in the second batch, on the rank that holds it. One parameter is unused."""

    def __init__(self, fused=False):
        super().__init__()
        self.low, self.high = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(9))
        self.tiny = nn.Parameter(torch.ones(1))
        self.fused = fused
        self.scales = []

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = (self.low * x).pow(2).mean() + (self.high.sum() * x).pow(2).mean() + self.tiny.sum()
        if batch_idx == 1:
            loss = loss + self.high[-1] * 1e36
        return loss

    def on_train_batch_end(self, *args):
        self.scales.append(self.trainer.strategy.precision_plugin.scaler.get_scale())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1, eps=1e-3, fused=self.fused)


class NoLossOnFirst(Overflows):
    """The first rank has no loss in the first batch, where one process uses half of the samples."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 0:
            if self.trainer.world_size == 1:
                return super().training_step([batch[0][1::2]], batch_idx) / 2
            return None if self.global_rank == 0 else loss
        return loss


def _train(kind, strategy, devices, **kwargs):
    torch.manual_seed(11)
    module = kind(**kwargs)
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    trainer = quiet_trainer(
        strategy=strategy() if callable(strategy) else strategy,
        devices=devices,
        use_distributed_sampler=False,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
    )
    data = torch.randn(BATCH * 5, 8, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, datamodule=Data(TensorDataset(data)))
    assert "_unscale_grads_" not in scaler.__dict__
    return snapshot(module), module.scales


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_skip_the_same_step(strategy):
    cases = [(Overflows, {}), (Overflows, {"fused": True})]
    if strategy != "zero3":
        cases.append((NoLossOnFirst, {}))
    for kind, kwargs in cases:
        weights, scales = _train(kind, "auto", 1, **kwargs)
        assert scales == [65536.0, 32768.0, 32768.0, 65536.0, 65536.0]
        train = functools.partial(_train, **kwargs)
        for got, got_scales in run_ranks(2, train, kind, STRATEGIES[strategy], 2):
            assert got_scales == scales
            assert_close(got, weights)
