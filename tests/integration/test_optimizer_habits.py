"""Optimizers of whole tensors with ties, freezing, several optimizers, and resuming."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.models import Base, points
from tests.helpers.optimizers import MuonAndAdam, ScheduleFree, Shampoo, Stack
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, STEPS, Data, quiet_trainer

STRATEGIES = ["pardist_zero2", "pardist_zero3", "pardist_pp"]


class Habits(Base):
    """Tied matrices, stacked ones, and a layer that is frozen during the first two steps."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand
        self.layers = nn.Sequential(
            nn.Sequential(nn.Linear(6, 16), nn.Tanh()),
            Stack(16),
            nn.Sequential(nn.Linear(16, 16), nn.Tanh()),
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()),
            nn.Linear(16, 1),
        )
        self.layers[3][1].weight = self.layers[2][0].weight
        self.layers[1].weight.requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        self.layers[1].weight.requires_grad_(batch_idx > 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.layers(x.to(self.dtype)), y.to(self.dtype))
        if not self.automatic_optimization:
            optimizers = self.optimizers()
            self.manual_backward(loss)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return self.note(loss)

    def configure_optimizers(self):
        if self.automatic_optimization:
            return MuonAndAdam(list(self.parameters()))
        params = list(self.parameters())
        return [
            Shampoo([param for param in params if param.dim() > 1]),
            torch.optim.Adam([param for param in params if param.dim() < 2], lr=0.01, eps=1e-3),
        ]

    def dataset(self, length):
        return points(length)


def _trained(strategies, devices, by_hand, precision):
    found = []
    for strategy in strategies:
        torch.manual_seed(3)
        module = Habits(by_hand)
        trainer = quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False, precision=precision)
        trainer.fit(module, datamodule=Data(module.dataset(BATCH * STEPS)))
        found.append(snapshot(module))
    return found


@functools.cache
def _expected(by_hand, precision):
    return _trained(["auto"], 1, by_hand, precision)[0]


