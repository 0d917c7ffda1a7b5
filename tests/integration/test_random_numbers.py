"""A run draws what one process draws: the order of samples, data made in hooks, weights made in configure_model."""

import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer


class DrawsInHooks(pl.LightningModule):
    """Part of the weights before the run, the rest and the data in it, samples in an order that is drawn."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = None

    def configure_model(self):
        if self.head is None:
            self.head = nn.Linear(8, 2)

    def setup(self, stage):
        self.data = TensorDataset(torch.randn(24, 6), torch.as_tensor(np.random.randn(24, 2), dtype=torch.float32))

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=4, shuffle=True)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.head(self.body(x)), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _run(strategy, devices, draws_more):
    seed_everything(5, verbose=False)
    module = DrawsInHooks()
    trainer = quiet_trainer(strategy=strategy, devices=devices, max_epochs=2)
    if draws_more and trainer.global_rank:
        torch.rand(3), np.random.rand(3), random.random()
    trainer.fit(module)
    return snapshot(module)


@pytest.mark.parametrize("strategy", ["pardist_tp", "pardist_pp"])
@pytest.mark.parametrize("draws_more", [False, True], ids=["alike", "one_rank_draws_more"])
def test_what_was_drawn_since_the_seed_is_not_drawn_again(strategy, draws_more):
    for found in run_ranks(2, _run, strategy, 2, draws_more):
        assert_close(found, _run("auto", 1, False))


class Augmented(TensorDataset):
    """Draws from a generator that every rank has of its own."""

    def __init__(self, seed):
        super().__init__(torch.ones(8, 6), torch.zeros(8, 2))
        self.own = np.random.default_rng(seed)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * float(self.own.normal()), y


class Given(DrawsInHooks):
    """Draws nothing, and is given its data."""

    def __init__(self, seed):
        super().__init__()
        self.data = Augmented(seed)

    def setup(self, stage):
        pass

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=4)


def _augmented(strategy, devices):
    seed_everything(5, verbose=False)
    trainer = quiet_trainer(strategy=strategy, devices=devices)
    module = Given(trainer.global_rank)
    trainer.fit(module)
    return snapshot(module)


@pytest.mark.parametrize("strategy", ["pardist_tp", "pardist_pp"])
def test_of_different_batches_the_first_ranks_are_used(strategy):
    for found in run_ranks(2, _augmented, strategy, 2):
        assert_close(found, _augmented("auto", 1))
