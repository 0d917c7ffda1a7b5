"""Patterns of published Lightning applications under every strategy, against one process."""

import copy
import functools
import io

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_pardist import FSDPStrategy
from tests.helpers.models import Base, points
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, Data, quiet_trainer

STEPS = 4
#: One strategy for each way of holding parameters, and one that combines them.
SPLITTING = ["pardist_ddp", "pardist_zero2", "pardist_zero3", "pardist_tp", "pardist_pp", "pardist_3d"]


class Net(Base):
    """Three layers in sequence."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        self.log("val", F.mse_loss(self.net(batch[0]), batch[1]))


def train(module_class, strategy, devices, kwargs, fits=1, between=None, **trainer_kwargs):
    """Return the weights after the given number of fits, each with a new Trainer, and the module's own records."""
    torch.manual_seed(11)
    module = module_class(**kwargs)
    for _ in range(fits):
        trainer = quiet_trainer(
            strategy=strategy() if callable(strategy) else strategy,
            devices=devices,
            use_distributed_sampler=False,
            **trainer_kwargs,
        )
        trainer.fit(module, datamodule=Data(points(BATCH * STEPS)))
        if between == "validate":
            trainer.validate(module, DataLoader(points(BATCH)), verbose=False)
        elif between == "step":
            # As left behind by a run on one process.
            module.own.zero_grad()
            module.training_step(next(iter(DataLoader(points(BATCH), batch_size=BATCH))), 0).backward()
            module.own.step()
    return {"weights": snapshot(module), "noted": getattr(module, "noted", None)}


def compare(module_class, strategy, devices=2, **kwargs):
    devices = 4 if strategy == "pardist_3d" else devices
    options = {key: kwargs.pop(key) for key in ("fits", "between", "sync_batchnorm") if key in kwargs}
    work = functools.partial(train, module_class, kwargs=kwargs, **options)
    alone = work("auto", 1)
    before = snapshot(_made(module_class, kwargs))
    assert any(not torch.equal(before[name], value) for name, value in alone["weights"].items())
    for rank in run_ranks(devices, work, strategy, devices):
        assert_close(rank["weights"], alone["weights"])
    return alone


def _made(module_class, kwargs):
    torch.manual_seed(11)
    return module_class(**kwargs)


# --- optimizers made in __init__ ------------------------------------------------------------------------------------


class OwnOptimizer(Net):
    """Module that creates its optimizer in ``__init__`` and keeps it."""

    def __init__(self, kind="sgd", **kwargs):
        super().__init__(**kwargs)
        groups = [
            {"params": [p for p in self.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.dim() == 1], "lr": 0.05},
        ]
        if kind == "adagrad":
            # Creates its state in the constructor.
            self.own = torch.optim.Adagrad(groups, lr=0.1, initial_accumulator_value=0.5)
        else:
            self.own = torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def configure_optimizers(self):
        return self.own


class OwnOptimizerByHand(OwnOptimizer):
    """OwnOptimizer with manual optimization, using the attribute instead of ``self.optimizers()``."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.own.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.own.step()


@pytest.mark.push("pardist_3d-sgd", "pardist_zero3-adagrad", "pardist_pp-adagrad", "pardist_tp-sgd")
@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
@pytest.mark.parametrize("strategy", SPLITTING)
def test_optimizer_made_in_init(strategy, kind):
    compare(OwnOptimizer, strategy, kind=kind)


class OwnOptimizerAskedFor(OwnOptimizerByHand):
    """OwnOptimizerByHand with a scheduler of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.own, 0.9)

    def configure_optimizers(self):
        return [self.own], [self.schedule]

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(Net.training_step(self, batch, batch_idx))
        optimizer.step()
        self.lr_schedulers().step()


@pytest.mark.parametrize("module_class", [OwnOptimizerByHand, OwnOptimizerAskedFor])
@pytest.mark.parametrize("strategy", ["pardist_ddp", "pardist_zero3", "pardist_tp"])
def test_optimizer_made_in_init_steps_by_hand(strategy, module_class):
    compare(module_class, strategy)


@pytest.mark.parametrize("strategy", ["pardist_zero2", "pardist_zero3", "pardist_tp", "pardist_pp"])
def test_optimizer_made_in_init_goes_on_in_a_second_run(strategy):
    """Momentum equals one process's, and the optimizer holds the module's parameters between runs."""
    compare(OwnOptimizer, strategy, fits=2)


@pytest.mark.parametrize("between", ["validate", "step"])
@pytest.mark.parametrize("strategy", ["pardist_ddp", "pardist_zero3", "pardist_tp"])
def test_optimizer_made_in_init_outlives_other_runs(strategy, between):
    compare(OwnOptimizer, strategy, fits=2, between=between)


class Stale(Net):
    """The optimizer holds the parameters of a head that has been replaced."""

    def __init__(self):
        super().__init__()
        self.own = torch.optim.SGD(self.parameters(), lr=0.1)
        self.net[4] = nn.Linear(8, 1)

    def configure_optimizers(self):
        return self.own


def _refused(strategy):
    with pytest.raises(ValueError, match=r"SGD .*does not have") as caught:
        train(Stale, strategy, dist.get_world_size(), {})
    return str(caught.value)


@pytest.mark.parametrize("strategy", ["pardist_ddp", "pardist_zero3", "pardist_tp", "pardist_pp"])
def test_optimizer_of_parameters_that_the_module_does_not_have_is_refused(strategy):
    for message in run_ranks(2, _refused, strategy):
        assert "[8, 1]" in message or "(1, 8)" in message


