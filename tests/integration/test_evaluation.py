"""Validate, test and predict: one process' metrics for every size of dataset, and no rank left waiting."""

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.parity import assert_close
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer

SIZES = range(1, 10)
BATCH_SIZES = range(1, 5)


def _dataset(length, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(length, 3, generator=generator), torch.randint(0, 2, (length,), generator=generator)
    )


class Measures(pl.LightningModule):
    """Logs in every way that makes sense on one process."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.accuracy = torchmetrics.classification.BinaryAccuracy()
        self.auroc = torchmetrics.classification.BinaryAUROC()
        self.mean = torchmetrics.MeanMetric()
        self.collection = torchmetrics.MetricCollection({"mae": torchmetrics.MeanAbsoluteError()})

    def measure(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        score = self.layer(x)[:, 0]
        loss = (score - y).square()
        self.log("loss", loss.mean(), prog_bar=True)
        self.log("synced", loss.mean(), sync_dist=True)
        self.log("total", loss.sum(), reduce_fx="sum")
        self.log("total_synced", loss.sum(), reduce_fx="sum", sync_dist=True)
        self.log("max", loss.max(), reduce_fx="max")
        self.log("min", loss.min(), reduce_fx=torch.min, sync_dist=True)
        self.log("both", loss.mean(), on_step=True, on_epoch=True, sync_dist=True)
        self.accuracy(score.sigmoid(), y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.auroc(score.sigmoid(), y)
        self.log("auroc", self.auroc)
        self.mean.update(loss)
        self.collection(score, y.float())
        self.log_dict(self.collection)

    def end(self):
        self.log("late", self.mean.compute())
        self.mean.reset()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.measure(batch, batch_idx, dataloader_idx)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.measure(batch, batch_idx, dataloader_idx)

    def on_validation_epoch_end(self):
        self.end()

    def on_test_epoch_end(self):
        self.end()

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self.layer(batch[0])


def _tensors(logged):
    return [{key: torch.as_tensor(value) for key, value in part.items()} for part in logged]


def _sweep(strategy="pardist_ddp", devices=None, sizes=tuple(SIZES), batch_sizes=tuple(BATCH_SIZES)):
    devices = devices or dist.get_world_size()
    results = {}
    trainer = quiet_trainer(strategy=strategy, devices=devices)
    torch.manual_seed(1)
    module = Measures()
    for size in sizes:
        for batch_size in batch_sizes:
            logged = trainer.validate(module, DataLoader(_dataset(size), batch_size=batch_size), verbose=False)
            results[size, batch_size] = _tensors(logged)[0]
    return results


def _same(got, want, skip=()):
    assert got.keys() == want.keys()
    for key, expected in want.items():
        wanted = {name: value for name, value in expected.items() if name not in skip}
        assert_close({name: value for name, value in got[key].items() if name not in skip}, wanted)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_metrics_of_every_size(ranks):
    want = _sweep("auto", 1)
    for got in run_ranks(ranks, _sweep):
        _same(got, want)
