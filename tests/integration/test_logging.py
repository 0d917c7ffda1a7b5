"""``self.log`` in its variants: epoch values equal one process's, whatever the ranks log."""

import warnings

import lightning_pardist  # isort: skip
import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.trainer.connectors.logger_connector.result import warning_cache
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist.collectives import all_gather
from tests.helpers.models import points
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import cpu_mesh, run_ranks
from tests.helpers.runs import BATCH, Data, quiet_trainer


class Logs(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.metric = torchmetrics.MeanSquaredError()
        self.values = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.layer(x)
        loss = F.mse_loss(out, y)
        self.log("plain", loss, on_step=False, on_epoch=True)
        self.log("forked", loss, on_step=True, on_epoch=True)
        self.log("synced_step", loss, sync_dist=True)
        self.log("synced", loss, sync_dist=True, on_epoch=True, on_step=True)
        self.log("sum", out.sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("max", out.max(), reduce_fx="max", on_step=False, on_epoch=True, sync_dist=True)
        self.log("min", out.min(), reduce_fx=min, on_step=False, on_epoch=True)
        self.log("integer", batch_idx, on_step=False, on_epoch=True)
        self.log("weighted", loss, batch_size=len(x), on_step=False, on_epoch=True)
        self.metric(out, y)
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        self.log_dict({"a": loss, "b": 2 * loss}, on_step=False, on_epoch=True)
        self.values.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        own = torch.stack(self.values).mean()
        self.values.clear()
        self.log("at_end", own)
        self.log("at_end_gathered", self.all_gather(own).mean())
        self.log("plain_seen", self.trainer.callback_metrics["plain"])

    def validation_step(self, batch, batch_idx):
        self.log("val", F.mse_loss(self.layer(batch[0]), batch[1]))

    def on_validation_epoch_end(self):
        self.log("val_end", torch.tensor(3.0))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Both(Data):
    def val_dataloader(self):
        return DataLoader(points(12), batch_size=4)


def _log(kwargs, strategy="pardist_ddp", devices=2):
    torch.manual_seed(11)
    module = Logs()
    trainer = quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False, max_epochs=2, **kwargs)
    trainer.fit(module, datamodule=Both(points(BATCH * 4)))
    values = {
        k: torch.as_tensor(v).clone() for k, v in trainer.callback_metrics.items() if k not in ("forked_step", "forked")
    }
    return values | {"weights": module.layer.weight.detach().clone()}


@pytest.mark.parametrize(
    "kwargs", [{}, {"accumulate_grad_batches": 2}, {"val_check_interval": 2}, {"precision": "64-true"}]
)
def test_variants(kwargs):
    want = _log(kwargs, "auto", 1)
    assert len(want) > 15
    for got in run_ranks(2, _log, kwargs):
        assert_close(got, want)


class Selected(pl.LightningModule):
    """Logs means over selected elements that have no graph, in some steps only."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.seen = []

    def training_step(self, batch, batch_idx):
        out = self.layer(batch[0])
        counts = batch[0][:, :4] > 0.2
        right = (out.detach() > 0)[counts]
        self.log("accuracy", right.float().mean(), on_step=True, on_epoch=True)
        if batch_idx % 2:
            self.log("selected", F.l1_loss(out.detach()[counts], torch.zeros_like(out[counts])), on_epoch=True)
        return (out.square() * counts).sum() / counts.sum()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(self.trainer.callback_metrics["accuracy"].item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class InSomeSteps(Selected):
    """Logs a loss of two counts in every fourth step, multiples of means, and sums by ``reduce_fx``."""

    def training_step(self, batch, batch_idx):
        out = self.layer(batch[0])
        counts = batch[0][:, :4] > 0.2
        accuracy = (out.detach() > 0)[counts].float().mean()
        means = {"accuracy": accuracy, "percent": 100 * accuracy, "error": 1 - accuracy}
        self.log_dict(means, on_step=True, on_epoch=True)
        self.log("mean", accuracy, on_step=False, on_epoch=True, reduce_fx=torch.mean)
        self.log("total", accuracy * counts.sum(), on_step=False, on_epoch=True, reduce_fx=torch.sum)
        loss = (out.square() * counts).sum() / counts.sum() + 0.3 * out.abs().mean()
        if batch_idx % 4 == 3:
            self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def _selected(strategy="pardist_zero2", devices=2, kind=Selected):
    torch.manual_seed(11)
    module = kind()
    trainer = quiet_trainer(strategy=strategy, devices=devices, max_epochs=2, use_distributed_sampler=False)
    trainer.fit(module, datamodule=Data(points(BATCH * 4)))
    return {key: float(value) for key, value in trainer.callback_metrics.items()}, module.seen


@pytest.mark.parametrize("kind", [Selected, InSomeSteps])
def test_means_in_training_count_what_they_average(kind):
    want, seen = _selected("auto", 1, kind)
    for got, got_seen in run_ranks(2, _selected, "pardist_zero2", 2, kind):
        assert got == pytest.approx(want, rel=1e-6)
        assert got_seen == pytest.approx(seen, rel=1e-6)


class Sometimes(pl.LightningModule):
    """Logs many means, some of them only if the batch has an item to average."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3).double()
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch[0].double(), (batch[1].flatten() * 7).long() % 3
        out = self.layer(x)
        losses = F.cross_entropy(out, y, reduction="none")
        rare = x[:, 0] > 1
        if rare.any():
            self.log("rare", losses[rare].mean(), on_epoch=True)
            self.log("rare_accuracy", (out.argmax(-1) == y)[rare].double().mean(), on_epoch=True)
        for place in range(24):
            chosen = y == place % 3
            self.log(f"value_{place}", (losses * chosen).sum() / chosen.sum().clamp(min=1), on_epoch=True)
        loss = losses[y != 2].mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append({k: float(v) for k, v in self.trainer.callback_metrics.items() if not k.startswith("rare")})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def _sometimes(strategy="pardist_zero2", devices=2):
    torch.manual_seed(11)
    module = Sometimes()
    trainer = quiet_trainer(strategy=strategy, devices=devices, max_epochs=2, use_distributed_sampler=False)
    trainer.fit(module, datamodule=Data(points(BATCH * 6)))
    found = {key: float(value) for key, value in trainer.callback_metrics.items() if not key.endswith("_step")}
    return found, module.seen


def test_values_that_some_ranks_log_and_many_values():
    want, seen = _sometimes("auto", 1)
    assert "rare" in want
    for got, got_seen in run_ranks(2, _sometimes):
        assert got == pytest.approx(want, rel=1e-12)
        assert got_seen == [pytest.approx(each, rel=1e-12) for each in seen]


class LateOnOneRank(pl.LightningModule):
    """Logs nothing but a value of the last rank, when backward no longer waits for the counts of other ranks."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.layer(batch[0]), batch[1])
        if batch_idx >= 5 and self.global_rank == 1:
            self.log("late", loss.detach(), on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def _log_late():
    trainer = quiet_trainer(strategy="pardist_ddp", devices=2, use_distributed_sampler=False)
    trainer.fit(LateOnOneRank(), datamodule=Data(points(BATCH * 10)))
    return trainer.callback_metrics["late"].dtype, float(trainer.callback_metrics["late"])


def test_a_value_that_one_rank_begins_to_log_later():
    first, second = run_ranks(2, _log_late)
    assert first == second
    assert first[0] is torch.float32


class LogsWeights(pl.LightningModule):
    """Logs norms of weights, which are sharded, from hooks."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch[0]).mean())

    def on_train_epoch_end(self):
        self.log("trained", self.layer.weight.norm())

    def on_validation_batch_end(self, *unused):
        self.log("batch", self.layer.weight.norm())

    def on_validation_epoch_end(self):
        self.log("epoch", self.layer.weight.abs().max())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def _log_weights(strategy="pardist_zero3", devices=2):
    torch.manual_seed(11)
    trainer = quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False, max_epochs=2)
    trainer.fit(LogsWeights(), datamodule=Both(points(BATCH * 4)))
    assert all(type(value) is torch.Tensor for value in trainer.callback_metrics.values())
    return {key: float(value) for key, value in trainer.callback_metrics.items()}


