"""Gradients under ZeRO-1 and 2 as seen by users in ``param.grad``: whole, lazy, and modifiable."""

import copy
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.utils.data import DataLoader

from lightning_pardist import PipelineStrategy, TensorParallelStrategy, ZeroStrategy
from lightning_pardist.engines.common.gradient_norm import clip_grad_norm
from lightning_pardist.engines.zero import ZeroEngine
from lightning_pardist.engines.zero.sharded_bucket import ShardedBucket
from tests.helpers.models import points
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, Data, quiet_trainer
from tests.integration.test_optimization import Plain

STEPS = 4


class Changes(Plain):
    """Changes each gradient that this rank has in a different way."""

    def on_before_optimizer_step(self, optimizer):
        for index, param in enumerate(self.parameters()):
            if param.grad is None:
                continue
            param.grad.mul_(0.5)
            if index % 2:
                param.grad = param.grad * 0.9
            param.grad.add_(param.detach().sin(), alpha=0.1)
        if self.global_step % 2:
            self.first.weight.grad = None


SPLIT = {
    "zero2": (functools.partial(ZeroStrategy, zero_stage=2, bucket_size_mb=1e-5), 2),
    "offload": (functools.partial(ZeroStrategy, zero_stage=1, offload="cpu"), 2),
    "tp": (functools.partial(TensorParallelStrategy, tensor_parallel_size=2, data_parallel="zero1"), 2),
    "tp-4": (functools.partial(TensorParallelStrategy, tensor_parallel_size=2, data_parallel="zero2"), 4),
    "pp": (functools.partial(PipelineStrategy, pipeline_parallel_size=2, data_parallel="zero1"), 2),
    "pp-4": (functools.partial(PipelineStrategy, pipeline_parallel_size=2, data_parallel="zero2"), 4),
    "pp1-4": (functools.partial(PipelineStrategy, pipeline_parallel_size=2, data_parallel="zero1"), 4),
}
QUICK = ("offload", "tp-4", "pp-4")


def _fit(strategy, devices, **kwargs):
    torch.manual_seed(11)
    module = Changes()
    trainer = quiet_trainer(
        strategy=strategy if isinstance(strategy, str) else strategy(),
        devices=devices,
        use_distributed_sampler=False,
        **kwargs,
    )
    trainer.fit(module, datamodule=Data(points(BATCH * STEPS)))
    return snapshot(module)


def _ranks(row, kwargs):
    strategy, devices = SPLIT[row]
    return _fit(strategy, devices, **kwargs)


@pytest.mark.parametrize("row", [row if row in QUICK else pytest.param(row, marks=pytest.mark.slow) for row in SPLIT])
def test_changed_by_hand_beside_other_axes(row):
    kwargs = {"accumulate_grad_batches": 2, "max_epochs": 2, "gradient_clip_val": 0.2}
    want = _fit("auto", 1, **kwargs)
    for got in run_ranks(SPLIT[row][1], _ranks, row, kwargs):
        assert_close(got, want)


class Totals(Plain):
    """Clips in two steps, by the norm of all gradients; with or without the other ranks' gradients, which are None."""

    def on_before_optimizer_step(self, optimizer):
        params = list(self.parameters())
        total = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        largest = nn.utils.get_total_norm((p.grad for p in params), float("inf"))
        own = [nn.utils.get_total_norm([p.grad]) for p in params if p.grad is not None]
        assert max(own) <= total
        nn.utils.clip_grads_with_norm_(params, 0.05, total)
        self.norms = [*getattr(self, "norms", ()), total + largest]


def _totals(strategy):
    torch.manual_seed(11)
    module = Totals()
    devices = 1 if strategy == "auto" else dist.get_world_size()
    trainer = quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False)
    trainer.fit(module, datamodule=Data(points(BATCH * STEPS)))
    return {"norms": torch.tensor(module.norms)}, snapshot(module)


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("pardist_pp", 2), ("pardist_mp", 2), (SPLIT["pp-4"][0], 4)], ids=["pp", "mp", "pp-4"]
)
def test_norms_of_all_gradients_where_ranks_hold_stages(strategy, ranks):
    wanted = _totals("auto")
    for of_rank in run_ranks(ranks, _totals, strategy if isinstance(strategy, str) else strategy()):
        for got, want in zip(of_rank, wanted, strict=True):
            assert_close(got, want)


