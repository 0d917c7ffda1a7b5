"""Plain Python objects that steps fill under pipelines: averages, lists in lists, counters."""

import types

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.models import Base
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer

ROWS, BATCH = 16, 8


class Values:
    """List of what was added."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.items = []

    def add(self, values):
        self.items.append(values)

    def content(self):
        return torch.cat(self.items)


class Buffers(Values):
    """One list for each column, which is created by the first values."""

    def reset(self):
        self.items = None

    def add(self, values):
        if self.items is None:
            self.items = [[]]
        self.items[0].extend(values.unbind())

    def content(self):
        return torch.stack(self.items[0])


class Average(Values):
    def reset(self):
        self.total, self.count = 0.0, 0

    def add(self, values):
        self.total += float(values.sum())
        self.count += len(values)

    def content(self):
        return torch.tensor([self.total, self.count])


class Nested(Values):
    def reset(self):
        self.inner = types.SimpleNamespace(first=Values(), others={"second": Average()})

    def add(self, values):
        self.inner.first.add(values)
        self.inner.others["second"].add(values)

    def content(self):
        return torch.cat([self.inner.first.content(), self.inner.others["second"].content()])


class Metered(Base):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)], nn.Linear(8, 1))
        self.values, self.columns, self.average, self.nested = Values(), Buffers(), Average(), Nested()
        # The same objects again.
        self.meters = {"values": self.values, "all": [self.columns, self.average, self.nested]}
        self.trained, self.found = Values(), []

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.trained.add(loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        errors = (self.net(batch[0]) - batch[1]).square().flatten()
        for meter in (self.values, self.columns, self.average, self.nested):
            meter.add(errors)

    def on_validation_epoch_end(self):
        for meter in (self.values, *self.meters["all"]):
            self.found.append(meter.content())
            meter.reset()

    def on_train_epoch_end(self):
        self.found.append(torch.stack(self.trained.items))
        self.trained.reset()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def found(name, devices):
    torch.manual_seed(0)
    module, data = Metered(), TensorDataset(torch.randn(ROWS, 8), torch.randn(ROWS, 1))
    trainer = quiet_trainer(strategy=name, devices=devices, max_epochs=2, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(data, BATCH), DataLoader(data, BATCH))
    return module.found


@pytest.mark.parametrize("name", ["pardist_pp", "pardist_mp", "pardist_tp"])
def test_objects_hold_what_they_hold_on_one_process(name):
    (wanted,) = run_ranks(1, found, "auto", 1)
    for rank in run_ranks(2, found, name, 2):
        assert len(rank) == len(wanted)
        for got, want in zip(rank, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
