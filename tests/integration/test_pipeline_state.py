"""State that steps keep from batch to batch, in attributes and buffers: a pipeline against one process."""

from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist.engines.pipeline import CannotPipelineError
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer


class Base(pl.LightningModule):
    def __init__(self):
        super().__init__()
        inner = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
        self.net = nn.Sequential(nn.Linear(8, 8), *inner, nn.Linear(8, 4))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Buffers(Base):
    """Moving means, a counter, and sums in buffers: modified in place, or assigned."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean_loss", torch.zeros(()))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("histogram", torch.zeros(4))
        self.register_buffer("current", torch.zeros(4))

    def training_step(self, batch, batch_idx):
        y = self.net(batch[0])
        loss = F.cross_entropy(y - self.centre, batch[1]) * (1 + 0.1 * self.mean_loss.clone())
        counts = F.one_hot(batch[1], 4).sum(0)
        self.mean_loss.mul_(0.9).add_(0.1 * loss.detach())
        self.steps += 1
        self.centre = 0.9 * self.centre + 0.1 * y.detach().mean(0)
        self.histogram += counts
        self.current.copy_(counts)
        return loss


class Attributes(Base):
    """The same in attributes, some of which are logged."""

    def __init__(self):
        super().__init__()
        self.mean_loss, self.sum_of_losses, self.current = torch.tensor(1.0), torch.zeros(()), torch.zeros(())
        self.steps = self.samples = 0
        self.half = 0.0

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1]) / self.mean_loss
        self.mean_loss = 0.9 * self.mean_loss + 0.1 * loss.detach()
        self.sum_of_losses = self.sum_of_losses + loss.detach() * len(batch[0])
        self.current = batch[0].sum()
        self.steps += 1
        self.samples += len(batch[0])
        self.half = 0.5 * self.half + float(loss.detach())
        self.log_dict({"mean": self.mean_loss, "steps": float(self.steps), "half": self.half})
        self.log_dict({"samples": float(self.samples), "sum": self.sum_of_losses, "current": self.current})
        return loss

    def on_train_epoch_end(self):
        self.log_dict({"samples_after": float(self.samples), "sum_after": self.sum_of_losses, "half_after": self.half})


class Cell(Base):
    """State with one entry per sample."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(8, 8)
        self.state = None

    def training_step(self, batch, batch_idx):
        state = self.cell(batch[0], self.state)
        self.state = state.detach()
        return F.cross_entropy(self.net(state), batch[1])


class Layers(Base):
    """State whose second dim is that of the samples, reset by a hook."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(8, 8, num_layers=2, batch_first=True)
        self.state = None

    def on_train_epoch_start(self):
        self.state = None

    def training_step(self, batch, batch_idx):
        y, state = self.rnn(batch[0][:, None], self.state)
        self.state = state.detach()
        return F.cross_entropy(self.net(y[:, 0]), batch[1])


class Pairs(Base):
    """Two states in a tuple, as in Lightning's LSTM demo: as many layers as samples per micro-batch."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.hidden = None

    def on_train_epoch_end(self):
        self.hidden = None

    def training_step(self, batch, batch_idx):
        if self.hidden is None:
            self.hidden = (torch.zeros(2, len(batch[0]), 8), torch.zeros(2, len(batch[0]), 8))
        self.hidden = (self.hidden[0].detach(), self.hidden[1].detach())
        y, self.hidden = self.rnn(batch[0][:, None], self.hidden)
        return F.cross_entropy(self.net(y[:, 0]), batch[1])


class Begun(Pairs):
    """The same, initialized by a hook for the whole batch."""

    def on_train_epoch_start(self):
        self.hidden = (torch.zeros(2, 16, 8), torch.ones(2, 16, 8))


