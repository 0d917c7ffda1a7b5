"""Every optimization pattern that Lightning supports, under data parallelism, against one process."""

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning, Callback, GradientAccumulationScheduler
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_pardist import FSDPStrategy
from lightning_pardist.trainer import data_duties
from tests.helpers.models import Base, Classifier, points
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, Data, global_losses, quiet_trainer

STEPS = 4


class Plain(Base):
    """Two linear layers, the base of all variants."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.second(self.first(x).tanh())

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.note(F.mse_loss(self(x), y))


class Dict(Plain):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "extra": torch.ones(3), "text": "kept"}


class Manual(Plain):
    """Manual accumulation with a step every second batch, a scheduler and clipping by value."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        loss = F.mse_loss(self(x), y)
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="value")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()
        self.note(loss)

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class ManualTwice(Manual):
    """Two backward calls before one step, one of them ``loss.backward()`` outside of Lightning."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = F.mse_loss(self(x), y)
        self.manual_backward(loss, retain_graph=True)
        loss.backward()
        optimizer.step()
        self.note(loss)


class TwoLosses(Manual):
    """Two optimizers, one of a scalar that only a separate backward reaches; inputs are differentiated, too."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        first, second = self.optimizers()
        for optimizer in (first, second):
            optimizer.zero_grad()
        found = self(x)
        self.manual_backward(F.mse_loss(found, y))
        self.manual_backward((self.scale.exp() * found.detach()).square().mean())
        x = x.clone().requires_grad_()
        (grads,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        self.manual_backward(grads.square().mean())
        for optimizer in (first, second):
            optimizer.step()
        self.note(F.mse_loss(found, y))

    def configure_optimizers(self):
        layers = [*self.first.parameters(), *self.second.parameters()]
        return torch.optim.SGD(layers, lr=0.2), torch.optim.SGD([self.scale], lr=0.2)


class DropsByHand(Manual):
    """Sets gradients to None by hand at the start of a step."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        for param in self.parameters():
            param.grad = None
        loss = F.mse_loss(self(x), y)
        self.manual_backward(loss)
        self.optimizers().step()
        self.note(loss)


class Closure(Manual):
    """``optimizer.step(closure)`` in manual optimization."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()

        def closure():
            loss = F.mse_loss(self(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.note(loss)
            return loss

        optimizer.step(closure=closure)


class Lbfgs(Plain):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class ManualLbfgs(Closure):
    def configure_optimizers(self):
        optimizer = torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Gan(Base):
    """GAN with alternating optimizers and optional toggling; a shared encoder is excluded from the critic's step."""

    toggle = True

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.discriminator = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        opt_g, opt_d = self.optimizers()
        optimizer = (opt_g, opt_d)[batch_idx % 2]
        if self.toggle:
            self.toggle_optimizer(optimizer)
        if optimizer is opt_g:
            loss = F.softplus(-self.discriminator(self.generator(x))).mean()
        else:
            fake = self.discriminator(self.generator(x).detach())
            loss = F.softplus(fake).mean() + F.softplus(-self.discriminator(y)).mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        if self.toggle:
            self.untoggle_optimizer(optimizer)
        self.note(loss)

    def configure_optimizers(self):
        return [self.make_optimizer(self.generator.parameters()), self.make_optimizer(self.discriminator.parameters())]


class GanUntoggled(Gan):
    toggle = False


class GanWithinOneStep(Gan):
    """Gradients are zeroed right after a step: only toggling keeps the other network's clean."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        for optimizer, network in zip(self.optimizers(), (self.generator, self.discriminator), strict=True):
            self.toggle_optimizer(optimizer)
            fake = self.discriminator(self.generator(x))
            if network is self.generator:
                loss = F.softplus(-fake).mean()
            else:
                loss = F.softplus(fake).mean() + F.softplus(-self.discriminator(y)).mean()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
        self.note(loss)


class WGanGP(Gan):
    """WGAN-GP: gradient penalty with a second derivative through ``torch.autograd.grad``."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        opt_g, opt_d = self.optimizers()
        real = y.clone().requires_grad_()
        score = self.discriminator(real)
        (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
        loss = (slope.norm(dim=1) - 1).square().mean() - score.mean() + self.discriminator(self.generator(x)).mean()
        opt_d.zero_grad()
        self.manual_backward(loss)
        opt_d.step()
        self.note(loss)
        opt_g.step()
        opt_g.zero_grad()


class Checkpointed(Plain):
    reentrant = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = checkpoint(self.first, x.requires_grad_(), use_reentrant=self.reentrant)
        hidden = checkpoint(self.first, F.pad(hidden[:, :6], (0, 0)), use_reentrant=self.reentrant)
        return self.note(F.mse_loss(self.second(hidden.tanh()), y))


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class SparseEmbedding(Base):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embed = nn.Embedding(11, 4, sparse=True)
        self.bag = nn.EmbeddingBag(11, 4, sparse=True)
        self.head = nn.Linear(4, 1)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        tokens = (x.abs() * 5).long() % 11
        loss = F.mse_loss(self.head(self.embed(tokens).mean(1) + self.bag(tokens)), y)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        self.note(loss)

    def configure_optimizers(self):
        sparse = [*self.embed.parameters(), *self.bag.parameters()]
        return [torch.optim.SparseAdam(sparse, lr=0.01, eps=1e-3), torch.optim.SGD(self.head.parameters(), lr=0.1)]


class OwnHooks(Plain):
    """Overrides ``backward``, ``optimizer_step`` and ``configure_gradient_clipping``."""

    def backward(self, loss, *args, **kwargs):
        (loss / 2).backward(retain_graph=True)
        (loss / 2).backward()

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.global_step)
        optimizer.step(closure=optimizer_closure)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class NoneNow(Plain):
    """Skips whole batches on every rank."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


class LazyLayer(Plain):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.second = nn.LazyLinear(1)
        with torch.no_grad():
            self(torch.zeros(1, 6))


class LateLayers(Plain):
    """Layers created in ``configure_model``, as in large models."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = None

    def configure_model(self):
        if self.first is None:
            torch.manual_seed(5)
            self.first = nn.Linear(6, 8)


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.first)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.first, optimizer, lr=0.05)


class Finetuned(Plain):
    def configure_optimizers(self):
        return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=0.1, momentum=0.9)


