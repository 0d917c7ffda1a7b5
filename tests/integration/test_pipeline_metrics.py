"""Metric values of a step whose samples are split into micro-batches."""

import warnings

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import PipelineStrategy
from tests.helpers.models import Base
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer

SAMPLES, FEATURES, CLASSES, STEPS = 8, 6, 3, 4


class Module(Base):
    def __init__(self, running):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 12), nn.Tanh(), nn.Linear(12, CLASSES))
        self.f1 = torchmetrics.F1Score("multiclass", num_classes=CLASSES, average="macro")
        both = {"auroc": torchmetrics.AUROC("multiclass", num_classes=CLASSES), "f1": self.f1.clone()}
        self.scores = torchmetrics.MetricCollection({**both, "recall": self.f1.clone()}, prefix="all_")
        self.last = torchmetrics.wrappers.Running(self.f1.clone(), window=3) if running else None
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.f1(logits, y)
        self.log("f1", self.f1, on_step=True, on_epoch=True)
        self.scores(logits, y)
        self.log_dict(self.scores, on_step=True, on_epoch=True)
        if self.last is not None:
            self.last(logits, y)
        return F.cross_entropy(logits, y)

    def on_train_batch_end(self, *args):
        self.seen.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})


def _fit(strategy, devices, running):
    torch.manual_seed(3)
    module = Module(running)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(STEPS * SAMPLES, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (len(x),), generator=generator)
    trainer = quiet_trainer(strategy=strategy, devices=devices, max_epochs=2, use_distributed_sampler=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=SAMPLES))
    return module.seen, [str(each.message) for each in caught if "pardist_mp" in str(each.message)]


@pytest.mark.parametrize("running", [False, True])
def test_values_of_a_step_are_those_of_its_batch(running):
    ((wanted, _),) = run_ranks(1, _fit, "auto", 1, running)
    strategy = PipelineStrategy(pipeline_parallel_size=2, num_microbatches=4)
    for rank, (found, said) in enumerate(run_ranks(2, _fit, strategy, 2, running)):
        assert [each.keys() for each in found] == [each.keys() for each in wanted]
        assert all(
            one[name] == pytest.approx(other[name], rel=1e-5)
            for one, other in zip(found, wanted, strict=True)
            for name in one
        )
        assert len(said) == int(running and rank == 0)
        assert (
            not said or "training_step gives samples to last, and updates with one micro-batch after another" in said[0]
        )