def test_values_of_sharded_parameters():
    want = _log_weights("auto", 1)
    assert {"trained", "batch", "epoch"} < set(want)
    for got in run_ranks(2, _log_weights):
        assert got == pytest.approx(want, rel=1e-5)


class DifferentKeys(Logs):
    """Ranks log different keys in different orders (Lightning would mix up their values)."""

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.layer(batch[0]), batch[1])
        names = ["x", "y"] if self.global_rank == 0 else ["y", "x"]
        for name in names:
            self.log(name, float(ord(name)), on_step=False, on_epoch=True, sync_dist=True)
        self.log(f"only_{self.global_rank}", float(self.global_rank), on_step=False, on_epoch=True, sync_dist=True)
        self.log("first", 5.0, rank_zero_only=True) if self.global_rank == 0 else None
        return loss

    def on_train_epoch_end(self):
        pass


def _different():
    trainer = quiet_trainer(strategy="pardist_ddp", devices=2, max_epochs=2)
    trainer.fit(DifferentKeys(), DataLoader(points(8), batch_size=2))
    return {key: float(value) for key, value in trainer.callback_metrics.items() if key != "first"}


def test_ranks_log_different_keys():
    want = {"x": 120.0, "y": 121.0, "only_0": 0.0, "only_1": 1.0}
    assert run_ranks(2, _different) == [want, want]