class ClipsByHand(Plain):
    """Clips with torch's functions in place of ``Trainer(gradient_clip_val=...)``."""

    def on_before_optimizer_step(self, optimizer):
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        nn.utils.clip_grad_value_(self.parameters(), 0.01)


class ChangesGradients(Plain):
    """Changes gradients in hooks in every way: in place, by another tensor, by None; and reads them."""

    def on_after_backward(self):
        for param in self.parameters():
            param.grad.nan_to_num_().mul_(0.5)

    def on_before_optimizer_step(self, optimizer):
        total = 0.0
        for index, param in enumerate(self.parameters()):
            norm = param.grad.norm()
            total = total + (norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
            if index % 2:
                param.grad = param.grad * 0.9
            param.grad.add_(param.detach().sin(), alpha=0.1)
        self.note(total.clone())
        if self.global_step % 2:
            self.first.weight.grad = None
            self.second.zero_grad()


class ManualChanges(Manual):
    """Changes gradients between two backward passes, one of them outside of Lightning, and before the step."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        loss = F.mse_loss(self(x), y)
        self.manual_backward(loss)
        if batch_idx != 1:
            self.first.bias.grad = None
            self.first.weight.grad *= 0.5
        if batch_idx == 2:
            self.second.bias.grad = torch.cos(self.second.bias.detach())
        F.l1_loss(self(x), y).backward()
        if batch_idx == 3:
            self.manual_backward(F.mse_loss(self(x), y))
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        with torch.no_grad():
            for param in self.parameters():
                param.grad.add_(param.grad.sign(), alpha=0.01)
        before = [param.grad.clone() for param in self.parameters()]
        optimizer.step()
        assert all(torch.equal(param.grad, old) for param, old in zip(self.parameters(), before, strict=True))
        optimizer.zero_grad(set_to_none=batch_idx != 1)
        self.note(loss)


class ManualClips(Manual):
    """Clips through Lightning's method, with a torch optimizer that Lightning does not wrap."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.05, "norm")
        optimizer.step()
        self.note(loss)


class ManualClipsByTorch(Manual):
    """Clips all of the module's parameters within the step, and computes the norm as in Lightning's documentation."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.manual_backward(loss)
        norms = grad_norm(self, 2)
        total = nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        torch.testing.assert_close(norms["grad_2.0_norm_total"], total)
        nn.utils.clip_grad_value_(self.second.parameters(), 0.01)
        optimizer.step()
        self.note(loss)


class Sharpness(Manual):
    """Sharpness-aware minimization in manual optimization; skips parameters without gradient."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.mse_loss(self(x), y))
        with torch.no_grad():
            moved = [(p, 0.1 * p.grad) for p in self.parameters() if p.grad is not None]
            for param, by in moved:
                param.add_(by)
        optimizer.zero_grad()
        loss = F.mse_loss(self(x), y)
        self.manual_backward(loss)
        with torch.no_grad():
            for param, by in moved:
                param.sub_(by)
        optimizer.step()
        self.note(loss)


class SetsGradients(Manual):
    """Sets gradients without a backward."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        params, loss = list(self.parameters()), F.mse_loss(self(x), y)
        for param, gradient in zip(params, torch.autograd.grad(loss, params), strict=True):
            param.grad = gradient
        self.optimizers().step()
        self.note(loss)


class SetsSomeGradients(Manual):
    """Sets gradients of one layer in the closure of its optimizer, after the other layer's came from a backward."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        first, second = self.optimizers()
        first.zero_grad()
        loss = F.mse_loss(self(x), y)
        self.manual_backward(loss, retain_graph=True)

        def closure():
            params = list(self.second.parameters())
            for param, gradient in zip(params, torch.autograd.grad(loss, params), strict=True):
                param.grad = gradient

        second.step(closure)
        first.step()
        self.note(loss)

    def configure_optimizers(self):
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.first, self.second)]