class Asks(Plain):
    """Reads gradients' existence, shapes and norms, and zeroes them in every way."""

    def on_before_optimizer_step(self, optimizer):
        assert all(param.grad is not None and param.grad.shape == param.shape for param in self.parameters())
        assert all(param.grad.dtype == param.dtype and not param.grad.requires_grad for param in self.parameters())
        grad_norm(self, 2)
        copy.deepcopy(self)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx == 0:
            optimizer.zero_grad()
        elif batch_idx == 1:
            optimizer.zero_grad(set_to_none=False)
        elif batch_idx == 2:
            self.zero_grad(set_to_none=False)
        else:
            self.first.zero_grad()
            self.second.zero_grad()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        F.mse_loss(self(x), y)


class AsksCompiled(Asks):
    def __init__(self):
        super().__init__()
        self.first = torch.compile(self.first, backend="aot_eager")


def _asked(strategy, devices, module_class=Asks):
    torch.manual_seed(11)
    module = module_class()
    trainer = quiet_trainer(
        strategy=strategy,
        devices=devices,
        use_distributed_sampler=False,
        gradient_clip_val=0.1,
        max_epochs=2,
        limit_val_batches=1,
        val_check_interval=3,
    )
    with mock.patch.object(ShardedBucket, "read_gradients", side_effect=AssertionError("gathered")):
        data = Data(points(BATCH * STEPS))
        data.val_dataloader = lambda: DataLoader(points(4), batch_size=2)
        trainer.fit(module, datamodule=data)
    return {name.replace("_orig_mod.", ""): value for name, value in snapshot(module).items()}


@pytest.mark.parametrize("strategy", ["pardist_zero1", "pardist_zero2"])
@pytest.mark.parametrize("module_class", [Asks, pytest.param(AsksCompiled, marks=pytest.mark.slow)])
def test_nothing_is_gathered_unless_values_are_read(strategy, module_class):
    want = _asked("auto", 1)
    for got in run_ranks(2, _asked, strategy, 2, module_class):
        assert_close(got, want)


def _masters():
    torch.manual_seed(0)
    module = nn.Conv2d(3, 5, 3).to(torch.bfloat16).to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 6, 6, dtype=torch.bfloat16)
    engine = ZeroEngine(module, [torch.optim.SGD(module.parameters(), lr=0.1)], group=dist.group.WORLD, zero_stage=2)
    loss = module(images[dist.get_rank()][None]).square().mean()
    with engine.backward(loss):
        loss.backward()
    exact = [grad.clone() for grad in engine.local_grads(module.parameters())]
    weight = module.weight.grad
    assert weight.dtype == torch.bfloat16
    assert len(repr(weight)) > 100
    listed = torch.tensor(weight.tolist())
    # Reading gradients does not reduce the precision of those that are stepped with.
    assert all(map(torch.equal, exact, engine.local_grads(module.parameters())))
    weight[0].zero_()
    engine.grad_power(module.parameters())
    assert (module.weight.grad[0] == 0).all()
    assert torch.equal(module.weight.grad[1:].float(), listed[1:])
    module.zero_grad()
    engine.zero_grad()
    assert not engine.has_gradients
    unread = module.bias.grad
    assert unread is None
    engine.detach()
    return listed


def test_half_precision_keeps_its_digits():
    first, second = run_ranks(2, _masters)
    assert torch.equal(first, second)


def _too_late():
    module = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = ZeroEngine(module, [optimizer], group=dist.group.WORLD, zero_stage=1)
    kept = []
    for step in range(2):
        loss = module(torch.ones(1, 3)).sum()
        with engine.backward(loss):
            loss.backward()
        kept.append(module.weight.grad)
        if step == 0:
            module.bias.grad.norm()
        optimizer.zero_grad()
    engine.detach()
    read, unread = kept
    assert read.sum() == 6
    with pytest.raises(RuntimeError, match="clone"):
        (unread + 1).sum()


def test_a_gradient_read_after_it_was_dropped():
    run_ranks(2, _too_late)


def _given():
    torch.manual_seed(0)
    module = nn.ModuleDict({"wide": nn.Linear(30, 20).double(), "narrow": nn.Linear(3, 2)})
    start = snapshot(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = ZeroEngine(module, [optimizer], group=dist.group.WORLD, zero_stage=2)
    for param in module["wide"].parameters():
        param.grad = torch.ones_like(param)
    narrow = module["narrow"]
    norm = clip_grad_norm(engine, module.parameters(), 1.0)
    assert_close({"norm": norm}, {"norm": torch.tensor(620.0, dtype=torch.float64).sqrt()})
    assert narrow.weight.grad is None
    optimizer.step()
    moved = snapshot(module)
    engine.detach()
    factor = 1.0 / 620.0**0.5
    for name, before in start.items():
        assert_close({name: moved[name]}, {name: before - 0.1 * factor * name.startswith("wide")})


def test_given_without_a_backward_pass():
    """Some slices have no gradients, and none in the widest dtype."""
    run_ranks(2, _given)
