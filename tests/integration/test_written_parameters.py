"""Values that layers and hooks write into gathered parameters reach the shards, and are equal on all ranks."""

import copy
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_pardist import FSDPStrategy
from lightning_pardist.axes import fsdp
from lightning_pardist.trainer import data_duties
from tests.helpers.models import Base, points
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, STEPS, Data, global_losses, quiet_trainer

#: Replicated, gathered through each step, gathered for calls, kept until backward, and replicas of these.
STRATEGIES = {
    "ddp": lambda: "pardist_ddp",
    "zero3": FSDPStrategy,
    "units": functools.partial(FSDPStrategy, min_unit_size_mb=0),
    "kept": functools.partial(FSDPStrategy, min_unit_size_mb=0, reshard_after_forward=False),
    "hsdp": functools.partial(FSDPStrategy, min_unit_size_mb=0, data_shard_size=1),
    "coded": functools.partial(FSDPStrategy, min_unit_size_mb=0, gather="int8"),
}


class ActNorm(nn.Module):
    """Data-dependent initialization by the first batch, which differs per rank."""

    def __init__(self):
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(6))
        self.register_buffer("is_set", torch.zeros(()))

    def forward(self, x):
        if not self.is_set:
            self.shift.data.copy_(-x.mean(0))
            self.scale.data = -x.std(0).log()
            self.is_set.fill_(1.0)
        return (x + self.shift) * self.scale.exp()


class Clamped(nn.Linear):
    """Clamps its weight by an operation that autograd tracks."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


class Normalized(nn.Linear):
    """Writes by ``.data``, which autograd does not track, from the third call on, when writes are no longer watched."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 2:
            self.weight.data = F.normalize(self.weight.data, dim=1)
            self.bias.data.mul_(0.5)
        return super().forward(x)


class Written(Base):
    """Layers that set their own parameters, and hooks that set the parameters gathered at that moment."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first, self.second, self.last = Clamped(6, 8), Normalized(8, 8), nn.Linear(8, 1)
        self.second.register_full_backward_hook(self.shrink)

    def shrink(self, module, given, got):
        module.bias.data.mul_(0.9)

    def forward(self, x):
        return self.last(self.second(self.first(x).tanh()).tanh())

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        if batch_idx == 1:
            self.last.weight.data.mul_(0.9)
        return self.note(loss)

    def on_before_zero_grad(self, optimizer):
        for parameter in self.parameters():
            # Between forward and backward, also for parameters whose memory forward has replaced.
            parameter.data.clamp_(-0.3, 0.3)


class SetByBatches(Base):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norms = nn.ModuleList([ActNorm(), ActNorm()])
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        for norm in self.norms:
            x = norm(x)
        return self.note(F.mse_loss(self.second(self.first(x).tanh()), y))


class SetByOneRank(SetByBatches):
    """Late writes by a layer: on one rank other than the first, and on the first one a step later."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first.register_forward_pre_hook(self.write)
        self.step = 0

    def write(self, layer, given):
        if self.step - 2 == 1 - self.trainer.global_rank:
            layer.weight.data.fill_(0.1 * (1 + self.trainer.global_rank))

    def training_step(self, batch, batch_idx):
        self.step = batch_idx
        return super().training_step(batch, batch_idx)


class SetInSanityCheck(SetByBatches):
    def validation_step(self, batch, batch_idx):
        x, _ = batch
        self.log("val", self.norms[0](x).mean())


class Evaluated(Data):
    def val_dataloader(self):
        return self.train_dataloader()


def _fit(strategy, module_class):
    torch.manual_seed(11)
    module = module_class()
    devices = dist.get_world_size() if dist.is_initialized() else 1
    made = STRATEGIES[strategy]() if strategy in STRATEGIES else strategy
    trainer = quiet_trainer(strategy=made, devices=devices, use_distributed_sampler=False)
    data = Evaluated if "validation_step" in module_class.__dict__ else Data
    trainer.fit(module, datamodule=data(points(BATCH * STEPS)))
    return {"losses": {"loss": global_losses(module.losses, devices)}, "weights": snapshot(module)}


def _fit_all(strategies, module_class):
    found, said = [], []
    for strategy in strategies:
        with (
            mock.patch.object(data_duties, "rank_zero_warn") as first,
            mock.patch.object(fsdp, "rank_zero_warn") as warn,
        ):
            found.append(_fit(strategy, module_class))
        calls = [*first.call_args_list, *warn.call_args_list]
        said.append([call.args[0] for call in calls if "from each rank's own samples (" in call.args[0]])
    return found, said


def _same(found, expected):
    for part in expected:
        assert_close(found[part], expected[part])


@pytest.mark.parametrize(
    "strategies", [("zero3", "units"), pytest.param(("kept", "hsdp"), marks=pytest.mark.slow)], ids="-".join
)
def test_what_layers_and_hooks_write_is_one_processs(strategies):
    expected = _fit("auto", Written)
    for found, said in run_ranks(2, _fit_all, strategies, Written):
        assert said == [[]] * len(strategies)
        for each in found:
            _same(each, expected)