class FreezeByHand(Plain):
    def on_train_batch_start(self, batch, batch_idx):
        self.first.requires_grad_(batch_idx >= 2)


class FollowsBetween(Plain):
    """EMA teacher updated between forward and backward, without a change of version counters."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.teacher = nn.Linear(8, 1).requires_grad_(False)

    def forward(self, x):
        hidden = self.first(x).tanh()
        return self.second(hidden) + 0.1 * self.teacher(hidden)

    def on_before_zero_grad(self, optimizer):
        for teacher, student in zip(self.teacher.parameters(), self.second.parameters(), strict=True):
            teacher.data.mul_(0.5).add_(student.data, alpha=0.5)


class OddNumbers(Plain):
    """Complex parameters, and buffers of dtypes that gloo does not support, one of which changes."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mix = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.register_buffer("angles", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("small", torch.ones(3).to(torch.float8_e4m3fn), persistent=False)
        self.register_buffer("count", torch.arange(3, dtype=torch.int16))

    def forward(self, x):
        self.count += 1
        hidden = torch.view_as_complex(self.first(x).unflatten(1, (4, 2))) * self.angles
        return self.second(torch.view_as_real(hidden @ self.mix).flatten(1).tanh()) + self.small.float().sum() * 0.01


class StateBeforeSteps(Plain):
    """Optimizer that creates its state in its constructor, also for a layer that is frozen until later."""

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.1, initial_accumulator_value=0.1)

    def on_train_batch_start(self, batch, batch_idx):
        self.first.requires_grad_(batch_idx >= 2)


