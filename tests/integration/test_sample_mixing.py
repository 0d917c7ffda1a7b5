"""A layer that mixes samples is named once by strategies that take batches apart, and the search changes nothing."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_pardist import DDPStrategy, FSDPStrategy, PipelineStrategy, ZeroStrategy
from tests.helpers.models import Base, points
from tests.helpers.parity import snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, STEPS, Data, quiet_trainer

STRATEGIES = {
    "ddp": DDPStrategy,
    "zero2": lambda **kwargs: ZeroStrategy(zero_stage=2, **kwargs),
    "zero3": lambda **kwargs: FSDPStrategy(min_unit_size_mb=0, **kwargs),
    "pp": lambda **kwargs: PipelineStrategy(pipeline_parallel_size=2, num_microbatches=6, **kwargs),
}


class Capacity(nn.Module):
    """Takes one row of a batch, the first that wants it."""

    def __init__(self):
        super().__init__()
        self.expert = nn.Linear(8, 8)

    def forward(self, x):
        wants = x > 0
        return x + self.expert(x) * (wants & (wants.cumsum(0) <= 1))


class Net(Base):
    def __init__(self, middle):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), middle, nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.note(F.mse_loss(self.net(x), y))


def _fit(strategy, mixes, check):
    torch.manual_seed(5)
    module = Net(Capacity() if mixes else nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=0.5)))
    trainer = quiet_trainer(
        strategy=STRATEGIES[strategy](check_samples=check), devices=2, use_distributed_sampler=False
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=Data(points(BATCH * STEPS)))
    return snapshot(module), [str(each.message) for each in said if "other samples in the batch" in str(each.message)]


def _all(strategies):
    return {
        name: (_fit(name, True, True)[1], _fit(name, True, False)[1], _fit(name, False, True), _fit(name, False, False))
        for name in strategies
    }


@pytest.mark.parametrize("strategies", [("ddp", "zero2", "zero3"), ("pp",)], ids="-".join)
def test_the_layer_is_named_once_and_the_search_changes_nothing(strategies):
    first, second = run_ranks(2, _all, strategies)
    for name in strategies:
        for found in (first[name], second[name]):
            said, silenced, (searched, no_alarm), (left, _) = found
            assert len(said) == (found is first[name]), name
            assert not said or said[0].startswith("net.1 (Capacity) makes something else of a sample")
            assert (silenced, no_alarm) == ([], [])
            assert all(torch.equal(searched[key], left[key]) for key in left)