@pytest.mark.parametrize("by_hand", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one", "two, by hand"])
def test_tied_stacked_and_unfrozen(by_hand):
    wanted = _expected(by_hand, "64-true")
    strategies = STRATEGIES[:2] if by_hand else STRATEGIES
    for of_rank in run_ranks(2, _trained, strategies, 2, by_hand, "64-true"):
        for got in of_rank:
            assert_close(got, wanted, rtol=1e-9)


def _resumed(strategies, devices, folder):
    """Return whether two half runs equal a single run bit for bit."""
    same = []
    for strategy in strategies:
        ends = []
        for halves in ([STEPS], [STEPS // 2, STEPS]):
            path = None
            for steps in halves:
                torch.manual_seed(3)
                module = Habits()
                trainer = quiet_trainer(
                    strategy=strategy, devices=devices, use_distributed_sampler=False, max_epochs=None, max_steps=steps
                )
                trainer.fit(module, datamodule=Data(module.dataset(BATCH * STEPS)), ckpt_path=path)
                path = f"{folder}/{strategy}.ckpt"
                trainer.save_checkpoint(path)
            ends.append(snapshot(module))
        same.append(all(torch.equal(ends[0][key], value) for key, value in ends[1].items()))
    return same


def test_resuming_is_bit_equal(tmp_path):
    for same in run_ranks(2, _resumed, STRATEGIES[:2], 2, str(tmp_path)):
        assert all(same)


class ReadsRates(Base):
    """Logs the learning rate, which a scheduler lowers by a logged value, and weights its loss by it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        rate = self.optimizers().param_groups[0]["lr"]
        self.log("rate", rate)
        assert self.lr_schedulers().optimizer.param_groups[0]["lr"] == rate
        loss = F.mse_loss(self.layers(batch[0].to(self.dtype)), batch[1].to(self.dtype)) * (1 + rate)
        return self.note(loss)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.15)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.3), "interval": "step"}]

    def dataset(self, length):
        return points(length)


class Switches(ReadsRates):
    """Switches its schedule-free optimizer to evaluation in the middle of an epoch and at its end."""

    def configure_optimizers(self):
        return ScheduleFree(self.parameters())

    def training_step(self, batch, batch_idx):
        return self.note(F.mse_loss(self.layers(batch[0].to(self.dtype)), batch[1].to(self.dtype)))

    def on_train_epoch_start(self):
        self.optimizers().optimizer.train()

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == STEPS // 2:
            self.optimizers().optimizer.eval()
            self.averaged = self.layers(batch[0].new_ones(1, 6).to(self.dtype)).detach().reshape(())
            self.optimizers().optimizer.train()

    def on_train_epoch_end(self):
        self.log("averaged", self.averaged)
        self.optimizers().optimizer.eval()


def _switched(strategies, devices):
    found = []
    for strategy in strategies:
        torch.manual_seed(3)
        module = Switches()
        trainer = quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False, precision="64-true")
        trainer.fit(module, datamodule=Data(module.dataset(BATCH * STEPS)))
        found.append(snapshot(module) | {"averaged": trainer.callback_metrics["averaged"].double()})
    return found


def test_schedule_free_optimizers_are_switched_on_parts_of_parameters():
    wanted = _switched(["auto"], 1)[0]
    strategies = ["pardist_zero1", "pardist_zero2_offload", "pardist_zero3_offload", "pardist_tp", *STRATEGIES]
    for of_rank in run_ranks(2, _switched, strategies, 2):
        for got in of_rank:
            assert_close(got, wanted, rtol=1e-9)


def _rates(strategy, devices):
    torch.manual_seed(3)
    module = ReadsRates()
    trainer = quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False, precision="64-true")
    trainer.fit(module, datamodule=Data(module.dataset(BATCH * STEPS)))
    return snapshot(module) | {"rate": trainer.callback_metrics["rate"].double()}


@pytest.mark.parametrize(("strategy", "devices"), [("pardist_3d", 4), ("pardist_pp", 2), ("pardist_tp", 2)])
def test_steps_that_ask_for_the_learning_rate(strategy, devices):
    wanted = _rates("auto", 1)
    for got in run_ranks(devices, _rates, strategy, devices):
        assert_close(got, wanted, rtol=1e-9)


class SharpnessAware(torch.optim.Optimizer):
    """SAM around an optimizer with momentum, which shares its groups; its step cannot be without a closure."""

    def __init__(self, params, base, **kwargs):
        super().__init__(params, kwargs)
        self.base = base(self.param_groups, **kwargs)
        self.param_groups = self.base.param_groups

    def _with_gradients(self):
        return [param for group in self.param_groups for param in group["params"] if param.grad is not None]

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        loss = closure()
        norm = torch.stack([param.grad.norm() for param in self._with_gradients()]).norm()
        for param in self._with_gradients():
            self.state[param]["before"] = param.data.clone()
            param.add_(param.grad * (0.05 / (norm + 1e-12)))
        closure()
        for param in self._with_gradients():
            param.data = self.state[param]["before"]
        self.base.step()
        return loss


class Sharp(ReadsRates):
    def training_step(self, batch, batch_idx):
        return self.note(F.mse_loss(self.layers(batch[0].to(self.dtype)), batch[1].to(self.dtype)))

    def configure_optimizers(self):
        return SharpnessAware(self.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


def _sharp(strategy="auto", devices=1):
    torch.manual_seed(3)
    module = Sharp()
    trainer = quiet_trainer(strategy=strategy, devices=devices, max_epochs=2, use_distributed_sampler=False)
    trainer.fit(module, datamodule=Data(module.dataset(BATCH * STEPS)))
    return snapshot(module)


@pytest.mark.parametrize(
    "strategy", ["pardist_zero3", "pardist_pp", pytest.param("pardist_tp", marks=pytest.mark.slow)]
)
def test_optimizers_around_others_that_call_the_closure_again(strategy):
    want = _sharp()
    for weights in run_ranks(2, _sharp, strategy, 2):
        assert_close(weights, want)
