"""Batches drawn for planning do not affect training: no sample, no hook call, no state of loaders or generators."""

import itertools

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer


def _item(index):
    generator = torch.Generator().manual_seed(index)
    return torch.randn(8, generator=generator), torch.randint(0, 4, (), generator=generator)


class Slice(IterableDataset):
    """Fresh generator over one underlying iterator, like gluonts' IterableSlice."""

    def __init__(self, length=8):
        self.items = (_item(index) for index in itertools.count())
        self.length = length

    def __iter__(self):
        yield from itertools.islice(self.items, self.length)


class Batches:
    """User-defined loader over one underlying iterator, which cannot be copied."""

    def __init__(self):
        self.loader = iter(DataLoader(Slice(48), batch_size=4))
        self.begun = 0

    def __iter__(self):
        self.begun += 1
        yield from itertools.islice(self.loader, 3)


class Counted(Dataset):
    """Data set that counts reads, and has a generator of its own."""

    def __init__(self):
        self.reads = []
        self.generator = np.random.default_rng(3)

    def __len__(self):
        return 16

    def __getitem__(self, index):
        self.reads.append(index)
        x, y = _item(index)
        return x + torch.as_tensor(self.generator.normal(), dtype=torch.float32), y


class Once:
    """Indices that can be drawn once."""

    def __init__(self):
        self.indices = iter([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]])

    def __iter__(self):
        return self.indices

    def __len__(self):
        return 3


class Net(pl.LightningModule):
    def __init__(self, kind):
        super().__init__()
        inner = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
        self.net = nn.Sequential(nn.Linear(8, 8), *inner, nn.Linear(8, 4))
        self.kind = kind
        self.asked = {"train": 0, "val": 0, "transfer": 0}
        self.dataset = Counted()

    def setup(self, stage):
        # With several ranks, Lightning reseeds.
        pl.seed_everything(6, verbose=False)

    def train_dataloader(self):
        self.asked["train"] += 1
        self.first_draw = torch.rand(())
        if self.kind == "slice":
            return DataLoader(Slice(), batch_size=4)
        if self.kind == "batches":
            return Batches()
        if self.kind == "generator":
            return (batch for batch in DataLoader(Slice(), batch_size=4))
        if self.kind == "once":
            return DataLoader(self.dataset, batch_sampler=Once())
        return DataLoader(self.dataset, batch_size=4, shuffle=True)

    def val_dataloader(self):
        self.asked["val"] += 1
        return DataLoader(Slice(), batch_size=4)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.asked["transfer"] += 1
        return batch

    def validation_step(self, batch, batch_idx):
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        if self.kind == "batches":
            self.steps = self.trainer.estimated_stepping_batches if self.trainer.max_steps > 0 else 0
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class NoneForValidation(Net):
    def val_dataloader(self):
        return None


KINDS = ("slice", "batches", "generator", "once", "map")


def _fit(strategy="auto", devices=1, kinds=KINDS):
    found = {}
    for kind in kinds:
        pl.seed_everything(5, verbose=False)
        module = Net(kind)
        epochs = 1 if kind in ("generator", "once") else 2
        # Tensor ranks draw one order from a seed, one process another.
        shuffled = kind == "map" and "tp" in strategy
        trainer = quiet_trainer(strategy=strategy, devices=devices, max_epochs=epochs, num_sanity_val_steps=1)
        if shuffled:
            continue
        trainer.fit(module)
        found[kind] = {**snapshot(module), **{key: value.clone() for key, value in trainer.callback_metrics.items()}}
        found[kind]["asked"] = torch.tensor(list(module.asked.values()))
        found[kind]["reads"] = torch.tensor(module.dataset.reads)
        found[kind]["draw"] = torch.cat([module.first_draw.view(1), torch.rand(1)])
    return found


@pytest.mark.push("pardist_tp")
@pytest.mark.parametrize("strategy", ["pardist_pp", "pardist_tp"])
def test_nothing_is_lost(strategy):
    want = _fit()
    for got in run_ranks(2, _fit, strategy, 2):
        for kind, values in got.items():
            assert_close(values, want[kind])


def _without_validation(strategy="auto", devices=1):
    torch.manual_seed(1)
    module = NoneForValidation("slice")
    trainer = quiet_trainer(
        strategy=strategy, devices=devices, num_sanity_val_steps=0, check_val_every_n_epoch=5, max_epochs=1
    )
    trainer.fit(module)
    return snapshot(module)


def _with_little_to_validate(strategy="auto", devices=1):
    found = {}
    for kind in ("nothing", "one of two"):
        torch.manual_seed(1)
        module = NoneForValidation("slice")
        module.validation_step = lambda batch, batch_idx, dataloader_idx=0: None
        loaders = [DataLoader([])] if kind == "nothing" else [DataLoader([]), module.train_dataloader()]
        trainer = quiet_trainer(strategy=strategy, devices=devices, max_epochs=1, limit_val_batches=1)
        trainer.fit(module, val_dataloaders=loaders)
        found[kind] = snapshot(module)
    return found


@pytest.mark.parametrize("strategy", ["pardist_pp", "pardist_tp"])
def test_validation_loaders_without_a_batch_are_left_out(strategy):
    want = _with_little_to_validate()
    for got in run_ranks(2, _with_little_to_validate, strategy, 2):
        for kind, values in got.items():
            assert_close(values, want[kind])


def test_no_validation_loader_where_none_runs():
    want = _without_validation()
    for got in run_ranks(2, _without_validation, "pardist_pp", 2):
        assert_close(got, want)
