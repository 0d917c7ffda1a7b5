"""Every schedule on 2 and 4 ranks against one process: the zoo and the recipes, with common Trainer options."""

import copy
import functools
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_pardist import PipelineStrategy
from tests.helpers.models import Digits, Photos, Text
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.pipeline_zoo import ZOO
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer

SCHEDULES = {
    "mp": {"schedule": "mp"},
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "chunks_per_rank": 2},
    "zb": {"schedule": "interleaved_zb"},
    "zbv": {"schedule": "zbv", "chunks_per_rank": 2},
}
#: Models whose batch norm, balance loss or noise depends on the whole batch.
COUPLED = ("resnet", "experts", "unet")
#: Models with eight units.
DEEP = ("classifier",)
RECIPES = {"digits": Digits, "photos": Photos, "text": Text}
SIZE, PARTS = 8, 4


class Wrapped(pl.LightningModule):
    """Model of the zoo that computes its loss and creates its batches."""

    def __init__(self, name):
        super().__init__()
        self.net = ZOO[name]()

    def training_step(self, batch, batch_idx):
        result = self.net.training_step(batch)
        loss = result["loss"] if isinstance(result, dict) else result
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=1)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.training_step(batch, batch_idx), batch_size=1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2, eps=1e-3)


def _batches(module, sizes):
    torch.manual_seed(100)
    return DataLoader([module.net.batch(size) for size in sizes], batch_size=None)


def _fit(name, strategy, devices, folder):
    """Train two epochs with accumulation and clipping, and resume for the second one."""
    torch.manual_seed(11)
    module = Wrapped(name)
    again = copy.deepcopy(module)
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "num_sanity_val_steps": 0}
    make = functools.partial(quiet_trainer, devices=devices, **options)
    trainer = make(strategy=strategy())
    trainer.fit(module, _batches(module, (8, 8, 8, 5)), _batches(module, (8, 3)))
    trainer.save_checkpoint(folder / f"{name}.ckpt")
    trainer = make(strategy=strategy(), max_epochs=2)
    trainer.fit(again, _batches(again, (8, 8, 8, 5)), _batches(again, (8, 3)), ckpt_path=folder / f"{name}.ckpt")
    return {**snapshot(again), **{key: value.clone() for key, value in trainer.callback_metrics.items()}}


def _fit_all(names, strategy, devices, folder):
    return {name: _fit(name, strategy, devices, Path(folder)) for name in names}


@functools.cache
def _alone(name):
    return _fit(name, lambda: "auto", 1, Path(tempfile.mkdtemp()))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_zoo(schedule, devices, tmp_path):
    stages = devices * SCHEDULES[schedule].get("chunks_per_rank", 1)
    names = [name for name in ZOO if schedule == "mp" or name not in COUPLED] if stages < 8 else DEEP
    strategy = functools.partial(PipelineStrategy, **SCHEDULES[schedule])
    for got in run_ranks(devices, _fit_all, names, strategy, devices, tmp_path):
        for name in names:
            assert_close(got[name], _alone(name))


def _recipe(name, precision, strategy="auto", devices=1):
    """In one process each micro-batch is an accumulated batch: same rounding and batch norm."""
    torch.manual_seed(11)
    module = RECIPES[name]("adamw")
    parts = PARTS if devices == 1 else 1
    trainer = quiet_trainer(
        strategy=strategy() if callable(strategy) else strategy,
        devices=devices,
        precision=precision,
        accumulate_grad_batches=parts,
        # A norm summed in another order moves a weight's last digit in fp32, and thus its rounding to bf16.
        gradient_clip_val=None if precision == "bf16-mixed" else 0.5,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, DataLoader(module.dataset(3 * SIZE), batch_size=SIZE // parts))
    return snapshot(module)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "mp"])
def test_recipes(schedule, devices):
    for name, precision in (
        ("text", "32-true"),
        ("text", "bf16-mixed"),
        ("digits", "bf16-mixed"),
        ("photos", "64-true"),
    ):
        chunks = SCHEDULES[schedule].get("chunks_per_rank", 1)
        if name == "digits" and devices * chunks > 2:
            continue  # it has three layers
        if name == "text" and devices * chunks > 4:
            continue
        want = _recipe(name, precision)
        strategy = functools.partial(PipelineStrategy, num_microbatches=PARTS, **SCHEDULES[schedule])
        for got in run_ranks(devices, _recipe, name, precision, strategy, devices):
            assert_close(got, want)