class Renormalized(Plain):
    """Embedding that renormalizes the looked-up rows in forward."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = nn.Embedding(5, 6, max_norm=1.0)


class LeftOut(Plain):
    """Parameter that torch's DDP would neither broadcast nor average: each rank has its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._ddp_params_and_buffers_to_ignore = ["no parameter", "second.bias"]


class LazyUncalled(Plain):
    """Lazy parameters that are only materialized in the first call."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.second = nn.LazyLinear(1)


class StepScheduler(Plain):
    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Plateau(Plain):
    """Learning rate schedule that follows a logged value, of an epoch or of a step, without ``sync_dist``."""

    def __init__(self, interval="step", monitor="train_loss", **kwargs):
        super().__init__(**kwargs)
        self.plateau = {"interval": interval, "monitor": monitor, "strict": True}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.plateau}}


CASES = {
    "dict": (Dict, {}, {}),
    "manual": (Manual, {}, {}),
    "manual_twice": (ManualTwice, {}, {}),
    "closure": (Closure, {}, {}),
    "lbfgs": (Lbfgs, {}, {}),
    "manual_lbfgs": (ManualLbfgs, {}, {}),
    "gan": (Gan, {}, {}),
    "gan_untoggled": (GanUntoggled, {}, {}),
    "gan_within_one_step": (GanWithinOneStep, {}, {}),
    "clips_by_hand": (ClipsByHand, {}, {}),
    "manual_clips": (ManualClips, {}, {}),
    "manual_clips_by_torch": (ManualClipsByTorch, {}, {}),
    "two_losses": (TwoLosses, {}, {}),
    "drops_by_hand": (DropsByHand, {}, {}),
    "sharpness": (Sharpness, {}, {}),
    "sets_gradients": (SetsGradients, {}, {}),
    "sets_some_gradients": (SetsSomeGradients, {}, {}),
    "changes_gradients": (ChangesGradients, {}, {"max_epochs": 2}),
    "changes_and_accumulates": (ChangesGradients, {}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}),
    "manual_changes": (ManualChanges, {}, {}),
    "wgan_gp": (WGanGP, {}, {}),
    "checkpoint": (Checkpointed, {}, {}),
    "checkpoint_reentrant": (CheckpointedReentrant, {}, {}),
    "sparse": (SparseEmbedding, {}, {}),
    "own_hooks": (OwnHooks, {}, {}),
    "none_on_all": (NoneNow, {}, {}),
    "none_on_all_accumulating": (NoneNow, {}, {"accumulate_grad_batches": 2}),
    "lazy": (LazyLayer, {}, {}),
    "configure_model": (LateLayers, {}, {}),
    "finetuning": (Finetuned, {}, {"max_epochs": 3, "callbacks": (Unfreeze,)}),
    "finetuning_accumulating": (
        Finetuned,
        {},
        {"max_epochs": 2, "callbacks": (Unfreeze,), "accumulate_grad_batches": 3},
    ),
    "freeze_by_hand": (FreezeByHand, {}, {}),
    "follows_between": (FollowsBetween, {}, {}),
    "odd_numbers": (OddNumbers, {}, {"gradient_clip_val": 0.05}),
    "state_before_steps": (StateBeforeSteps, {}, {}),
    "renormalized": (Renormalized, {}, {}),
    "left_out": (LeftOut, {}, {}),
    "lazy_uncalled": (LazyUncalled, {}, {}),
    "step_scheduler": (StepScheduler, {}, {"max_epochs": 2}),
    "plateau_epoch": (Plateau, {"interval": "epoch", "monitor": "train_loss_epoch"}, {"max_epochs": 4}),
    "plateau_step": (Plateau, {"interval": "step", "monitor": "train_loss"}, {"max_epochs": 2}),
    "accumulation_odd": (Plain, {}, {"accumulate_grad_batches": 3, "max_epochs": 2}),
    "anomaly": (Plain, {}, {"detect_anomaly": True}),
    "clip_algorithm_value": (Plain, {}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
}


def _fit(strategy, devices, name):
    module_class, module_kwargs, trainer_kwargs = CASES[name]
    trainer_kwargs = dict(trainer_kwargs)
    callbacks = [make() for make in trainer_kwargs.pop("callbacks", ())]
    torch.manual_seed(11)
    module = module_class(**module_kwargs)
    trainer = quiet_trainer(
        strategy=strategy, devices=devices, use_distributed_sampler=False, callbacks=callbacks, **trainer_kwargs
    )
    trainer.fit(module, datamodule=Data(points(BATCH * STEPS)))
    assert not torch.is_inference_mode_enabled()
    return {
        "losses": {"loss": global_losses(module.losses, devices)},
        "weights": snapshot(module),
        "lr": {str(i): torch.tensor(o.param_groups[0]["lr"]) for i, o in enumerate(trainer.optimizers)},
        "steps": {"global_step": torch.tensor(trainer.global_step)},
    }


#: Cases that a strategy refuses, with words of the message.
REFUSED = {
    "renormalized": dict.fromkeys(
        ("pardist_ddp", "pardist_zero1", "pardist_zero2", "pardist_zero3"), "'table' has max_norm"
    ),
    "left_out": dict.fromkeys(
        ("pardist_ddp", "pardist_zero1", "pardist_zero2", "pardist_zero3"), "ignore leaves 'second.bias' \\(1 in all"
    ),
    "lazy_uncalled": dict.fromkeys(
        ("pardist_ddp", "pardist_zero1", "pardist_zero2", "pardist_zero3"), "'second.weight' has no shape before"
    ),
    # Within training_step the module's parameters are gathered ones, but their gradients are not.
    "manual_changes": {"pardist_zero3": "reads or changes the gradient of"},
    "sharpness": {"pardist_zero3": "reads or changes the gradient of"},
    "sets_gradients": {"pardist_zero3": "the step sets the gradient of"},
    "sets_some_gradients": {"pardist_zero3": "the step sets the gradient of"},
    "sparse": {"pardist_zero1": "SparseAdam", "pardist_zero2": "SparseAdam", "pardist_zero3": "SparseAdam"},
}


def _one(strategy, name):
    return _fit(strategy, dist.get_world_size(), name)


def _refused(strategy, name, words):
    with pytest.raises((ValueError, RuntimeError), match=words):
        _fit(strategy, dist.get_world_size(), name)


@functools.cache
def _expected(name):
    return _fit("auto", 1, name)


def _cells():
    cells = []
    for strategy in ("pardist_ddp", "pardist_zero1", "pardist_zero2", "pardist_zero3"):
        for name in CASES:
            # Stages 1 and 2 differ only in what the other tests of ZeRO cover.
            marks = pytest.mark.slow if strategy == "pardist_zero2" and name != "changes_gradients" else ()
            cells.append(pytest.param(strategy, name, marks=marks))
    return cells


@pytest.mark.push(
    "pardist_zero3-*",
    "pardist_ddp-dict",
    "pardist_ddp-gan",
    "pardist_ddp-lbfgs",
    "pardist_ddp-sparse",
    "pardist_ddp-manual*",
    "pardist_zero2-finetuning",
    "pardist_zero2-accumulation_odd",
)
@pytest.mark.parametrize(("strategy", "name"), _cells())
def test_same_as_one_process(strategy, name):
    if words := REFUSED.get(name, {}).get(strategy):
        run_ranks(2, _refused, strategy, name, words)
        return
    for got in run_ranks(2, _one, strategy, name):
        for part, expected in _expected(name).items():
            assert_close(got[part], expected)


class LogsNorms(Plain):
    """Logs gradient norms as in Lightning's documentation, with two dtypes."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.second.double()

    def forward(self, x):
        return self.second(self.first(x).tanh().double()).float()

    def on_before_optimizer_step(self, optimizer):
        self.norms = {**grad_norm(self, 2), **grad_norm(self.second, "inf", group_separator=".")}
        self.log_dict(grad_norm(self, 2))


