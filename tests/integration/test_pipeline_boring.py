"""Patterns of Lightning's own test suite, with a model of two layers: a pipeline against one process."""

import collections
import tempfile

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    Timer,
)
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer


class Boring(BoringModel):
    """BoringModel with two layers instead of one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 2))

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        self.log("train_loss", output["loss"], on_step=True, on_epoch=True)
        return output

    def validation_step(self, batch, batch_idx):
        output = super().validation_step(batch, batch_idx)
        self.log("x", output["x"])
        return output


class OnlyBatch(Boring):
    def training_step(self, batch):
        return self.step(batch)

    def validation_step(self, batch):
        return {"x": self.step(batch)}


class Outputs(Boring):
    """Collects the results of its steps."""

    def on_train_epoch_start(self):
        self.outputs, self.seen = [], collections.Counter()

    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.outputs.append(loss.detach())
        self.seen[batch_idx] += 1
        return loss

    def on_train_epoch_end(self):
        self.log("mean", torch.stack(self.outputs).mean())
        assert len(self.outputs) == sum(self.seen.values()) == self.trainer.num_training_batches


class Loaders(Boring):
    """Two validation loaders with different batch sizes."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x = self.step(batch)
        self.log("x", x)
        self.log(f"own_{dataloader_idx}", 2 * x, add_dataloader_idx=False)

    def val_dataloader(self):
        return [DataLoader(RandomDataset(32, 8), batch_size=size) for size in (4, 3)]


class Several(Boring):
    """Several training loaders, combined into a dict of batches."""

    def training_step(self, batch, batch_idx):
        return self.step(batch["a"]) + self.step(batch["b"][0])

    def train_dataloader(self):
        torch.manual_seed(3)
        return {
            "a": DataLoader(RandomDataset(32, 16), batch_size=4),
            "b": [DataLoader(RandomDataset(32, 16), batch_size=4)],
        }


class OwnStep(Boring):
    """Overrides the hooks around a step."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.trainer.global_step)
        optimizer.step(closure=optimizer_closure)

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, 0.05, "norm")


class Plateau(Boring):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "x"}}


class Frozen(Boring):
    """Freezes a layer between steps."""

    def on_train_batch_start(self, batch, batch_idx):
        self.layer[0].requires_grad_(batch_idx % 2 == 0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Batch:
    """User-defined batch class."""

    def __init__(self, samples):
        self.x = torch.stack(samples)
        self.names = [f"sample {index}" for index in range(len(samples))]

    def to(self, *args, **kwargs):
        self.x = self.x.to(*args, **kwargs)
        return self


class Skips(Boring):
    """Skips a batch by returning None."""

    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        return None if batch_idx == 1 else loss


class SkipsAtOnce(Boring):
    """Skips batches before calling the model, depending on their values."""

    def training_step(self, batch, batch_idx):
        if batch.sum() > 0 and batch_idx in (1, 2, 4):
            return None
        return self.step(batch)

    def train_dataloader(self):
        torch.manual_seed(3)
        return DataLoader(RandomDataset(32, 24).data.abs(), batch_size=4)


class Custom(Boring):
    def training_step(self, batch, batch_idx):
        assert len(batch.names) == len(batch.x)
        return self.step(batch.x)

    def train_dataloader(self):
        torch.manual_seed(3)
        return DataLoader(RandomDataset(32, 14), batch_size=4, collate_fn=Batch)


class Endless(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(5)
        while True:
            yield torch.randn(32, generator=generator)


class GoesOn(IterableDataset):
    """Stream whose iterators continue where the last one stopped."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self):
        while True:
            yield torch.randn(32, generator=self.generator)


class Stream(Boring):
    def train_dataloader(self):
        return DataLoader(Endless(), batch_size=3)


class StreamGoesOn(Boring):
    def __init__(self):
        super().__init__()
        self.stream = GoesOn()

    def train_dataloader(self):
        return DataLoader(self.stream, batch_size=3)


class NoBatch(Boring):
    """The loader yields None: the step creates its own batch."""

    def training_step(self, batch, batch_idx):
        assert batch is None
        x = torch.linspace(0, 1, 96).view(3, 32) * (batch_idx + 1)
        return self.step(x)

    def train_dataloader(self):
        return DataLoader([None] * 3, batch_size=None)


class Sequence(Boring):
    """Token-weighted loss with a different token count per batch, in the last one none for some samples."""

    def training_step(self, batch, batch_idx):
        x, targets = batch
        loss = F.cross_entropy(self.layer(x).flatten(0, 1), targets.flatten(), ignore_index=-100)
        self.log("loss", loss)
        return loss

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(21, 6, 32, generator=generator)
        targets = torch.randint(0, 2, (21, 6), generator=generator)
        lengths = torch.randint(0, 7, (21, 1), generator=generator).clamp(max=6)
        lengths[::8] = 6
        targets = targets.where(torch.arange(6) < lengths, -100)
        return DataLoader(list(zip(x, targets, strict=True)), batch_size=8)


