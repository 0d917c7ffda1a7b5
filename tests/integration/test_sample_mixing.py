"""Strategies that split batches report layers that mix samples once, and the search has no side effects."""

import logging
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_pardist import DDPStrategy, FSDPStrategy, PipelineStrategy, TensorParallelStrategy, ZeroStrategy
from tests.helpers.models import Base, points
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, STEPS, Data, quiet_trainer

STRATEGIES = {
    "ddp": DDPStrategy,
    "zero2": lambda **kwargs: ZeroStrategy(zero_stage=2, **kwargs),
    "zero3": lambda **kwargs: FSDPStrategy(min_unit_size_mb=0, **kwargs),
    "pp": lambda **kwargs: PipelineStrategy(**({"pipeline_parallel_size": 2, "num_microbatches": 6} | kwargs)),
    "tp": TensorParallelStrategy,
}


class Capacity(nn.Module):
    """Expert with capacity for one row of a batch: the first that is routed to it."""

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


@pytest.mark.push("pp")
@pytest.mark.parametrize("strategies", [("ddp", "zero2", "zero3"), ("pp",)], ids="-".join)
def test_the_layer_is_named_once_and_the_search_changes_nothing(strategies):
    first, second = run_ranks(2, _all, strategies)
    for name in strategies:
        for found in (first[name], second[name]):
            said, silenced, (searched, no_alarm), (left, _) = found
            assert len(said) == (found is first[name]), name
            assert not said or said[0].startswith("net.1 (Capacity) gives another result for a sample")
            assert (silenced, no_alarm) == ([], [])
            assert all(torch.equal(searched[key], left[key]) for key in left)


class Normalized(Net):
    """Module with batch norms, one of which is frozen for the first batches."""

    def __init__(self, freeze=0):
        super().__init__(nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8, momentum=0.5)))
        self.net[2] = nn.Identity()
        self.freeze = freeze

    def on_train_batch_start(self, batch, batch_idx):
        self.net[1][1].train(batch_idx >= self.freeze)


def _normalize(strategy="auto", sync=False, freeze=0, **settings):
    torch.manual_seed(5)
    module = Normalized(freeze)
    strategy = STRATEGIES[strategy](**settings) if strategy in STRATEGIES else strategy
    devices = 1 if strategy == "auto" else 2
    trainer = quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False, sync_batchnorm=sync)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=Data(points(BATCH * STEPS)))
    said = [str(each.message) for each in said]
    return snapshot(module), [each for each in said if "atch norm" in each or "batch is one micro-batch" in each]


def _normalizing(strategy):
    ways = [{}, {"sync": True}, {"freeze": STEPS}, {"check_samples": False}, {"freeze": 1}]
    return [_normalize(strategy, **way) for way in ways]


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_batch_norms_of_each_rank_are_named(strategy):
    found, others = run_ranks(2, _normalizing, strategy)
    assert [said for _, said in others] == [[]] * 5
    (_, (said,)), (weights, *_), *_, (_, thawed) = found
    assert said.startswith("Batch norms (net.1.1) normalize each rank's samples separately")
    assert [said for _, said in found[1:4]] == [[]] * 3
    assert thawed == [said]
    assert_close(weights, _normalize()[0])


def _normalizing_in_stages():
    free = {"sync": True, "num_microbatches": None}
    ways = [{}, {"sync": True}, free, {"check_samples": False}, {"freeze": STEPS}, {"freeze": 1}]
    return [_normalize("pp", **way) for way in ways]


def test_batch_norms_of_a_pipeline_are_named_or_see_whole_batches():
    for rank, found in enumerate(run_ranks(2, _normalizing_in_stages)):
        said = [each for _, each in found]
        assert [len(each) for each in said] == ([1, 1, 1, 0, 0, 1] if rank == 0 else [0] * 6)
        if rank == 0:
            assert "Batch norms (net.1.1) normalize each micro-batch's samples separately" in said[0][0]
            assert "sync_batchnorm=True" in said[0][0]
            assert "num_microbatches" in said[1][0]
            assert "sync_batchnorm=True normalizes all samples of a batch" in said[2][0]
        assert_close(found[2][0], _normalize()[0])


class Said(logging.Handler):
    """Logging handler that records messages."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


class Augmented(Normalized):
    """Draws from a generator of its own before the step, which draws nothing."""

    def __init__(self):
        super().__init__()
        self.own = torch.Generator().manual_seed(3)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + 1e-3 * torch.randn(6, generator=self.own), *batch[1:]] if self.trainer.training else batch


def _drawing(strategy):
    """Return log messages about draws: with dropout, without, with repeated planning runs, and with draws in a hook."""
    found, logger = [], logging.getLogger("lightning.pytorch")
    for module in (Net(nn.Identity()), Normalized(), Net(nn.BatchNorm1d(8, affine=False)), Augmented()):
        said = Said()
        logger.addHandler(said)
        trainer = quiet_trainer(strategy=STRATEGIES[strategy](), devices=2, use_distributed_sampler=False)
        trainer.fit(module, datamodule=Data(points(BATCH * STEPS)))
        logger.removeHandler(said)
        found.append([each for each in said.messages if "random numbers" in each])
    return found


@pytest.mark.parametrize(
    ("strategy", "who"),
    [
        ("ddp", "training_step draws .* each rank for its own samples"),
        ("pp", "training_step draws .* each stage for each micro-batch"),
        ("tp", r"A step draws .* each tensor rank for its part of a tensor that is split \(dropout\)"),
    ],
)
def test_draws_are_told_of_once(strategy, who):
    (dropout, nothing, again, hook), others = run_ranks(2, _drawing, strategy)
    assert others == [[]] * 4
    assert nothing == []
    assert len(dropout) == len(again) == 1
    assert re.match(who, dropout[0]), dropout
    # Ranks with the same samples draw the same before a step.
    assert [each.split(" (")[0] for each in hook] == (
        ["What runs on a batch before training_step"] if strategy == "ddp" else []
    )
