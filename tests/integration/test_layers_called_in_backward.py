"""Layers called in backward by a custom autograd function (reversible ones), and parameters that hooks read there."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_pardist import FSDPStrategy, PipelineStrategy, ZeroStrategy
from lightning_pardist.engines.pipeline import CannotPipelineError
from tests.helpers.models import Base, points
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, STEPS, Data, global_losses, quiet_trainer

STRATEGIES = {
    "pp": lambda: PipelineStrategy(pipeline_parallel_size=2),
    "zero2": lambda: ZeroStrategy(zero_stage=2),
    "zero3": FSDPStrategy,
    "units": lambda: FSDPStrategy(units=["Coupling"]),
    "small": lambda: FSDPStrategy(min_unit_size_mb=0),
    "kept": lambda: FSDPStrategy(units=["Coupling"], reshard_after_forward=False),
}


class Coupling(nn.Module):
    """One of RevNet's layers (arXiv 1707.04585), which stores no activations."""

    def __init__(self):
        super().__init__()
        self.f, self.g = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))

    def forward(self, one, two):
        with torch.no_grad():
            one = one + self.f(two).tanh()
            return one, two + self.g(one)

    def backward_pass(self, one, two, one_grad, two_grad):
        with torch.enable_grad():
            one = one.detach().requires_grad_()
            change = self.g(one)
            change.backward(two_grad)
        two = (two - change).detach()
        one_grad = one_grad + one.grad
        with torch.enable_grad():
            two.requires_grad_()
            change = self.f(two).tanh()
            change.backward(one_grad)
        return (one - change).detach(), two.detach(), one_grad, two_grad + two.grad


class Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layers):
        one, two = x.chunk(2, -1)
        for layer in layers:
            one, two = layer(one, two)
        ctx.layers = layers
        ctx.save_for_backward(one.detach(), two.detach())
        return torch.cat([one, two], -1)

    @staticmethod
    def backward(ctx, grad):
        state = *ctx.saved_tensors, *grad.chunk(2, -1)
        for layer in reversed(ctx.layers):
            state = layer.backward_pass(*state)
        return torch.cat(state[2:], -1), None


class RevNet(Base):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList([Coupling(), Coupling(), Coupling()])
        self.last.weight.register_hook(lambda gradient: gradient + 0.1 * self.last.weight.detach())

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.note(F.mse_loss(self.last(Reversible.apply(self.first(x), self.layers)), y))


def _fit(strategy):
    torch.manual_seed(3)
    module = RevNet()
    devices = dist.get_world_size() if dist.is_initialized() else 1
    made = STRATEGIES[strategy]() if strategy in STRATEGIES else strategy
    trainer = quiet_trainer(strategy=made, devices=devices, use_distributed_sampler=False, accumulate_grad_batches=2)
    trainer.fit(module, datamodule=Data(points(BATCH * STEPS)))
    return {"losses": {"loss": global_losses(module.losses, devices)}, "weights": snapshot(module)}


def _fit_all(strategies):
    return [_fit(strategy) for strategy in strategies]


@pytest.mark.parametrize(
    "strategies", [("units", "small"), pytest.param(("zero2", "zero3", "kept"), marks=pytest.mark.slow)], ids="-".join
)
def test_layers_that_a_backward_calls_are_gathered_for_it(strategies):
    expected = _fit("auto")
    for found in run_ranks(2, _fit_all, strategies):
        for each in found:
            for part in expected:
                assert_close(each[part], expected[part])


class Seeded(Coupling):
    """Restores its forward's random state in backward, as the Reformer does (arXiv 2001.04451)."""

    seed = None

    def forward(self, one, two):
        self.seed = torch.seed() % 2**31
        return super().forward(one, two)

    def backward_pass(self, *state):
        torch.manual_seed(self.seed)
        return super().backward_pass(*state)


class SeededRevNet(RevNet):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.layers = nn.ModuleList([Seeded(), Seeded()])


def _refused(strategy, module_class):
    trainer = quiet_trainer(strategy=STRATEGIES.get(strategy, lambda: strategy)(), devices=2)
    with pytest.raises(
        CannotPipelineError, match=r"Reversible, a custom autograd function, calls \d layers \(layers\.0"
    ):
        trainer.fit(module_class(), datamodule=Data(points(BATCH * STEPS)))


@pytest.mark.parametrize("module_class", [RevNet, SeededRevNet])
@pytest.mark.parametrize("strategy", ["pp", "pardist_mp"])
def test_a_function_over_several_layers_is_not_cut(strategy, module_class):
    run_ranks(2, _refused, strategy, module_class)


def test_replicas_do_not_share_what_layers_keep_for_backward():
    trainer = quiet_trainer(strategy="pardist_dp", devices=2)
    with pytest.raises(ValueError, match=r"Reversible, a custom autograd function, .* sets layers\.0\.seed in forward"):
        trainer.fit(SeededRevNet(), datamodule=Data(points(BATCH * STEPS)))