class Metric(Boring):
    """``EarlyStopping`` and ``ModelCheckpoint`` on values logged in training."""

    def configure_callbacks(self):
        return [EarlyStopping("train_loss_epoch", patience=0, min_delta=10.0), ModelCheckpoint(tempfile.mkdtemp())]


HABITS = {
    "plain": (Boring, {}),
    "only_batch": (OnlyBatch, {}),
    "outputs": (Outputs, {"max_epochs": 2}),
    "loaders": (Loaders, {}),
    "several": (Several, {}),
    "own_step": (OwnStep, {}),
    "plateau": (Plateau, {"max_epochs": 3}),
    "frozen": (Frozen, {}),
    "custom": (Custom, {}),
    "skips": (Skips, {"accumulate_grad_batches": 2}),
    "skips_at_once": (SkipsAtOnce, {"max_epochs": 2}),
    "stream": (Stream, {"max_steps": 4, "val_check_interval": 2}),
    "stream_goes_on": (StreamGoesOn, {"max_steps": 4, "val_check_interval": 2}),
    "no_batch": (NoBatch, {}),
    "sequence": (Sequence, {"max_epochs": 2}),
    "stops": (Metric, {"max_epochs": 4, "enable_checkpointing": True}),
    "fast": (Boring, {"fast_dev_run": True}),
    "fast3": (Boring, {"fast_dev_run": 3}),
    "overfit": (Boring, {"overfit_batches": 2, "max_epochs": 2}),
    "limits": (Boring, {"limit_train_batches": 0.5, "limit_val_batches": 2, "max_epochs": 2}),
    "no_validation": (Boring, {"limit_val_batches": 0}),
    "sanity": (Boring, {"num_sanity_val_steps": -1}),
    "interval": (Boring, {"val_check_interval": 0.25}),
    "every_other": (Boring, {"check_val_every_n_epoch": 2, "max_epochs": 3}),
    "accumulate": (Boring, {"accumulate_grad_batches": 3}),
    "schedule": (Boring, {"callbacks": [GradientAccumulationScheduler({0: 2, 1: 4})], "max_epochs": 2}),
    "clip": (Boring, {"gradient_clip_val": 0.1}),
    "clip_value": (Boring, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "double": (Boring, {"precision": "64-true"}),
    "anomaly": (Boring, {"detect_anomaly": True}),
    "profiler": (Boring, {"profiler": "simple"}),
    "no_inference_mode": (Boring, {"inference_mode": False}),
    "reload": (Boring, {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2}),
    "min_epochs": (Boring, {"min_epochs": 2, "max_epochs": 3, "max_steps": 5}),
    "barebones": (Boring, {"barebones": True}),
    "logger": (Boring, {"logger": CSVLogger(tempfile.gettempdir()), "log_every_n_steps": 1}),
    "monitor": (
        Boring,
        {"callbacks": [LearningRateMonitor(), Timer("00:00:01:00")], "logger": CSVLogger(tempfile.gettempdir())},
    ),
}
_QUICK = ("outputs", "skips", "skips_at_once", "custom", "no_batch", "sequence", "own_step", "several", "loaders")


def _fit(name, strategy="auto", devices=1):
    kind, options = HABITS[name]
    torch.manual_seed(11)
    module = kind()
    options = {"limit_train_batches": 6, "limit_val_batches": 3, **options}
    if options.get("barebones") or options.get("fast_dev_run"):
        defaults = dict.fromkeys(("limit_train_batches", "limit_val_batches"))
        options = {**{k: v for k, v in options.items() if k not in defaults}}
    if options.get("barebones"):
        options |= dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"))
    trainer = quiet_trainer(strategy=strategy, devices=devices, **options)
    trainer.fit(module)
    values = {key: value.clone() for key, value in trainer.callback_metrics.items()}
    trainer.test(module)
    trainer.validate(module)
    values |= {f"after_{key}": value.clone() for key, value in trainer.callback_metrics.items()}
    return {**snapshot(module), **values, "steps": torch.tensor(trainer.global_step)}


def _fit_all(names):
    return {name: _fit(name, "pardist_pp", 2) for name in names}


def _compare(names):
    for got in run_ranks(2, _fit_all, names):
        for name in names:
            assert_close(got[name], _fit(name))


def test_habits():
    _compare(_QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HABITS if name not in _QUICK])
def test_more_habits(name):
    _compare([name])