def _norms(strategy):
    torch.manual_seed(11)
    module = LogsNorms()
    devices = 1 if strategy == "auto" else dist.get_world_size()
    trainer = quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False)
    trainer.fit(module, datamodule=Data(points(BATCH * STEPS)))
    logged = {name: value for name, value in trainer.callback_metrics.items() if name.startswith("grad")}
    return {"norms": module.norms, "logged": logged}


@pytest.mark.push("pardist_pp", "pardist_zero3")
@pytest.mark.parametrize("strategy", ["pardist_ddp", "pardist_zero2", "pardist_zero3", "pardist_tp", "pardist_pp"])
def test_gradient_norms_that_users_log(strategy):
    expected = _norms("auto")
    for got in run_ranks(2, _norms, strategy):
        for part in expected:
            assert_close(got[part], expected[part])


class SetBySamples(Plain):
    """Data-dependent initialization of a shift (ActNorm): each rank has a different first batch."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.shift = nn.Parameter(torch.zeros(6))
        self.register_buffer("is_set", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        if not self.is_set:
            self.shift.data.copy_(-batch[0].mean(0))
            self.is_set.fill_(1.0)
        return F.mse_loss(self(batch[0] + self.shift), batch[1])


@pytest.mark.parametrize("strategy", ["pardist_ddp", "pardist_zero2"])
def test_parameters_that_a_step_sets_by_samples(strategy):
    (left, said), (right, _) = run_ranks(2, _fit_weights_and_warnings, strategy, SetBySamples)
    assert_close(left, right)
    assert any("sets parameters from each rank's own samples (shift)" in each for each in said)


class NoneOnSecondRank(Plain):
    """The second rank skips a batch. The equivalent on one process: half the loss, of half the samples."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        if batch_idx == 1:
            if self.trainer.world_size == 1:
                return F.mse_loss(self(x[::2]), y[::2]) / 2
            if self.global_rank == 1:
                return None
        return loss