class InTraining(Base):
    """Buffers that are written in training mode only: a moving mean, and a sum."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("histogram", torch.zeros(4))

    def training_step(self, batch, batch_idx):
        y = self.net(batch[0])
        loss = F.cross_entropy(y - self.centre, batch[1])
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * y.detach().mean(0)
            self.histogram += F.one_hot(batch[1], 4).sum(0)
        return loss


class MovingSum(Base):
    """Moving mean of a sum over samples, which those of micro-batches do not add up to."""

    def __init__(self):
        super().__init__()
        self.register_buffer("norm", torch.tensor(2.0))

    def training_step(self, batch, batch_idx):
        if self.training:
            self.norm = 0.9 * self.norm + 0.1 * batch[0].abs().sum()
        return F.cross_entropy(self.net(batch[0]), batch[1]) / self.norm


KINDS = (Buffers, Attributes, Cell, Layers, Pairs, Begun, InTraining)


def _samples():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(48, 8, generator=generator), torch.randint(0, 4, (48,), generator=generator))


def _fit_all(strategy="auto", devices=1):
    found = []
    for kind in KINDS:
        torch.manual_seed(3)
        module = kind()
        trainer = quiet_trainer(strategy=strategy, devices=devices, max_epochs=2)
        trainer.fit(module, DataLoader(_samples(), batch_size=16))
        found.append({**snapshot(module), **{key: value.clone() for key, value in trainer.callback_metrics.items()}})
    return found


def test_what_steps_keep_is_that_of_one_process():
    want = _fit_all()
    for got in run_ranks(2, _fit_all, "pardist_pp", 2):
        for mine, whole in zip(got, want, strict=True):
            assert_close(mine, whole)


def _warnings_of(kind):
    with patch("lightning_pardist.axes.pipeline.axis.rank_zero_warn") as warn:
        trainer = quiet_trainer(strategy="pardist_pp", devices=2, max_epochs=1)
        trainer.fit(kind(), DataLoader(_samples(), batch_size=16))
    return [call.args[0] for call in warn.call_args_list]


@pytest.mark.parametrize(("kind", "is_named"), [(MovingSum, True), (InTraining, False)])
def test_what_training_sets_and_does_not_combine_is_named(kind, is_named):
    for found in run_ranks(2, _warnings_of, kind):
        assert any("writes to norm" in text for text in found) == is_named
        assert is_named or not found


class TwoViews(pl.LightningModule):
    """Calls a backbone with batch norms on two views of each sample, as in self-supervised training."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        one, two = (self.head(self.backbone(view)) for view in (batch[0], batch[0].flip(1)))
        return (one - two).square().mean() + one.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _two_views(strategy, devices):
    torch.manual_seed(3)
    module = TwoViews()
    trainer = quiet_trainer(strategy=strategy, devices=devices)
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(32, 6)), batch_size=8))
    return snapshot(module)


def _two_views_refused():
    with pytest.raises(CannotPipelineError, match=r"'backbone\.1' several times, .* changes 'backbone\.1\.\w+'"):
        _two_views("pardist_pp", 2)


def test_running_statistics_of_calls_in_several_stages():
    run_ranks(2, _two_views_refused)
    want = _two_views("auto", 1)
    for got in run_ranks(2, _two_views, "pardist_mp", 2):
        assert_close(got, want)


class Cached(nn.Module):
    """Factors in a buffer that the first call fills, and their number (rotary embeddings)."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cached", torch.zeros(16), persistent=False)
        self.filled = 0

    def forward(self, size):
        if self.filled < size:
            self.cached[:size] = torch.linspace(0.5, 2.0, size)
            self.filled = size
        return self.cached[:size].clone()


class WithCaches(Base):
    def __init__(self):
        super().__init__()
        self.caches = nn.ModuleList(Cached() for _ in self.net)

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for layer, cache in zip(self.net, self.caches, strict=True):
            x = layer(x * cache(8))
        return F.cross_entropy(x, batch[1])


def _cached(strategy, devices):
    torch.manual_seed(3)
    module = WithCaches()
    data = TensorDataset(torch.randn(32, 8), torch.randint(4, (32,)))
    quiet_trainer(strategy=strategy, devices=devices).fit(module, DataLoader(data, batch_size=8))
    return snapshot(module)


def test_caches_that_the_first_call_fills():
    want = _cached("auto", 1)
    for got in run_ranks(2, _cached, "pardist_pp", 2):
        assert_close(got, want)