# --- batch norm with a forward of its own ---------------------------------------------------------------------------


class BatchNormAct(nn.BatchNorm1d):
    """Like timm's ``BatchNormAct2d``: its own call of ``F.batch_norm``, then an activation."""

    def forward(self, x):
        training = self.training or self.running_mean is None
        self.num_batches_tracked.add_(1)
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, training, self.momentum, self.eps
        )
        return F.relu(x)


class BatchNormThenAct(nn.BatchNorm1d):
    def forward(self, x):
        return F.relu(super().forward(x)) * self.scale()

    def scale(self):
        return 2.0


class Named(nn.BatchNorm1d):
    """Subclass without its own forward, but with a method that the module calls."""

    def scale(self):
        # Values above 1 make these steps diverge, which amplifies rounding.
        return 0.5


class Normalized(Base):
    def __init__(self, kind="act", **kwargs):
        super().__init__(**kwargs)
        cls = {"act": BatchNormAct, "then": BatchNormThenAct, "named": Named}[kind]
        # No bias before the norm: its gradient is zero up to rounding.
        self.first, self.norm, self.last = nn.Linear(6, 8, bias=False), cls(8), nn.Linear(8, 1)
        self.noted = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = self.norm(self.first(x))
        if isinstance(self.norm, Named):
            x = x * self.norm.scale()
        # Modules find their batch norms by class.
        assert isinstance(self.norm, nn.BatchNorm1d)
        return F.mse_loss(self.last(x), y)


@pytest.mark.parametrize("kind", ["act", "then", "named"])
@pytest.mark.parametrize("strategy", ["pardist_ddp", "pardist_zero3", "pardist_tp"])
def test_batch_norm_keeps_its_own_forward(strategy, kind):
    compare(Normalized, strategy, kind=kind, sync_batchnorm=True)


# --- foreach over a sub-module's parameters -------------------------------------------------------------------------


class Encoder(nn.Sequential):
    """Sequence of layers with a parameter of its own."""

    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.own = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return super().forward(x) * self.own


class MomentumEncoder(Base):
    """BYOL/MoCo-style momentum encoder, updated by ``torch._foreach_*`` in the step."""

    def __init__(self, when="before", **kwargs):
        super().__init__(**kwargs)
        self.online, self.target = Encoder(), Encoder()
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.when = when

    @torch.no_grad()
    def follow(self):
        target, online = [*self.target.parameters()], [*self.online.parameters()]
        if "data" in self.when:
            target, online = [p.data for p in target], [p.data for p in online]
        if "lerp" in self.when:
            torch._foreach_lerp_(target, online, 0.1)
            return
        torch._foreach_mul_(target, 0.9)
        torch._foreach_add_(target, online, alpha=0.1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        if "after" not in self.when:
            self.follow()
        with torch.no_grad():
            aim = self.target(x + y)
        loss = F.mse_loss(self.online(x) * self.scale, aim)
        if "after" in self.when:
            self.follow()
        return loss

    def configure_optimizers(self):
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad])


#: Every layer is a separate unit, however small.
IN_UNITS = functools.partial(FSDPStrategy, min_unit_size_mb=0.0)


@pytest.mark.push("pardist_zero3-*")
@pytest.mark.parametrize("when", ["before", "after", "lerp", "before-data", "lerp-after-data"])
@pytest.mark.parametrize("strategy", ["pardist_ddp", "pardist_zero3", IN_UNITS, "pardist_tp"])
def test_foreach_over_a_sub_module_in_a_step(strategy, when):
    compare(MomentumEncoder, strategy, when=when)


class OwnStatistics(nn.BatchNorm1d):
    def forward(self, x):
        return (x - x.mean(0)) / x.std(0) * self.weight + self.bias


class NormalizedByHand(Normalized):
    def __init__(self):
        super().__init__()
        self.norm = OwnStatistics(8)


def _refuses_statistics(strategy):
    with pytest.raises(ValueError, match=r"cannot synchronize 'norm': the forward of OwnStatistics"):
        train(NormalizedByHand, strategy, dist.get_world_size(), {}, sync_batchnorm=True)


def test_batch_norm_with_statistics_of_its_own_is_refused_by_name():
    run_ranks(2, _refuses_statistics, "pardist_ddp")


class Follower(Normalized):
    """Deep-copies a layer during training, and writes files without regard to ranks."""

    def on_train_start(self):
        self.copied = copy.deepcopy(self.norm)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.copied(self.first(batch[0]))
        return loss

    def on_train_end(self):
        file = io.BytesIO()
        torch.save(self.norm, file)
        file.seek(0)
        self.saved = type(torch.load(file, weights_only=False))


def _follow(strategy):
    torch.manual_seed(11)
    module = Follower()
    trainer = quiet_trainer(
        strategy=strategy, devices=dist.get_world_size(), use_distributed_sampler=False, sync_batchnorm=True
    )
    trainer.fit(module, datamodule=Data(points(BATCH * STEPS)))
    assert module.saved is BatchNormAct
    assert type(module.norm) is BatchNormAct
    assert isinstance(module.copied, BatchNormAct)
    return module.copied.running_mean


def test_copies_of_a_synchronized_batch_norm():
    first, second = run_ranks(2, _follow, "pardist_ddp")
    assert torch.equal(first, second)