def _fit_weights(strategy, devices, module_class, trainer_kwargs=None, loader=None):
    torch.manual_seed(11)
    module = module_class()
    trainer = quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False, **(trainer_kwargs or {}))
    if loader is None:
        trainer.fit(module, datamodule=Data(points(BATCH * STEPS)))
    else:
        trainer.fit(module, loader(trainer.global_rank, trainer.world_size))
    return snapshot(module)


def _fit_weights_and_warnings(strategy, module_class):
    with mock.patch.object(data_duties, "rank_zero_warn") as warn:
        weights = _fit_weights(strategy, dist.get_world_size(), module_class)
    return weights, [call.args[0] for call in warn.call_args_list]


def _ddp_weights(*args):
    return _fit_weights("pardist_ddp", dist.get_world_size(), *args)


@pytest.mark.parametrize("trainer_kwargs", [{}, {"accumulate_grad_batches": 2}], ids=["plain", "accumulating"])
def test_step_without_loss_on_one_rank(trainer_kwargs):
    want = _fit_weights("auto", 1, NoneOnSecondRank, trainer_kwargs)
    for got in run_ranks(2, _ddp_weights, NoneOnSecondRank, trainer_kwargs):
        assert_close(got, want)


class Stream(IterableDataset):
    def __init__(self, rank, world_size):
        self.samples = [s for i, s in enumerate(points(BATCH * STEPS)) if i % world_size == rank]

    def __iter__(self):
        return iter(self.samples)


