"""Pipeline strategies under a Trainer: user code in steps and hooks has one process's results, on every rank."""

import json
from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ModelSummary
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_pardist import CannotPipelineError, PeerFailedError, PipelineStrategy, PipelineTimeline
from lightning_pardist.axes.pipeline import PipelineAxis
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer

CLASSES = 5


class Points(Dataset):
    """Samples as dicts with one non-tensor entry."""

    def __init__(self, length, seed=3):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(length, 6, generator=generator)
        self.y = torch.randint(0, CLASSES, (length,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index], "name": f"sample {index}"}


class Habits(pl.LightningModule):
    """Module with patterns besides computing a loss: metrics, logging and hooks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, CLASSES)
        self.train_accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        scores = {name: make("multiclass", num_classes=CLASSES) for name, make in _SCORES.items()}
        self.scores = torchmetrics.MetricCollection(scores, prefix="val_")
        self.curve = torchmetrics.AUROC("multiclass", num_classes=CLASSES)
        self.total = torchmetrics.SumMetric()
        self.mean_loss = torchmetrics.MeanMetric()
        self.val_losses = []
        self.history = {"names": [], "logits": []}
        self.seen = 0
        self.steps_begun = 0
        self.last_logits = None
        self.outputs = []

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)

    def training_step(self, batch, batch_idx):
        logits = self(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        self.train_accuracy(logits, batch["y"])
        self.log("accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", logits.max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("sum", logits.sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("hits", (logits.argmax(-1) == batch["y"]).sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("size", len(batch["y"]), on_step=False, on_epoch=True)
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        self.log_dict({"a": loss, "b": 2 * loss}, on_step=False, on_epoch=True, batch_size=len(batch["y"]))
        self.seen += len(batch["y"])
        self.steps_begun += 1
        self.last_logits = logits.detach()
        self.total.update(loss.detach() * len(batch["y"]))
        return {"loss": loss, "logits": logits.detach(), "names": batch["name"]}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.outputs.append(outputs["logits"])
        assert torch.equal(self.last_logits, outputs["logits"])
        assert outputs["names"] == batch["name"]

    def on_train_epoch_end(self):
        self.log("total", self.total.compute())
        self.total.reset()
        self.log("seen", float(self.seen))
        self.log("steps_begun", float(self.steps_begun))

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        logits = self(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        self.log("val_loss", loss)
        self.scores.update(logits, batch["y"])
        self.curve.update(logits, batch["y"])
        self.mean_loss(loss, len(batch["y"]))
        self.val_losses.append(loss * len(batch["y"]))
        self.history["logits"].append(logits)
        return logits

    def on_validation_epoch_end(self):
        self.log("val_total", torch.stack(self.val_losses).sum())
        self.log("val_mean_logit", torch.cat(self.history["logits"]).mean())
        self.log_dict(self.scores.compute())
        self.log("val_curve", self.curve.compute())
        self.log("val_mean_loss", self.mean_loss.compute())
        for metric in (self.scores, self.curve, self.mean_loss):
            metric.reset()
        self.val_losses.clear()
        self.history["logits"] = []

    def test_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch["x"]), batch["y"])
        self.log("test_loss", loss)
        return {"test": loss}

    def predict_step(self, batch, batch_idx):
        return self(batch["x"]).softmax(-1), batch["name"]

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_total"}}


_SCORES = {
    "precision": torchmetrics.Precision,
    "recall": torchmetrics.Recall,
    "confusion": lambda task, num_classes: torchmetrics.Specificity(task, num_classes=num_classes, average="macro"),
}


def _loader(length, batch_size=8, seed=3):
    return DataLoader(Points(length, seed), batch_size=batch_size)


def _habits(strategy="pardist_pp", devices=2, directory=None, **kwargs):
    torch.manual_seed(11)
    module = Habits()
    best = ModelCheckpoint(directory, monitor="val_total", filename="best")
    callbacks = [EarlyStopping("val_total", patience=2), best, ModelSummary(max_depth=2)]
    trainer = quiet_trainer(
        strategy=strategy, devices=devices, max_epochs=3, callbacks=callbacks, enable_checkpointing=True, **kwargs
    )
    trainer.fit(module, _loader(21), [_loader(13, seed=4)])
    values = {name: torch.as_tensor(value) for name, value in trainer.callback_metrics.items()}
    outputs = torch.cat(module.outputs).detach()
    tested = trainer.test(module, _loader(11, seed=5), verbose=False)
    predicted = trainer.predict(module, _loader(11, seed=6))
    state = torch.load(best.best_model_path, weights_only=True)
    return {
        "values": values,
        "weights": snapshot(module),
        "outputs": {"outputs": outputs},
        "epoch": trainer.current_epoch,
        "best": float(best.best_model_score),
        "stopped": callbacks[0].stopped_epoch,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "test": {"loss": torch.tensor(tested[0]["test_loss"])},
        "predictions": {"probabilities": torch.cat([part[0] for part in predicted])},
        "names": [name for part in predicted for name in part[1]],
        "state": state["state_dict"],
        "optimizer": {
            f"{number}.{key}": value
            for number, entry in state["optimizer_states"][0]["state"].items()
            for key, value in entry.items()
            if value is not None
        },
    }


def test_what_users_do_in_steps_and_hooks(tmp_path):
    want = _habits("auto", 1, tmp_path / "alone")
    for got in run_ranks(2, _habits, "pardist_pp", 2, tmp_path / "ranks"):
        for part in ("values", "weights", "outputs", "test", "predictions", "state", "optimizer"):
            assert_close(got[part], want[part])
        for part in ("epoch", "stopped", "lr", "names"):
            assert got[part] == want[part], part


class Small(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)


def _points(length):
    x = torch.randn(length, 6, generator=torch.Generator().manual_seed(3))
    return [(row, row.sum().sin().reshape(1)) for row in x]


def _picture(directory, step):
    timeline = PipelineTimeline(directory, step=step)
    trainer = quiet_trainer(strategy="pardist_pp", devices=2, callbacks=[timeline])
    trainer.fit(Small(), DataLoader(_points(24), batch_size=8))
    assert len(timeline.timeline.events) == 2 * 2 * 8
    assert 0 <= timeline.timeline.idle_share < 1
    return trainer.strategy.axis(PipelineAxis).last_result.timeline is None


@pytest.mark.parametrize(("step", "shown"), [(1, 1), (5, 2)], ids=["asked_for", "run_too_short"])
def test_timeline(tmp_path, step, shown):
    assert run_ranks(2, _picture, tmp_path, step) == [step == shown] * 2
    assert f"1f1b, 2 ranks, 8 micro-batches, step {shown}<" in (tmp_path / "pipeline.svg").read_text()
    assert len(json.loads((tmp_path / "pipeline.json").read_text())["traceEvents"]) == 2 + 32


def test_timeline_needs_a_pipeline(tmp_path):
    trainer = quiet_trainer(callbacks=[PipelineTimeline(tmp_path)])
    with pytest.raises(ValueError, match="but SingleDeviceStrategy has none"):
        trainer.fit(Small(), DataLoader(_points(8), batch_size=4))


def _resume(directory, strategy="pardist_pp", devices=2):
    torch.manual_seed(11)
    first = quiet_trainer(strategy=strategy, devices=devices, max_epochs=1)
    first.fit(Small(), DataLoader(_points(20), batch_size=8))
    first.save_checkpoint(directory / "half.ckpt")
    torch.manual_seed(12)
    module = Small()
    second = quiet_trainer(strategy=strategy, devices=devices, max_epochs=2, gradient_clip_val=0.1)
    second.fit(module, DataLoader(_points(20), batch_size=8), ckpt_path=directory / "half.ckpt")
    assert all(param.device.type == "cpu" for group in second.optimizers[0].param_groups for param in group["params"])
    assert [param for group in second.optimizers[0].param_groups for param in group["params"]] == [*module.parameters()]
    return snapshot(module)


def test_resume_after_training_has_ended(tmp_path):
    want = _resume(tmp_path, "auto", 1)
    for got in run_ranks(2, _resume, tmp_path):
        assert_close(got, want)


class _Different:
    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.rank)
        for _ in range(3):
            x = torch.randn(8, 6, generator=generator)
            yield x, x.sum(1, keepdim=True)


def _different():
    torch.manual_seed(11)
    module = Small()
    trainer = quiet_trainer(strategy="pardist_pp", devices=2)
    with pytest.warns(UserWarning, match="different batches") if torch.distributed.get_rank() == 0 else nullcontext():
        trainer.fit(module, _Different(torch.distributed.get_rank()))
    return snapshot(module)


def test_the_first_ranks_batches_count():
    first, second = run_ranks(2, _different)
    torch.manual_seed(11)
    module = Small()
    alone = quiet_trainer(max_epochs=1)
    generator = torch.Generator().manual_seed(0)
    batches = [(x, x.sum(1, keepdim=True)) for x in (torch.randn(8, 6, generator=generator) for _ in range(3))]
    alone.fit(module, DataLoader(batches, batch_size=None))
    assert_close(first, snapshot(module))
    assert_close(second, first, rtol=0.0)


class OwnBackward(Small):
    def backward(self, loss):
        loss.backward()


class NoLoss(Small):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)


class Decides(Small):
    def training_step(self, batch, batch_idx):
        x = self.layers[:2](batch[0])
        return F.mse_loss(self.layers[2:](x if x.mean() > 0 else -x), batch[1])


REFUSALS = {
    "overrides backward": (OwnBackward, {}),
    "training_step returned no loss": (NoLoss, {}),
    "reads the value of the output of 'layers.0'": (Decides, {}),
    "2 stages were asked for, but the step can be cut|4 stages were asked for": (Small, {"chunks_per_rank": 2}),
    "does not begin a stage": (Small, {"split": ["layers.7"]}),
}


def _refused():
    said = {}
    for pattern, (kind, settings) in REFUSALS.items():
        schedule = "interleaved" if "chunks_per_rank" in settings else "1f1b"
        trainer = quiet_trainer(strategy=PipelineStrategy(schedule=schedule, **settings), devices=2)
        module = kind()
        with pytest.raises((ValueError, CannotPipelineError, PeerFailedError), match=pattern) as caught:
            trainer.fit(module, DataLoader(_points(16), batch_size=8))
        said[pattern] = str(caught.value)
        assert not any(param.is_meta for param in module.parameters())
    return said


def test_refusals_reach_every_rank():
    first, second = run_ranks(2, _refused)
    # Each rank raises either refusal, whichever it receives first.
    assert first.keys() == second.keys()


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"schedule": "2f2b"}, "schedule='2f2b' is unknown"),
        ({"chunks_per_rank": 2}, "runs one stage a rank, not 2"),
        ({"num_microbatches": 0}, "num_microbatches=0 is not positive"),
        ({"schedule": "mp", "num_microbatches": 4}, "makes no micro-batches"),
        ({"reads": "maybe"}, "reads='maybe' is unknown"),
        ({"data_parallel": "zero3", "schedule": "interleaved_zb"}, "would all-gather a stage a third time"),
        ({"message_timeout_s": 0}, "message_timeout_s=0 is not positive"),
    ],
)
def test_wrong_settings(settings, pattern):
    with pytest.raises(ValueError, match=pattern):
        PipelineStrategy(**settings)
