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


class SumOf(torchmetrics.Metric):
    """Mean over samples of a sum that the step passes by name, as in scvi-tools."""

    full_state_update = False

    def __init__(self, name):
        super().__init__()
        self.name = name
        for state in ("total", "number"):
            self.add_state(state, default=torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, **sums):
        self.total += sums[self.name]
        self.number += sums["number"]

    def compute(self):
        return self.total / self.number


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


class Evaluated(Base):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 12), nn.Tanh(), nn.Linear(12, CLASSES))
        self.squares, self.sizes = SumOf("squares"), SumOf("sizes")
        self.both = self.squares + self.sizes

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        sums = {"squares": logits.square().sum(), "sizes": logits.abs().sum()}
        self.both.update(number=len(logits), **sums)
        self.log_dict({"squares": self.squares, "sizes": self.sizes, "both": self.both}, on_epoch=True)


def _evaluate(strategy, devices):
    torch.manual_seed(3)
    module, x = Evaluated(), torch.randn(27, FEATURES, generator=torch.Generator().manual_seed(5))
    loader = DataLoader(TensorDataset(x, torch.arange(27) % CLASSES), batch_size=SAMPLES)
    trainer = quiet_trainer(strategy=strategy, devices=devices, max_epochs=1, limit_val_batches=None)
    trainer.fit(module, loader, loader)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_metrics_that_contain_others():
    (wanted,) = run_ranks(1, _evaluate, "auto", 1)
    for found in run_ranks(2, _evaluate, "pardist_pp", 2):
        assert found == pytest.approx(wanted, rel=1e-5)