def _stream_loader(rank, world_size):
    return DataLoader(Stream(rank, world_size), batch_size=BATCH // world_size)


def test_iterable_dataset():
    want = _fit_weights("auto", 1, Plain, {}, _stream_loader)
    for got in run_ranks(2, _ddp_weights, Plain, {}, _stream_loader):
        assert_close(got, want)


class Calls(Callback):
    """Counts all-reduces of gradients per batch; counts of losses are sent as doubles and excluded."""

    def __init__(self):
        self.counts = []

    def on_train_batch_start(self, *args):
        self.patch = mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce)
        self.spy = self.patch.start()

    def on_train_batch_end(self, *args):
        self.patch.stop()
        self.counts.append(sum(_is_bucket(call.args[0]) for call in self.spy.call_args_list))


def _is_bucket(tensor):
    return tensor.numel() > 50 and tensor.dtype == torch.float32


def _count(kwargs):
    calls = Calls()
    trainer = quiet_trainer(
        strategy="pardist_ddp", devices=2, callbacks=[calls, *kwargs.pop("callbacks", [])], logger=False, **kwargs
    )
    torch.manual_seed(0)
    trainer.fit(Plain(), DataLoader(points(14), batch_size=1))
    return calls.counts


def test_accumulation_sends_nothing_before_the_boundary():
    # 7 batches per rank: the last is an accumulation boundary, too.
    assert run_ranks(2, _count, {"accumulate_grad_batches": 3}) == [[0, 0, 1, 0, 0, 1, 1]] * 2
    schedule = GradientAccumulationScheduler({0: 1, 1: 4})
    counts = run_ranks(2, _count, {"callbacks": [schedule], "max_epochs": 2})
    assert counts == [[1] * 7 + [0, 0, 0, 1, 0, 0, 1]] * 2


class SeesGradients(Plain):
    """Reads gradients in hooks of the module and of callbacks."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def look(self):
        self.seen.append(self.first.weight.grad.clone())

    def on_after_backward(self):
        self.look()

    def on_before_optimizer_step(self, optimizer):
        self.look()

    def on_before_zero_grad(self, optimizer):
        if self.first.weight.grad is not None:
            self.look()


class Looker(Callback):
    def on_after_backward(self, trainer, pl_module):
        pl_module.look()

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pl_module.look()


def _seen(strategy="pardist_ddp", devices=2):
    torch.manual_seed(11)
    module = SeesGradients()
    trainer = quiet_trainer(
        strategy=strategy, devices=devices, use_distributed_sampler=False, callbacks=[Looker()], gradient_clip_val=0.1
    )
    trainer.fit(module, datamodule=Data(points(BATCH * STEPS)))
    return dict(enumerate(module.seen))


def test_hooks_see_averaged_gradients():
    want = _seen("auto", 1)
    assert len(want) >= 4 * STEPS
    for got in run_ranks(2, _seen):
        assert_close(got, want)


class OwnZeroGrad(Plain):
    """Overrides the method that Lightning calls before training, and before validation during training."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def zero_grad(self, *args, **kwargs):
        self.calls += 1
        super().zero_grad(*args, **kwargs)


def _own_zero_grad(strategy):
    found = []
    for on_instance in (False, True):
        module = OwnZeroGrad()
        if on_instance:
            module.zero_grad = functools.partial(OwnZeroGrad.zero_grad, module)
        own = module.zero_grad
        quiet_trainer(strategy=strategy).fit(module, datamodule=Data(points(BATCH)))
        assert module.zero_grad == own
        found.append(module.calls)
    return found


@pytest.mark.parametrize("strategy", ["pardist_ddp", "pardist_zero2"])
def test_zero_grad_of_the_user(strategy):
    assert run_ranks(1, _own_zero_grad, strategy) == [_own_zero_grad("auto")]


def _fit_again(strategy="pardist_ddp", devices=2):
    torch.manual_seed(11)
    module = Plain()
    trainer = quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False)
    trainer.fit(module, datamodule=Data(points(BATCH * STEPS)))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, datamodule=Data(points(BATCH * STEPS)))
    other = Classifier()
    trainer.fit_loop.max_epochs = 3
    trainer.fit(other, datamodule=Data(other.dataset(BATCH * STEPS)))
    hooks = [p for p in module.parameters() if getattr(p, "_post_accumulate_grad_hooks", None)]
    assert not hooks
    return snapshot(module) | snapshot(other)


