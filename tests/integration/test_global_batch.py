"""Steps with the same global batch on any number of ranks."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from lightning_pardist import DDPStrategy, FSDPStrategy, GlobalBatchSize, PeerFailedError, ZeroStrategy
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer

GLOBAL, SAMPLES = 12, 72
STRATEGIES = {"ddp": DDPStrategy, "zero2": lambda: ZeroStrategy(zero_stage=2), "fsdp": FSDPStrategy, "single": "auto"}


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        # Makes the Trainer set up the data loaders already here.
        self.steps = self.trainer.estimated_stepping_batches
        return [optimizer], [{"scheduler": decay, "interval": "step"}]


def _data():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 6, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)
    )


def _fit(strategy, world, batch_size, *, max_steps=-1, resume=None, save=None, **given):
    torch.manual_seed(3)
    module = Module()
    trainer = quiet_trainer(
        strategy=STRATEGIES[strategy]() if strategy != "single" else "auto",
        devices=world,
        max_epochs=2,
        max_steps=max_steps,
        use_distributed_sampler=False,
        callbacks=[GlobalBatchSize(GLOBAL)],
        **given,
    )
    kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
    loader = DataLoader(_data(), batch_size, sampler=DistributedSampler(_data(), shuffle=False, **kwargs))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*samples are repeated.*")
        trainer.fit(module, loader, ckpt_path=resume)
    assert (loader.batch_size, loader.batch_sampler.batch_size) == (batch_size, batch_size)
    assert module.steps == (max_steps if max_steps > 0 else 12)
    if save is not None:
        trainer.save_checkpoint(save)
    return trainer.global_step, snapshot(module)


@pytest.mark.parametrize(
    ("strategy", "world", "batch_size"),
    [("single", 1, 4), ("ddp", 1, 5), ("ddp", 2, 3), ("zero2", 2, 2), ("fsdp", 2, 4), ("ddp", 2, 50)],
)
def test_steps_equal_those_of_one_process(strategy, world, batch_size):
    (steps, wanted), *_ = run_ranks(1, _fit, "single", 1, GLOBAL)
    for found in run_ranks(world, _fit, strategy, world, batch_size):
        assert found[0] == steps == 12
        assert_close(found[1], wanted)


@pytest.mark.parametrize(
    ("before", "after"),
    [(("ddp", 1, 12), ("ddp", 1, 12)), (("zero2", 2, 6), ("ddp", 1, 6)), (("ddp", 1, 4), ("fsdp", 2, 6))],
    ids=str,
)
def test_goes_on_with_another_number_of_ranks(before, after, tmp_path):
    path = str(tmp_path / "a.ckpt")
    (_, wanted), *_ = run_ranks(1, _fit, "single", 1, GLOBAL)
    run_ranks(before[1], _save_at, before, 7, path)
    for steps, weights in run_ranks(after[1], _go_on, after, path):
        assert steps == 12
        assert_close(weights, wanted)


def _save_at(how, step, path):
    _fit(*how, max_steps=step, save=path)


def _go_on(how, path):
    return _fit(*how, resume=path)


class Batches(BatchSampler):
    """User-defined batch sampler."""


def _refused(loader, match, **given):
    callbacks = [GlobalBatchSize(7), *given.pop("callbacks", ())]
    trainer = quiet_trainer(strategy=DDPStrategy(), devices=given.pop("devices", 1), callbacks=callbacks, **given)
    with pytest.raises((ValueError, PeerFailedError), match=match):
        trainer.fit(Module(), loader)


def test_what_cannot_be_kept_is_refused():
    run_ranks(1, _refuse_all)
    run_ranks(2, _refuse_on_two)
    with pytest.raises(ValueError, match="global_batch_size=0 is not positive"):
        GlobalBatchSize(0)


def _refuse_on_two():
    fix = "divided evenly among 2 data-parallel ranks. Use a multiple of 2, such as 8"
    _refused(DataLoader(_data(), 7), fix, devices=2)


def _refuse_all():
    loader = DataLoader(_data(), 7)
    _refused(loader, r"and so does Trainer\(accumulate_grad_batches=2\)", accumulate_grad_batches=2)
    schedule = pl.callbacks.GradientAccumulationScheduler({0: 2})
    _refused(loader, "and so does GradientAccumulationScheduler", callbacks=[schedule])
    _refused(_data(), "cannot determine how many samples a batch of TensorDataset has")
    batches = Batches(range(SAMPLES), 4, False)
    _refused(DataLoader(_data(), batch_sampler=batches), "the batch size of a Batches cannot be changed")
    _refused(
        {"a": loader, "b": DataLoader(_data(), 1)},
        "has to accumulate 7 batches of this training loader, but another loader or setting needs 1",
    )
