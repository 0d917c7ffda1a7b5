"""Lightning's callbacks and user-defined ones that access parameters while layers are split."""

import copy
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import callbacks
from torch import nn
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import FSDPStrategy, TensorParallelStrategy
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer


def _loader():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(16, 8, generator=generator)
    return DataLoader(TensorDataset(x, x.flip(1).cumsum(1)), batch_size=4)


class Odd(pl.LightningModule):
    """Some sizes that are divisible by two ranks, and some that are not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.lr = 0.05
        self.backbone = nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 8))
        self.head = nn.Sequential(nn.Linear(8, 12, bias=False), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 8))
        self.losses = []

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.log("val_loss", loss)

    def configure_optimizers(self):
        return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=self.lr, momentum=0.9)


class Unfreeze(callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.02)


class OwnAverage(pl.Callback):
    """User-defined averaging; ``when`` is the hook in which the module is copied."""

    def __init__(self, when):
        self.when = when

    def setup(self, trainer, pl_module, stage):
        if self.when == "setup":
            self.average = copy.deepcopy(pl_module)

    def on_fit_start(self, trainer, pl_module):
        if self.when == "on_fit_start":
            self.average = copy.deepcopy(pl_module)

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, *_):
        for mean, value in zip(self.average.parameters(), pl_module.parameters(), strict=True):
            mean.lerp_(value, 0.5)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, *_):
        with torch.no_grad():
            pl_module.losses.append(self.average.eval()(batch[0]).sum().item())

    def state_dict(self):
        return {"average": self.average.state_dict()}


MAKE = {
    "finetuning": Unfreeze,
    "backbone": lambda: callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False),
    "accumulation": lambda: callbacks.GradientAccumulationScheduler({0: 1, 1: 2}),
    "averages": lambda: callbacks.WeightAveraging(avg_fn=get_ema_avg_fn(0.5)),
    "stochastic averages": lambda: callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1, annealing_epochs=1),
    "own averages": lambda: OwnAverage("setup"),
    "own averages, late": lambda: OwnAverage("on_fit_start"),
    "summary": lambda: callbacks.ModelSummary(max_depth=3),
    "learning rate": lambda: callbacks.LearningRateFinder(num_training_steps=20, update_attr=True),
}


def _with_callbacks(names, strategy, devices, folder):
    found = {}
    for name in names:
        module = Odd()
        trainer = quiet_trainer(
            strategy=strategy, devices=devices, use_distributed_sampler=False, max_epochs=3, callbacks=[MAKE[name]()],
            default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(module, _loader(), _loader())
        path = folder / f"{name}-{devices}.ckpt"
        trainer.save_checkpoint(path)
        found[name] = module.losses, snapshot(module), module.lr
    return found


def test_callbacks_find_whole_parameters(tmp_path):
    expected = _with_callbacks(MAKE, "auto", 1, tmp_path)
    for found in run_ranks(2, _with_callbacks, list(MAKE), "pardist_tp", 2, tmp_path):
        for name, (losses, weights, lr) in found.items():
            assert losses == pytest.approx(expected[name][0], rel=1e-5), name
            assert lr == pytest.approx(expected[name][2]), name
            assert_close(weights, expected[name][1])


def _interrupted(strategy, devices, folder):
    """Train two epochs with averages and a checkpoint in the middle, then a third from that."""
    results = []
    path = folder / f"averages-{devices}.ckpt"
    for epochs, ckpt_path in ((2, None), (3, path)):
        module = Odd()
        trainer = quiet_trainer(
            strategy=strategy() if callable(strategy) else strategy, devices=devices, use_distributed_sampler=False,
            max_epochs=epochs, callbacks=[MAKE["averages"](), SaveInTheMiddle(path)],
        )  # fmt: skip
        trainer.fit(module, _loader(), _loader(), ckpt_path=ckpt_path)
        results.append((module.losses, snapshot(module)))
    return results


class SaveInTheMiddle(pl.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


@pytest.mark.push("tp")
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("pardist_tp", 2),
        (partial(FSDPStrategy, min_unit_size_mb=0), 2),
        pytest.param(
            partial(TensorParallelStrategy, tensor_parallel_size=2, data_parallel="zero3"), 4, marks=pytest.mark.slow
        ),
    ],
    ids=["tp", "fsdp", "tp_zero3"],
)
def test_averages_are_saved_whole_and_go_on(strategy, devices, tmp_path):
    expected = _interrupted("auto", 1, tmp_path)
    for found in run_ranks(devices, _interrupted, strategy, devices, tmp_path):
        for (losses, weights), (losses_before, weights_before) in zip(found, expected, strict=True):
            assert losses == pytest.approx(losses_before, rel=1e-5)
            assert_close(weights, weights_before)
    ours, theirs = (torch.load(tmp_path / f"averages-{n}.ckpt", weights_only=False) for n in (devices, 1))
    for key in ("state_dict", "current_model_state", "averaging_state"):
        assert_close(ours[key], theirs[key])
