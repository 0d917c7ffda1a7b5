"""Hooks and attributes set on parameters and layers at construction are preserved under every axis."""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import ContextParallelStrategy, HybridStrategy, TensorParallelStrategy
from lightning_pardist.axes.pipeline.hooks import hook_warnings
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer

LENGTH, WIDTH = 6, 8


class Block(nn.Module):
    """Pair of layers that tensor parallelism splits."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Hooked(pl.LightningModule):
    """Module with hooks that change gradients and outputs, some of them nonlinear; one hook is removed again."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(WIDTH, 4)
        self.double()
        first, second, third = self.blocks
        first.register_forward_hook(lambda module, args, output: output * 1.1)
        second.up.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
        second.register_full_backward_hook(lambda module, into, out: tuple(each.clamp(-1e-3, 1e-3) for each in into))
        third.register_full_backward_pre_hook(lambda module, out: tuple(each.clamp(-2e-3, 2e-3) for each in out))
        for weight in (first.up.weight, first.norm.weight, first.down.bias, self.head.weight):
            weight.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))
        self.removed = self.head.bias.register_hook(lambda grad: 3 * grad)
        for param in self.head.parameters():
            param.decays = False

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.removed.remove()

    def training_step(self, batch, batch_idx):
        x, y = batch
        for block in self.blocks:
            x = block(x)
        if x.requires_grad:
            x.register_hook(lambda grad: grad.clamp(-5e-3, 5e-3))
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())

    def configure_optimizers(self):
        groups = {True: [], False: []}
        for param in self.parameters():
            groups[getattr(param, "decays", True)].append(param)
        return torch.optim.SGD([{"params": groups[True], "weight_decay": 0.1}, {"params": groups[False]}], lr=0.5)


def fit(strategy, devices):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, LENGTH, WIDTH, dtype=torch.float64, generator=generator)
    y = torch.randint(4, (16, LENGTH), generator=generator)
    module = Hooked()
    loader = torch.utils.data.DataLoader(TensorDataset(x, y), batch_size=4)
    trainer = quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False)
    trainer.fit(module, loader)
    hooks = {name for name, param in module.named_parameters() if param._backward_hooks}
    return snapshot(module), hooks, {name for name, param in module.named_parameters() if hasattr(param, "decays")}


STRATEGIES = {
    "tp": TensorParallelStrategy,
    "cp": ContextParallelStrategy,
    "zero3": lambda: "pardist_zero3",
    "tp_zero3": lambda: HybridStrategy(tensor_parallel_size=2, data_parallel="zero3"),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_hooks_and_attributes_of_init_are_those_of_one_process(name):
    expected, hooks, marked = fit("auto", 1)
    for weights, own_hooks, own_marked in run_ranks(2, fit_under, name):
        assert_close(weights, expected, rtol=1e-9)
        assert own_hooks == hooks
        assert own_marked == marked


def fit_under(name):
    return fit(STRATEGIES[name](), 2)


def test_what_hooks_do_not_do_in_a_pipeline_is_told():
    module = Hooked()
    module.on_after_backward = lambda: None
    told = list(hook_warnings(module, ["blocks.0", "blocks.1", "blocks.2", "head"], 4))
    assert "Full backward hooks of blocks.1 run" in told[0]
    assert "blocks.0.norm.weight" in told[1]
    assert "on_after_backward of Hooked" in told[2]
    # Inside a stage's units, and without micro-batches.
    inside = list(hook_warnings(module, ["blocks.1.up", "head"], 1))
    assert len(inside) == 2
    assert not list(hook_warnings(pl.LightningModule(), [], 4))


def _zeroed(grad):
    grad = grad.clone()
    grad[2] = 0
    return grad


_MASK = torch.ones(8, 4, dtype=torch.float64).tril()
_HOOKS = {
    "times a mask": lambda grad: grad * _MASK,
    "filled": lambda grad: grad.masked_fill(_MASK == 0, 0.0),
    "a row is zero": _zeroed,
    "over its norm": lambda grad: grad / (grad.norm() + 1e-3),
    "a sum with a mask": lambda grad: torch.where(_MASK > 0, grad, 0.1 * _MASK),
}


class Masked(pl.LightningModule):
    """Changes gradients of all of its split matrices, each by its own hook."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in _HOOKS)

    def on_fit_start(self):
        for layer, hook in zip(self.layers, _HOOKS.values(), strict=True):
            layer[0].weight.register_hook(hook)

    def training_step(self, batch, batch_idx):
        hidden = batch[0]
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _masked(strategy="auto", devices=1, kind=Masked):
    module = kind()
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trainer = quiet_trainer(strategy=strategy, devices=devices, precision="64-true")
    trainer.fit(module, DataLoader(TensorDataset(data), batch_size=4))
    return snapshot(module)


def test_gradients_changed_by_whole_masks():
    want = _masked()
    for weights in run_ranks(2, _masked, "pardist_tp", 2):
        assert_close(weights, want, rtol=1e-9)


class ByHand(pl.LightningModule):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)
        self.largest = max(float(param.grad.abs().max()) for param in self.parameters())


def test_gradients_read_around_an_update_are_told_and_a_warm_up_is_not():
    (told,) = hook_warnings(ByHand(), [], 4)
    assert "In optimizer_step of ByHand the gradients of parameters of other stages are None" in told
    warm_up = pl.LightningModule()
    warm_up.optimizer_step = lambda epoch, batch_idx, optimizer, closure=None: optimizer.step(closure=closure)
    assert not list(hook_warnings(warm_up, [], 4))


def test_hooks_after_accumulation_are_warned_about_in_pipelines():
    module = pl.LightningModule()
    module.net = nn.Linear(2, 2)
    module.net.bias.register_post_accumulate_grad_hook(lambda param: None)
    (told,) = hook_warnings(module, [], 4)
    assert "Hooks on the gradients of net.bias run for each of 4 micro-batches" in told
    assert not list(hook_warnings(module, [], 1))


class HooksInSteps(Masked):
    """Registers hooks on gradients in its steps: two in the first one, and one in each instead of the last one."""

    def __init__(self):
        super().__init__()
        self.handle, self.has_hook = None, False

    def on_fit_start(self):
        pass

    def training_step(self, batch, batch_idx):
        if not hasattr(self, "first"):
            self.first = [self.layers[0][0].weight.register_hook(lambda grad: 0.5 * grad)]
        if not self.has_hook:
            self.has_hook = True
            self.layers[1][0].bias.register_hook(lambda grad: 2 * grad)
        if self.handle is not None:
            self.handle.remove()
        self.handle = self.layers[4][2].weight.register_hook(lambda grad: 0.25 * (1 + batch_idx) * grad)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("strategy", ["pardist_tp", "pardist_pp"])
def test_hooks_that_a_step_registers_are_not_those_of_trials(strategy):
    expected = _masked(kind=HooksInSteps)
    for weights in run_ranks(2, _masked, strategy, 2, HooksInSteps):
        assert_close(weights, expected, rtol=1e-9)