@pytest.mark.parametrize(
    "strategies", [("zero3", "units"), pytest.param(("kept", "hsdp"), marks=pytest.mark.slow)], ids="-".join
)
def test_what_ranks_set_by_their_own_samples_is_that_of_ddp(strategies):
    for (ddp, *found), said in run_ranks(2, _fit_all, ("ddp", *strategies), SetByBatches):
        assert all("norms.0.shift, norms.0.scale, norms.1.shift, norms.1.scale" in "".join(each) for each in said)
        for each in found:
            _same(each, ddp)


def test_a_rank_that_writes_alone_waits_for_nobody_and_the_first_ranks_values_are_taken():
    (first, said), (second, _) = run_ranks(2, _fit_all, ("zero3", "units"), SetByOneRank)
    assert all("first.weight" in "".join(each) for each in said)
    for mine, other in zip(first, second, strict=True):
        _same(mine, other)


def test_what_evaluation_sets_is_the_same_on_all_ranks():
    (first, said), (second, _) = run_ranks(2, _fit_all, ("units",), SetInSanityCheck)
    assert "norms.0.shift, norms.0.scale" in "".join(said[0])
    _same(first[0], second[0])


class Momentum(Base):
    """EMA teacher that is copied when the module is already sharded."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.net[0].register_forward_hook(lambda module, given, output: output * 2)
        self.teacher = []

    def on_fit_start(self):
        self.teacher = [copy.deepcopy(self.net).requires_grad_(False)]

    def training_step(self, batch, batch_idx):
        x, y = batch
        (teacher,) = self.teacher
        assert all(type(parameter) is nn.Parameter for parameter in teacher.parameters())
        with torch.no_grad():
            for mine, theirs in zip(self.net.parameters(), teacher.parameters(), strict=True):
                theirs.mul_(0.9).add_(mine, alpha=0.1)
            wanted = teacher(x)
        found = self.net(x)
        return self.note(F.mse_loss(found, y) + F.mse_loss(found, wanted + 0.1))


def test_a_copy_of_a_sharded_module_is_whole():
    expected = _fit("auto", Momentum)
    for found, _ in run_ranks(2, _fit_all, ("zero3", "units"), Momentum):
        for each in found:
            _same(each, expected)


class Replaced(Base):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.note(F.mse_loss(self.net(x), y))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.net[2].weight = nn.Parameter(torch.full((1, 8), 0.1))


class Grown(Replaced):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.net[2] = nn.Linear(8, 1)
            self.trainer.optimizers[0].add_param_group({"params": [*self.net[2].parameters()]})


class Reshaped(Replaced):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            self.net[2].weight.data = torch.zeros(3, 8)
        return super().training_step(batch, batch_idx)


class Cast(Reshaped):
    def training_step(self, batch, batch_idx):
        x, y = batch
        self.net[0].to(torch.float64)
        return self.note(F.mse_loss(self.net[2](self.net[0](x.double()).float()), y))


class Hooked(Replaced):
    """Hooks on parameters' gradients, gradients with replaced data, and draws in the middle of a run."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.net[0].weight.register_hook(lambda gradient: 0.5 * gradient)

    def on_fit_start(self):
        self.net[2].weight.register_hook(lambda gradient: 0.25 * gradient)
        self.removed = self.net[0].bias.register_hook(lambda gradient: 3.0 * gradient)

    def on_before_optimizer_step(self, optimizer):
        self.net[2].bias.grad.data = 0.5 * self.net[2].bias.grad

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.removed.remove()
            torch.manual_seed(5)
            nn.init.normal_(self.net[0].weight)
            nn.init.orthogonal_(self.net[0].weight)
            self.net[2].reset_parameters()


def test_hooks_on_gradients_their_data_and_draws_are_those_of_one_process():
    expected = _fit("auto", Hooked)
    for found, _ in run_ranks(2, _fit_all, ("zero3", "units"), Hooked):
        for each in found:
            _same(each, expected)


def _refused(module_class, expected, strategies=("zero3", "units")):
    for strategy in strategies:
        with pytest.raises((RuntimeError, ValueError), match=expected):
            _fit(strategy, module_class)


@pytest.mark.parametrize(
    ("module_class", "expected"),
    [
        (Replaced, r"net\.2\.weight was replaced, moved or removed"),
        (Grown, "SGD was given a parameter of shape"),
        (Reshaped, "shape"),
    ],
)
def test_what_cannot_be_carried_is_refused(module_class, expected):
    run_ranks(2, _refused, module_class, expected)


class FrozenCast(Replaced):
    """Frozen teacher that is cast when it is first used."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.teacher = nn.Linear(6, 6).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.teacher.to(torch.float64)
        return self.note(F.mse_loss(self.net(self.teacher(x.double()).float()), y))


def _cast_frozen():
    _fit("ddp", FrozenCast)


def test_what_does_not_train_may_be_cast():
    run_ranks(2, _cast_frozen)


def test_a_step_that_casts_parameters_is_refused():
    run_ranks(
        2, _refused, Cast, r"net\.0\.(weight|bias) is torch.float32 and a step casts it", ("ddp", "zero3", "units")
    )