def test_one_trainer_fits_again_and_another_module():
    want = _fit_again("auto", 1)
    for got in run_ranks(2, _fit_again):
        assert_close(got, want)


def _empty_init():
    trainer = quiet_trainer(strategy="pardist_ddp", devices=2)
    with trainer.init_module(empty_init=True):
        module = Plain()
    with torch.no_grad():
        # Every rank starts from uninitialized memory: rank zero's values must be used.
        for param in module.parameters():
            param.fill_(0.1 * (1 + trainer.global_rank))
    trainer.fit(module, DataLoader(points(8), batch_size=2))
    return snapshot(module)


def test_init_module_and_one_start_for_all():
    first, second = run_ranks(2, _empty_init)
    assert_close(second, first, rtol=0)


def _overfit(strategy="pardist_ddp", devices=2):
    torch.manual_seed(11)
    module = Plain()
    dataset = points(16)
    trainer = quiet_trainer(strategy=strategy, devices=devices, overfit_batches=2, max_epochs=2)
    trainer.fit(module, DataLoader(dataset, batch_size=4 // devices, shuffle=True), DataLoader(dataset, batch_size=2))
    return snapshot(module)


def test_overfit_batches():
    want = _overfit("auto", 1)
    for got in run_ranks(2, _overfit):
        assert_close(got, want)


def _own_sampler():
    seen = []

    class Records(Plain):
        def training_step(self, batch, batch_idx):
            seen.extend(batch[0][:, 0].tolist())
            return super().training_step(batch, batch_idx)

    dataset = points(12)
    rank = dist.get_rank()
    own = DistributedSampler(dataset, num_replicas=2, rank=rank, shuffle=True, seed=4)
    trainer = quiet_trainer(strategy="pardist_ddp", devices=2)
    trainer.fit(Records(), DataLoader(dataset, batch_size=2, sampler=own))
    assert trainer.train_dataloader.sampler is own
    expected = [dataset[i][0][0].item() for i in own]
    assert seen == expected
    seen.clear()
    quiet_trainer(strategy="pardist_ddp", devices=2, use_distributed_sampler=False).fit(
        Records(), DataLoader(dataset, batch_size=2)
    )
    assert seen == [point[0][0].item() for point in dataset]
    return True


def test_samplers_of_the_user_are_kept():
    assert run_ranks(2, _own_sampler) == [True, True]


class Quiet(Plain):
    """Logs nothing: torch's compiler cannot trace ``self.log`` of lightning 2.6, not even on one process."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self(x), y)

    def validation_step(self, batch, batch_idx):
        return self.training_step(batch, batch_idx)


class CompiledPart(Quiet):
    def __init__(self):
        super().__init__()
        self.first = torch.compile(self.first, backend="aot_eager")


def _fit_compiled(part, strategy="pardist_ddp", devices=2):
    torch.manual_seed(11)
    module = CompiledPart() if part else Quiet()
    fitted = module if part else torch.compile(module, backend="eager")
    strategy = FSDPStrategy(min_unit_size_mb=0) if strategy == "units" else strategy
    trainer = quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False)
    trainer.fit(fitted, datamodule=Data(points(BATCH * STEPS)))
    trainer.validate(fitted, DataLoader(points(4)), verbose=False)
    return {name.replace("_orig_mod.", ""): value for name, value in snapshot(module).items()}


@pytest.mark.push("part-units", "whole-pardist_zero2")
@pytest.mark.parametrize(
    "strategy", ["pardist_ddp", pytest.param("pardist_zero1", marks=pytest.mark.slow), "pardist_zero2", "units"]
)
@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
def test_compiled(part, strategy):
    want = _fit_weights("auto", 1, Plain)
    for got in run_ranks(2, _fit_compiled, part, strategy):
        assert_close(got, want)