def _gather():
    class Gathers(Logs):
        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.layer(batch[0]), batch[1])
            rows = self.all_gather({"a": loss, "b": [loss.detach(), 3]}, sync_grads=True)
            assert rows["a"].shape == (2,)
            assert rows["a"].requires_grad
            assert rows["b"][0][self.global_rank] == loss
            return rows["a"].mean()

        def on_train_epoch_end(self):
            pass

    torch.manual_seed(11)
    module = Gathers()
    trainer = quiet_trainer(strategy="pardist_ddp", devices=2)
    trainer.fit(module, DataLoader(points(8), batch_size=2))
    return snapshot(module)


def test_all_gather_with_gradients():
    first, second = run_ranks(2, _gather)
    assert_close(second, first, rtol=0)


def _gather_in_pairs():
    mesh = cpu_mesh((2, 2), ("first", "second"))
    found = []
    for axis in ("first", "second"):
        group = mesh[axis].get_group()
        x = torch.full((3,), 1.0 + group.rank(), requires_grad=True)
        rows = all_gather(x, group=group, sync_grads=True)
        weights = torch.tensor([[1.0], [10.0]]) * (1 + group.rank())
        (rows.square() * weights).sum().backward()
        found.append((rows.detach().tolist(), x.grad.tolist(), group.rank()))
    return found


def test_gradients_of_a_gather_among_some_ranks():
    for found in run_ranks(4, _gather_in_pairs):
        for rows, grad, rank in found:
            assert rows == [[1.0] * 3, [2.0] * 3]
            # From both ranks' sums, where the second has twice the weight.
            assert grad == [(6.0, 120.0)[rank]] * 3


def _sync_bn(dim, precision, strategy="pardist_ddp", devices=2):
    """Train with batches of different sizes on the ranks: 3 and 5 samples of one process's 8."""

    class Norm(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = (
                nn.Conv1d(2, 4, 1, bias=False)
                if dim == 1
                else (nn.Conv2d if dim == 2 else nn.Conv3d)(2, 4, 1, bias=False)
            )
            self.norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dim - 1](4)

        def training_step(self, batch, batch_idx):
            (x,) = batch
            # Sum divided by the global batch size: the mean of this over ranks is one process's mean.
            return self.norm(self.inner(x)).sin().sum() * self.trainer.world_size / 8

        def validation_step(self, batch, batch_idx):
            assert type(self.norm) is not nn.SyncBatchNorm
            self.log("val", self.norm(self.inner(batch[0])).sin().mean())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    torch.manual_seed(11)
    module = Norm()
    data = torch.randn(24, 2, *([3] * dim), generator=torch.Generator().manual_seed(9))
    trainer = quiet_trainer(
        strategy=strategy, devices=devices, use_distributed_sampler=False, sync_batchnorm=True, precision=precision
    )
    parts = [slice(0, 8)] if devices == 1 else [slice(0, 3), slice(3, 8)]
    own = [i for batch in range(3) for i in range(8)[parts[trainer.global_rank]] for i in [batch * 8 + i]]
    loader = DataLoader(TensorDataset(data[own]), batch_size=len(own) // 3)
    trainer.fit(module, loader, DataLoader(TensorDataset(data), batch_size=8))
    assert type(module.norm).__name__.startswith("BatchNorm")
    return snapshot(module) | {"val": trainer.callback_metrics["val"].clone()}


@pytest.mark.parametrize(
    ("dim", "precision", "rtol"),
    [(1, "32-true", 1e-5), (2, "32-true", 1e-5), (3, "32-true", 1e-5), (2, "bf16-mixed", 2e-2)],
)
def test_sync_batchnorm_of_unequal_batches(dim, precision, rtol):
    want = _sync_bn(dim, precision, "auto", 1)
    results = run_ranks(2, _sync_bn, dim, precision)
    assert_close(results[1], results[0], rtol=0)
    assert_close(results[0], want, rtol=rtol)


def _advice(strategy, **settings):
    warning_cache.clear()
    if settings:
        strategy = lightning_pardist.DDPStrategy(**settings)
    trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Logs(), datamodule=Both(points(BATCH * 4)))
    return [text for warning in caught if "sync_dist=True" in (text := str(warning.message))]


@pytest.mark.parametrize("strategy", ["pardist_ddp", "pardist_zero3", "pardist_tp"])
def test_no_advice_to_combine_what_is_combined_or_equal(strategy):
    assert run_ranks(2, _advice, strategy) == [[], []]


def _unsynced():
    return _advice("", sync_metrics=False)


def test_advice_to_combine_what_is_not():
    # Only rank zero warns.
    assert len(run_ranks(2, _unsynced)[0]) > 3
