"""User code with its own ``torch.distributed`` calls, on ranks with the same samples, against one process."""

import functools
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader, DistributedSampler

from lightning_pardist import HybridStrategy
from tests.helpers.models import Base, points
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, quiet_trainer

STEPS = 4


class Gather(torch.autograd.Function):
    """Differentiable all-gather, as in lightly and other packages."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return tuple(parts)

    @staticmethod
    def backward(ctx, *grads):
        grads = torch.stack(grads)
        dist.all_reduce(grads)
        return grads[dist.get_rank()]


class Contrastive(Base):
    """Loss over the samples of all ranks, which the module gathers itself; loaders with samplers of its own."""

    def __init__(self, by="function", **kwargs):
        super().__init__(**kwargs)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.by = by

    def training_step(self, batch, batch_idx):
        x, y = batch
        z = torch.cat([self.net(x), y], 1)
        own = F.mse_loss(z[:, 0], z[:, 1])
        if dist.is_initialized():
            assert dist.get_world_size() == self.trainer.strategy.dims.data_parallel
            if self.by == "function":
                z = torch.cat(Gather.apply(z))
            elif self.by == "nn":
                z = torch.cat(torch.distributed.nn.all_gather(z))
            else:
                z = torch.cat([*torch.distributed.nn.functional.all_gather(z, group=dist.group.WORLD)])
            sent = z[0].detach().clone()
            dist.broadcast(sent, src=0)
            assert torch.equal(sent, z[0].detach())
            # Every rank computes the whole batch's loss, and the collective's backward sums over ranks.
            return own + (z[:, None, 0] - z[None, :, 1]).square().sum() / 100
        return own + (z[:, None, 0] - z[None, :, 1]).square().sum() / 100

    def train_dataloader(self):
        if not dist.is_initialized():
            return DataLoader(points(BATCH * STEPS), batch_size=BATCH)
        sampler = DistributedSampler(points(BATCH * STEPS), shuffle=False)
        assert sampler.num_replicas == dist.get_world_size()
        return DataLoader(points(BATCH * STEPS), batch_size=BATCH // sampler.num_replicas, sampler=sampler)


def _train(strategy, devices, by):
    torch.manual_seed(11)
    module = Contrastive(by)
    before = snapshot(module)
    quiet_trainer(
        strategy=strategy() if callable(strategy) else strategy, devices=devices, use_distributed_sampler=False
    ).fit(module)
    weights = snapshot(module)
    assert not torch.equal(before["net.0.weight"], weights["net.0.weight"])
    assert type(distributed_c10d._world) is distributed_c10d._World
    return weights


TP_DDP = functools.partial(HybridStrategy, tensor_parallel_size=2)
TP_ZERO3 = functools.partial(HybridStrategy, tensor_parallel_size=2, data_parallel="zero3")


@pytest.mark.push("strategy4-4-*", "pardist_*")
@pytest.mark.parametrize("by", ["function", "nn", "world"])
@pytest.mark.parametrize(
    ("strategy", "devices"), [("pardist_ddp", 2), ("pardist_tp", 2), ("pardist_mp", 2), (TP_DDP, 4), (TP_ZERO3, 4)]
)
def test_samples_count_once(strategy, devices, by):
    want = _train("auto", 1, by)
    for got in run_ranks(devices, _train, strategy, devices, by):
        assert_close(got, want)


class Hooked(Contrastive):
    def on_train_epoch_end(self):
        # Outside of a step the default group is the world: only rank 0 writes files.
        self.noted = dist.get_rank(), dist.get_world_size()
        dist.all_reduce(torch.ones(()))

    def training_step(self, batch, batch_idx):
        subgroup = self.trainer.strategy.device_mesh["tensor_parallel"].get_group()
        assert dist.get_rank(subgroup) == self.global_rank
        assert dist.get_world_size(subgroup) == 2
        return super().training_step(batch, batch_idx)


def _warned():
    torch.manual_seed(11)
    module = Hooked()
    trainer = quiet_trainer(strategy="pardist_tp", devices=2, use_distributed_sampler=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module)
    assert module.noted == (trainer.global_rank, 2)
    return [(warning.filename, warning.lineno) for warning in caught if "count several times" in str(warning.message)]


def test_counting_over_the_world_outside_of_steps_is_warned_about_with_its_line():
    line = Hooked.on_train_epoch_end.__code__.co_firstlineno + 3
    assert run_ranks(2, _warned) == [[(sys.modules[__name__].__file__, line)]] * 2


class ScalesByRanks(Contrastive):
    """Linear scaling of the learning rate with the number of ranks (arXiv 1706.02677)."""

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1 * self.trainer.world_size)


def _scales(strategy):
    with warnings.catch_warnings(record=True) as caught:
        trainer = quiet_trainer(strategy=strategy, devices=2, use_distributed_sampler=False)
        warnings.simplefilter("always")
        trainer.fit(ScalesByRanks())
    return [(str(each.message), each.filename) for each in caught if "world_size" in str(each.message)]


@pytest.mark.parametrize(("strategy", "times"), [("pardist_tp", 1), ("pardist_pp", 1), ("pardist_zero2", 0)])
def test_a_learning_rate_scaled_by_ranks_with_the_same_samples_is_warned_about(strategy, times):
    for found in run_ranks(2, _scales, strategy):
        assert [("2 times that of one process" in said, where) for said, where in found] == [(True, __file__)] * times
