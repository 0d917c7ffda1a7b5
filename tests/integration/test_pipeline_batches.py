"""Pipelines with batches that no dim splits, and with steps that need large ones, print or communicate."""

import dataclasses
import sys
import warnings

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

import lightning_pardist
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.runs import quiet_trainer


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Tensor
    y: Tensor


class Base(pl.LightningModule):
    def __init__(self):
        super().__init__()
        inner = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
        self.net = nn.Sequential(nn.Linear(8, 8), *inner, nn.Linear(8, 4))

    def training_step(self, batch, batch_idx):
        x, y = batch[:2] if isinstance(batch, (tuple, list)) else (batch.x, batch.y)
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Graphs(Base):
    """Nodes of several graphs in one tensor; a sample is a sum over its nodes."""

    def training_step(self, batch, batch_idx):
        x, segment, y = batch
        sums = torch.zeros(len(y), 8).index_add(0, segment, x)
        return F.cross_entropy(self.net(sums), y)


class Weighed(Base):
    """Class weights that come with every batch."""

    def training_step(self, batch, batch_idx):
        y = self.net(batch["x"]) * batch["scales"]
        return F.cross_entropy(y, batch["y"])


class Normed(Base):
    """Batch norm over samples only, which fails on a single sample."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)) for _ in range(4)), nn.Linear(8, 4)
        )


class Derived(Base):
    """Logs functions of its loss, and values that are no means over samples."""

    def training_step(self, batch, batch_idx):
        y = self.net(batch[0])
        loss = F.mse_loss(y, F.one_hot(batch[1], 4).float())
        self.log_dict({"rmse": loss.sqrt(), "perplexity": loss.exp(), "bits": loss.log()})
        self.log("spread", y.detach().var())
        self.print(f"step {batch_idx}: loss {loss:.5f} of {len(y)} samples")
        return loss


class Noisy(Base):
    """Draws random numbers: no two runs of a step are equal."""

    def training_step(self, batch, batch_idx):
        y = self.net(batch[0])
        loss = F.mse_loss(y, F.one_hot(batch[1], 4).float())
        self.log("noise", torch.rand(len(y)).mean())
        self.log("rmse", loss.sqrt())
        return loss


class Talks(Base):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.how == "broadcast":
            self.trainer.strategy.broadcast(1)
        else:
            self.trainer.strategy.barrier()
        return loss


def _graphs():
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(3):
        sizes = torch.randint(3, 9, (16,), generator=generator)
        segment = torch.arange(16).repeat_interleave(sizes)
        x, y = torch.randn(len(segment), 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)
        batches.append((x, segment, y))
    return batches


def split_graphs(batch, most):
    x, segment, y = batch
    parts = []
    for chosen in torch.arange(len(y)).chunk(most):
        mine = (segment >= chosen[0]) & (segment <= chosen[-1])
        parts.append(lightning_pardist.MicroBatch((x[mine], segment[mine] - chosen[0], y[chosen]), len(chosen)))
    return parts


def _pairs(length=48, size=16):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(length, 8, generator=generator), torch.randint(0, 4, (length,), generator=generator)
    return list(zip(x.split(size), y.split(size), strict=True))


def _fit(module, batches, strategy="auto", devices=1, **settings):
    torch.manual_seed(3)
    made = module() if isinstance(module, type) else module
    if devices > 1:
        strategy = lightning_pardist.PipelineStrategy(**settings)
    said = []
    with warnings.catch_warnings(record=True) as caught:
        trainer = quiet_trainer(strategy=strategy, devices=devices, callbacks=[Says(said)])
        warnings.simplefilter("always")
        made.print = lambda *args, **kwargs: said.append(" ".join(map(str, args)))
        trainer.fit(made, DataLoader(batches, batch_size=None))
    del made.print
    values = {**snapshot(made), **{key: value.clone() for key, value in trainer.callback_metrics.items()}}
    return values, [str(each.message) for each in caught], said


class Says(pl.Callback):
    def __init__(self, said):
        self.said = said

    def on_train_start(self, trainer, pl_module):
        if trainer.world_size > 1:
            self.said.append(trainer.strategy.describe())


def test_batches_in_slots_are_cut():
    batches = [Slotted(*pair) for pair in _pairs()]
    want, *_ = _fit(Base, batches)
    for got, _, said in run_ranks(2, _fit, Base, batches, None, 2):
        assert_close(got, want)
        assert "8 micro-batches of 2 samples" in said[0]
        assert "cut: x, y along dim 0" in said[0]


def test_ragged_batches():
    want, *_ = _fit(Graphs, _graphs())
    with pytest.raises(RankFailed, match=r"several lengths along the batch dim.*'2' has 16.*split_batch"):
        run_ranks(2, _fit, Graphs, _graphs(), None, 2)
    settings = {"split_batch": split_graphs}
    for got, *_ in run_ranks(2, _call, _fit, (Graphs, _graphs(), None, 2), settings):
        assert_close(got, want)


def _call(function, args, kwargs):
    return function(*args, **kwargs)


def test_what_goes_whole_is_proved_or_said():
    batches = [{"x": x, "y": y, "scales": torch.tensor([1.0, 2.0, 0.5, 1.0])} for x, y in _pairs()]
    want, *_ = _fit(Weighed, batches)
    for settings in ({}, {"batch_dim": {"scales": None}}):
        for got, _, said in run_ranks(2, _call, _fit, (Weighed, batches, None, 2), settings):
            assert_close(got, want)
            assert "whole in each: scales [4]" in said[0]


def test_micro_batches_are_as_small_as_the_step_allows():
    for _, _, said in run_ranks(2, _fit, Normed, _pairs(24, 8), None, 2):
        assert "4 micro-batches of 2 samples" in said[0]
        assert "smaller ones fail: ValueError: Expected more than 1 value per channel" in said[0]
    for _, _, said in run_ranks(2, _call, _fit, (Base, _pairs(12, 4), None, 2), {"num_microbatches": 32}):
        assert "4 micro-batches of 1 sample (num_microbatches=32" in said[0]


class TakesGradients(Base):
    """Computes a gradient in its step, which fails on micro-batches of one sample."""

    def training_step(self, batch, batch_idx):
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(x.square().sum(), x)
        if len(x) < 2:
            raise ValueError("One is not enough.")
        return F.cross_entropy(self.net(slope), batch[1])


def test_steps_that_take_gradients_are_tried_with_them():
    want, *_ = _fit(TakesGradients, _pairs(24, 8))
    for got, _, said in run_ranks(2, _fit, TakesGradients, _pairs(24, 8), None, 2):
        assert_close(got, want)
        assert "smaller ones fail: ValueError: One is not enough." in said[0]


class Residual(Base):
    """Adds a packed sequence to the padded one, which fails if the longest sequence is in another micro-batch."""

    def training_step(self, batch, batch_idx):
        x, lengths, y = batch
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        padded, _ = pad_packed_sequence(packed, batch_first=True)
        return F.cross_entropy(self.net((x + padded).mean(1)), y)


class MasksByLengths(Base):
    """Masks positions up to the longest sequence, which fails on padded ones if the longest is elsewhere."""

    def training_step(self, batch, batch_idx):
        x, lengths, y = batch
        mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
        return F.cross_entropy(self.net((x * mask[..., None]).mean(1)), y)


@pytest.mark.parametrize("kind", [Residual, MasksByLengths])
def test_padded_batches_that_fail_in_parts_stay_whole(kind):
    x, y, lengths = torch.randn(8, 7, 8), torch.arange(8) % 4, torch.tensor([7, 4, 2, 6, 3, 4, 5, 7])
    batches = [(x, lengths, y), (x[:, :6], lengths.clamp(max=6).flip(0), y)]
    want, *_ = _fit(kind, batches)
    for got, _, said in run_ranks(2, _fit, kind, batches, None, 2):
        assert_close(got, want)
        assert "1 micro-batch, the whole batch" in said[0]
        assert "smaller ones fail: RuntimeError: The size of tensor" in said[0]
    with pytest.raises(RankFailed, match="training_step runs on a batch and fails on a micro-batch"):
        run_ranks(2, _call, _fit, (kind, batches, None, 2), {"num_microbatches": 4})


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_errors_name_the_micro_batch():
    x, y = torch.randn(8, 7, 8), torch.arange(8) % 4
    full, ragged = torch.full((8,), 7), torch.tensor([7, 7, 7, 7, 7, 3, 7, 7])
    fit = (Residual, [(x, full, y), (x, ragged, y)], None, 2)
    want = "micro-batch 6 of 8, with 1 of the batch's 8 samples, starting at sample 5.*set num_microbatches=1"
    with pytest.raises(RankFailed, match=want):
        run_ranks(2, _call, _fit, fit, {"num_microbatches": 8})
    whole, *_ = _fit(*fit[:2])
    for got, *_ in run_ranks(2, _call, _fit, fit, {"num_microbatches": 1}):
        assert_close(got, whole)


def test_what_is_derived_from_a_loss():
    want, _, text = _fit(Derived, _pairs())
    heard = []
    for got, warned, said in run_ranks(2, _fit, Derived, _pairs(), None, 2):
        spread = got.pop("spread"), want.get("spread")
        assert spread[0] != spread[1]
        assert_close(got, {name: value for name, value in want.items() if name != "spread"})
        heard.append(any("'spread'" in each and "do not combine" in each for each in warned))
        assert said[1:] == text
    assert heard[0]
    want, *_ = _fit(Noisy, _pairs())
    for got, *_ in run_ranks(2, _fit, Noisy, _pairs(), None, 2):
        assert_close({"rmse": got["rmse"]}, {"rmse": want["rmse"]})


class ZeroAtFirst(Base):
    def training_step(self, batch, batch_idx):
        y = self.net(batch[0])
        loss = y.sum() * 0 if batch_idx == 0 else F.cross_entropy(y, batch[1])
        self.log("loss", loss)
        return loss


def test_a_logged_loss_that_is_zero_at_first_is_not_taken_for_its_root():
    want, *_ = _fit(ZeroAtFirst, _pairs())
    for got, *_ in run_ranks(2, _fit, ZeroAtFirst, _pairs(), None, 2):
        assert_close(got, want)


class CountsHits(Base):
    """Logs a number of samples that is 0 in the first step."""

    def training_step(self, batch, batch_idx):
        hits = self.net(batch[0]).argmax(1) == (-1 if batch_idx == 0 else batch[1])
        self.log("count", hits.sum())
        self.log_dict({"accuracy": hits.float().mean(), "hits": hits.int().sum()})
        return super().training_step(batch, batch_idx)


def test_logged_integers_are_not_taken_for_means():
    want, *_ = _fit(CountsHits, _pairs())
    assert want["count"] > 1
    for got, *_ in run_ranks(2, _fit, CountsHits, _pairs(), None, 2):
        assert_close(got, want)


def test_collectives_in_a_step_are_refused():
    for how in ("broadcast", "barrier"):
        with pytest.raises(RankFailed, match="training_step calls a collective"):
            run_ranks(2, _fit, Talks(how), _pairs(), None, 2)
