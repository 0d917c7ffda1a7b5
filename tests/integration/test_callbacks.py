"""Callbacks that observe or change the model act the same on all ranks as on one process."""

from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

from tests.helpers.models import points
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, Data, quiet_trainer


class Net(pl.LightningModule):
    def __init__(self, lr=0.1, batch_size=2):
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.batch_size = batch_size
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("train", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", F.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def train_dataloader(self):
        return DataLoader(points(64), batch_size=self.batch_size)


class Both(Data):
    def val_dataloader(self):
        return DataLoader(points(7), batch_size=2)


CALLBACKS = {
    "average": (WeightAveraging, {}, {}),
    "ema": (EMAWeightAveraging, {"decay": 0.8}, {}),
    "swa": (StochasticWeightAveraging, {"swa_lrs": 0.05, "swa_epoch_start": 1, "device": None}, {}),
}


def _average(name, strategy="pardist_ddp", devices=2):
    make, kwargs, trainer_kwargs = CALLBACKS[name]
    torch.manual_seed(11)
    module = Net()
    trainer = quiet_trainer(
        strategy=strategy, devices=devices, use_distributed_sampler=False, max_epochs=3, callbacks=[make(**kwargs)],
        limit_val_batches=0, **trainer_kwargs,
    )  # fmt: skip
    trainer.fit(module, datamodule=Data(points(BATCH * 3)))
    return snapshot(module)


@pytest.mark.push("average-pardist_zero3", "ema-pardist_zero2", "swa-pardist_zero1")
@pytest.mark.parametrize("strategy", ["pardist_ddp", "pardist_zero1", "pardist_zero2", "pardist_zero3"])
@pytest.mark.parametrize("name", CALLBACKS)
def test_averages_of_weights(name, strategy):
    want = _average(name, "auto", 1)
    for got in run_ranks(2, _average, name, strategy):
        assert_close(got, want)


def _decide(root, strategy="pardist_ddp", devices=2):
    torch.manual_seed(11)
    module = Net(lr=0.4)
    stop = EarlyStopping("val", patience=0, min_delta=0.02)
    best = ModelCheckpoint(root, "{epoch}-{val:.4f}", monitor="val", save_top_k=2, save_last=True)
    by_train = ModelCheckpoint(root, "t-{step}", monitor="train_step", every_n_train_steps=1, save_top_k=1)
    trainer = quiet_trainer(
        strategy=strategy, devices=devices, max_epochs=8, callbacks=[stop, best, by_train], num_sanity_val_steps=1,
        enable_checkpointing=True, use_distributed_sampler=True, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(module, DataLoader(points(24), batch_size=12 // devices), DataLoader(points(7), batch_size=2))
    return trainer.current_epoch, best.best_model_path, sorted(best.best_k_models), by_train.best_model_path


def test_stopping_and_best_checkpoint_alike(tmp_path):
    first, second = run_ranks(2, _decide, str(tmp_path))
    assert first == second
    assert first[1]


def _tune():
    trainer = quiet_trainer(strategy="pardist_ddp", devices=2)
    module = Net(lr=1e-3)
    found = Tuner(trainer).lr_find(module, num_training=12, min_lr=1e-5, max_lr=0.5)
    trainer.fit(module)
    return found.suggestion(), module.lr, snapshot(module)


def test_lr_find(tmp_path, monkeypatch):
    (suggestion, lr, weights), other = run_ranks(2, _tune)
    assert suggestion == other[0]
    assert lr == other[1]
    assert_close(other[2], weights)


def _scale():
    trainer = quiet_trainer(strategy="pardist_ddp", devices=2)
    try:
        Tuner(trainer).scale_batch_size(Net(), max_trials=2, steps_per_trial=1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_scale_batch_size_is_refused_as_by_lightning():
    assert all("not supported with distributed" in text for text in run_ranks(2, _scale))


def _everything(root):
    trainer = quiet_trainer(
        strategy="pardist_ddp", devices=2, max_epochs=2, logger=CSVLogger(root), log_every_n_steps=1,
        callbacks=[LearningRateMonitor(), Timer(duration={"minutes": 5})], enable_model_summary=True,
        enable_checkpointing=True,
    )  # fmt: skip
    trainer.fit(Net(), datamodule=Both(points(24)))
    trainer.test_loop  # noqa: B018
    return trainer.log_dir, trainer.checkpoint_callback.best_model_path, trainer.estimated_stepping_batches


class Shown(Net):
    def __init__(self):
        super().__init__()
        self.example_input_array = torch.zeros(2, 6)

    def forward(self, x):
        return self.net(x)


def _draw_graph(root, strategy):
    logger = TensorBoardLogger(root, log_graph=True)
    trainer = quiet_trainer(strategy=strategy, devices=2, max_steps=2, logger=logger)
    with mock.patch.object(SummaryWriter, "add_graph", autospec=True, side_effect=SummaryWriter.add_graph) as drawn:
        trainer.fit(Shown())
    return drawn.call_count


@pytest.mark.parametrize("strategy", ["pardist_ddp", "pardist_zero3", "pardist_tp", "pardist_pp"])
def test_a_logger_draws_the_whole_module(strategy, tmp_path):
    assert run_ranks(2, _draw_graph, str(tmp_path), strategy) == [1, 0]


def test_loggers_and_summary(tmp_path):
    first, second = run_ranks(2, _everything, str(tmp_path))
    assert first == second
    text = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    assert "val" in text.splitlines()[0]
    assert len(list((tmp_path / "lightning_logs").iterdir())) == 1


def _resume(root, strategy="pardist_ddp", devices=2):
    """Stop in the middle of an epoch and resume from the file, twice."""

    def fit(ckpt_path=None, **kwargs):
        torch.manual_seed(11)
        module = Net()
        keep = ModelCheckpoint(root, "{step}", every_n_train_steps=2, save_top_k=-1, save_last=True)
        trainer = quiet_trainer(
            strategy=strategy, devices=devices, callbacks=[keep], enable_checkpointing=True,
            use_distributed_sampler=False, **kwargs,
        )  # fmt: skip
        trainer.fit(module, datamodule=Data(points(BATCH * 3)), ckpt_path=ckpt_path)
        return trainer, snapshot(module)

    trainer, _ = fit(max_steps=4, max_epochs=3)
    assert trainer.global_step == 4
    trainer, resumed = fit(ckpt_path=f"{root}/step=4.ckpt", max_epochs=3)
    assert trainer.global_step == 9
    again = fit(ckpt_path="last", max_epochs=3)[1]
    loaded = snapshot(Net.load_from_checkpoint(trainer.checkpoint_callback.last_model_path))
    whole = fit(max_epochs=3)[1]
    return resumed, again, loaded, whole


def test_save_and_resume_in_the_middle_of_an_epoch(tmp_path):
    want = _resume(str(tmp_path / "one"), "pardist_ddp", 1)
    assert_close(want[0], want[-1])  # equal to an uninterrupted run, which Lightning's own strategies do not guarantee
    for got in run_ranks(2, _resume, str(tmp_path / "two")):
        for part, expected in zip(got, want, strict=True):
            assert_close(part, expected)
    # A file of two ranks loads in one process, and the other way round.
    ours = torch.load(tmp_path / "two" / "last.ckpt", weights_only=False)
    theirs = torch.load(tmp_path / "one" / "last.ckpt", weights_only=False)
    assert ours.keys() == theirs.keys()
    assert_close(ours["state_dict"], theirs["state_dict"])


def _precision(precision, strategy="pardist_ddp", devices=2):
    torch.manual_seed(11)
    module = Net(lr=0.02)
    trainer = quiet_trainer(
        strategy=strategy, devices=devices, use_distributed_sampler=False, precision=precision, max_epochs=2,
        gradient_clip_val=0.5, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, datamodule=Data(points(BATCH * 3)))
    return snapshot(module)


@pytest.mark.parametrize(
    ("precision", "rtol"), [("16-mixed", 5e-3), ("bf16-mixed", 5e-3), ("bf16-true", 0.02), ("64-true", 1e-12)]
)
def test_precision(precision, rtol):
    # Each rank's part is rounded separately in half precision: equal up to a few rounding steps.
    want = _precision(precision, "auto", 1)
    results = run_ranks(2, _precision, precision)
    assert_close(results[1], results[0], rtol=0)
    assert {v.dtype for v in results[0].values()} == {v.dtype for v in want.values()}
    assert_close(results[0], want, rtol=rtol)


class Overflows(Net):
    """Module with an infinite gradient in one element of one parameter, from one rank's samples."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.global_rank == 1:
            loss = loss + next(self.parameters()).flatten()[-1] * float("inf")
        return loss


def _scaler(strategy):
    torch.manual_seed(11)
    module = Overflows()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    trainer = quiet_trainer(strategy=strategy, devices=2, plugins=[plugin], limit_val_batches=0, gradient_clip_val=0.1)
    trainer.fit(module, DataLoader(points(12), batch_size=2))
    return snapshot(module), scaler.get_scale()


@pytest.mark.parametrize("strategy", ["pardist_ddp", "pardist_zero1", "pardist_zero2", "pardist_zero3"])
def test_gradient_scaler_decides_alike(strategy):
    (want, _), _ = run_ranks(2, _scaler, "ddp")
    (first, scale), (second, other) = run_ranks(2, _scaler, strategy)
    assert scale == other == 4.0
    assert_close(second, first, rtol=0)
    # Rounded to fp16 in communication: equal up to a few rounding steps.
    assert_close(first, want, rtol=5e-3)
