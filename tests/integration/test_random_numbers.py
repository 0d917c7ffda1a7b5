"""A run draws the same random numbers as one process: sample order, data made in hooks, weights in configure_model."""

import os
import random
import warnings

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import seed_everything
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_pardist.axes.first_batch import broadcast_batch
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer


class DrawsInHooks(pl.LightningModule):
    """Part of the weights is drawn before the run, the rest and the data in it; samples are shuffled."""

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
    """Draws from a generator that every rank has for itself."""

    def __init__(self, seed):
        super().__init__(torch.ones(8, 6), torch.zeros(8, 2))
        self.own = np.random.default_rng(seed)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * float(self.own.normal()), y


class Given(DrawsInHooks):
    """Draws nothing, and gets its data from outside."""

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


def _of_first_rank(item):
    rank = torch.distributed.get_rank()
    batch = {"x": torch.full((2,), float(rank)), "said": [rank, item]}
    try:
        group = torch.distributed.group.WORLD
        return broadcast_batch((batch, 0), group=group, device=torch.device("meta"))
    except TypeError as error:
        return str(error)


def test_tensors_that_the_first_rank_has_on_the_host_stay_there():
    for batch, index in run_ranks(2, _of_first_rank, None):
        assert batch["x"].device.type == "cpu"
        assert batch["x"].tolist() == [0, 0]
        assert (batch["said"], index) == ([0, None], 0)


def test_what_cannot_be_sent_is_named_on_all_ranks():
    said = run_ranks(2, _of_first_rank, Unsent())
    assert said[0] == said[1]
    assert "the first rank's cannot be sent to the others: said.1 (Unsent): Not by post.. Leave it out" in said[0]


class Unsent:
    """Object that is created on each rank and cannot be pickled."""

    def __init__(self, stays=False):
        self.stays = stays

    def __reduce__(self):
        if self.stays:
            raise TypeError("Not by post.")
        return Unsent, (True,)


class AugmentsInWorker(TensorDataset):
    """Draws in the loader's worker process."""

    def __init__(self):
        super().__init__(torch.ones(16, 6), torch.zeros(16, 2))

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * torch.rand(6) + float(np.random.rand()) + random.random(), y


class StreamsInWorker(IterableDataset):
    """The same as a stream without indices."""

    def __iter__(self):
        data = AugmentsInWorker()
        return (data[index] for index in range(len(data)))


def _augmented_in_worker(strategy, devices, data, init):
    os.environ["PL_SEED_WORKERS"] = "0"
    seed_everything(5, workers=init is None, verbose=False)
    module = Given(0)
    trainer = quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        context = torch.multiprocessing.get_context("fork")
        workers = {"num_workers": 1, "worker_init_fn": init, "multiprocessing_context": context}
        trainer.fit(module, DataLoader(data, batch_size=4, **workers))
    os.environ.pop("PL_SEED_WORKERS", None)
    return snapshot(module), [str(each.message) for each in caught if "different batches" in str(each.message)]


@pytest.mark.parametrize("init", [None, pl_worker_init_function], ids=["of_the_trainer", "of_the_user"])
@pytest.mark.parametrize("data", [AugmentsInWorker(), StreamsInWorker()], ids=["indices", "stream"])
@pytest.mark.parametrize("strategy", ["pardist_tp", "pardist_pp"])
def test_workers_of_ranks_with_the_same_samples_draw_alike(strategy, data, init):
    want, _ = _augmented_in_worker("auto", 1, data, init)
    for found, warned in run_ranks(2, _augmented_in_worker, strategy, 2, data, init):
        assert_close(found, want)
        assert not warned
