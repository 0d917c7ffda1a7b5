"""Validate, test and predict: one process's metrics for every dataset size, without blocked ranks."""

import os

import lightning.pytorch as pl
import psutil
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from lightning_pardist.trainer.evaluation import ShardSampler
from tests.helpers.parity import assert_close
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer

SIZES = range(1, 10)
BATCH_SIZES = range(1, 5)


def _dataset(length, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(length, 3, generator=generator), torch.randint(0, 2, (length,), generator=generator)
    )


def test_samplers_show_the_seed(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "123")
    assert ShardSampler(range(5), num_replicas=2, rank=1).seed == 123


class Measures(pl.LightningModule):
    """Module that logs in every way that makes sense on one process."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("constant", torch.ones(3))
        self.accuracy = torchmetrics.classification.BinaryAccuracy()
        self.auroc = torchmetrics.classification.BinaryAUROC()
        self.mean = torchmetrics.MeanMetric()
        self.collection = torchmetrics.MetricCollection({"mae": torchmetrics.MeanAbsoluteError()})

    def measure(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        score = self.layer(x)[:, 0]
        loss = (score - y).square()
        self.log("loss", loss.mean(), prog_bar=True)
        self.log("synced", loss.mean(), sync_dist=True)
        self.log("total", loss.sum(), reduce_fx="sum")
        self.log("total_synced", loss.sum(), reduce_fx="sum", sync_dist=True)
        self.log("max", loss.max(), reduce_fx="max")
        self.log("min", loss.min(), reduce_fx=torch.min, sync_dist=True)
        self.log("both", loss.mean(), on_step=True, on_epoch=True, sync_dist=True)
        self.accuracy(score.sigmoid(), y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.auroc(score.sigmoid(), y)
        self.log("auroc", self.auroc)
        self.mean.update(loss)
        self.collection(score, y.float())
        self.log_dict(self.collection)

    def end(self):
        self.log("late", self.mean.compute())
        self.mean.reset()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.measure(batch, batch_idx, dataloader_idx)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.measure(batch, batch_idx, dataloader_idx)

    def on_validation_epoch_end(self):
        self.end()

    def on_test_epoch_end(self):
        self.end()

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self.layer(batch[0])


def _tensors(logged):
    return [{key: torch.as_tensor(value) for key, value in part.items()} for part in logged]


def _sweep(strategy="pardist_ddp", devices=None, sizes=tuple(SIZES), batch_sizes=tuple(BATCH_SIZES)):
    devices = devices or dist.get_world_size()
    results = {}
    trainer = quiet_trainer(strategy=strategy, devices=devices)
    torch.manual_seed(1)
    module = Measures()
    for size in sizes:
        for batch_size in batch_sizes:
            logged = trainer.validate(module, DataLoader(_dataset(size), batch_size=batch_size), verbose=False)
            results[size, batch_size] = _tensors(logged)[0]
    return results


def _same(got, want, skip=()):
    assert got.keys() == want.keys()
    for key, expected in want.items():
        wanted = {name: value for name, value in expected.items() if name not in skip}
        assert_close({name: value for name, value in got[key].items() if name not in skip}, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_metrics_of_every_size(ranks):
    want = _sweep("auto", 1)
    for got in run_ranks(ranks, _sweep):
        _same(got, want)


class Watches(Callback):
    """Callback that checks that hooks see no batches outside the dataset."""

    def __init__(self):
        self.samples = 0

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        assert outputs["seen"] == len(batch[0])
        self.samples += outputs["seen"]


class Gathers(Measures):
    def validation_step(self, batch, batch_idx):
        x, _ = batch
        rows = self.all_gather(x.sum())
        self.log("gathered", rows.reshape(-1).mean(), on_step=True, on_epoch=True, batch_size=1)
        return {"seen": len(x)}

    def on_validation_epoch_end(self):
        pass


def _gathers():
    watches = Watches()
    trainer = quiet_trainer(strategy="pardist_ddp", devices=2, callbacks=[watches])
    for size in (1, 3, 4):
        trainer.validate(Gathers(), DataLoader(_dataset(size), batch_size=1), verbose=False)
    return watches.samples


def test_collectives_in_a_step_that_one_rank_has_no_batch_for():
    assert sum(run_ranks(2, _gathers)) == 1 + 3 + 4


def _several(strategy="pardist_ddp", devices=2):
    loaders = [DataLoader(_dataset(size, seed=size), batch_size=batch) for size, batch in ((5, 1), (3, 4), (1, 2))]
    torch.manual_seed(1)
    trainer = quiet_trainer(strategy=strategy, devices=devices)
    module = Several()
    results = {"validate": _merged(trainer.validate(module, loaders, verbose=False))}
    results["test"] = _merged(trainer.test(module, loaders, verbose=False))
    # With two ranks, the second loader still has one batch per rank, as with one process.
    return results


class Several(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.seen = torch.nn.ModuleList(torchmetrics.MeanMetric() for _ in range(3))

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = self.layer(batch[0])
        self.seen[dataloader_idx].update(loss)
        self.log("metric", self.seen[dataloader_idx])
        self.log("loss", loss.mean())
        self.log("sum", loss.sum(), reduce_fx="sum", sync_dist=True)

    test_step = validation_step


def _merged(logged):
    return {key: torch.as_tensor(value) for part in logged for key, value in part.items()}


def test_several_loaders():
    want = _several("auto", 1)
    assert len(want["test"]) == 9
    for got in run_ranks(2, _several):
        for part, expected in want.items():
            assert_close(got[part], expected)


class Together(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def validation_step(self, batch, batch_idx):
        for name, part in batch.items():
            if part is not None:
                self.log(name, part[0].sum(), reduce_fx="sum")


def _together(strategy="pardist_ddp", devices=2, mode="max_size"):
    loaders = {"long": DataLoader(_dataset(7), batch_size=1), "short": DataLoader(_dataset(3, 4), batch_size=1)}
    trainer = quiet_trainer(strategy=strategy, devices=devices)
    return _merged(trainer.validate(Together(), CombinedLoader(loaders, mode), verbose=False))


def test_combined_loader():
    want = _together("auto", 1)
    for got in run_ranks(2, _together):
        assert_close(got, want)


class Counted(pl.LightningModule):
    """Logs means whose divisors differ from batch to batch: labels that count, their weights, selected elements."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 2.0, 0.5]), label_smoothing=0.1)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        scores, counts = self.layer(x), y >= 0
        losses = F.cross_entropy(scores, y, reduction="none")
        self.log("ignoring", F.cross_entropy(scores, y))
        self.log("number", F.cross_entropy(scores, y).item(), sync_dist=True)
        self.log("weighted", self.weighted(scores, y), on_step=True, on_epoch=True)
        self.log("masked", (losses * counts).sum() / counts.sum().clamp(min=1))
        self.log("by_function", torch.div(torch.sum(losses), torch.count_nonzero(counts).float()))
        self.log("accuracy", (scores.argmax(-1) == y)[counts].float().mean())
        self.log("selected", F.mse_loss(scores[counts], torch.ones_like(scores[counts])))
        self.log("plain", scores.square().mean())
        self.log("sum", self.weighted(scores, y) + 0.5 * F.cross_entropy(scores, y) + 0.1 * scores.square().mean())
        total = torch.zeros(())
        total += F.cross_entropy(scores, y)
        total += self.weighted(scores, y) / 3
        self.log("total", 1 - total)
        self.log("mean_of_both", torch.stack([F.cross_entropy(scores, y), scores[counts].gt(0).float().mean()]).mean())
        overlap = 2 * (scores.sigmoid()[:, 0] * counts).sum()
        self.log("dice", 1 - overlap / (scores.sigmoid()[:, 0].sum() + counts.sum() + 1e-8))
        self.log_dict({"half": F.l1_loss(x, -x).detach(), "once": scores.mean()})
        return F.cross_entropy(scores, y)

    def on_test_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.log("in_hook", outputs)


def _counted_labels(length, seed):
    x, _ = _dataset(length, seed).tensors
    y = torch.randint(-1, 4, (length,), generator=torch.Generator().manual_seed(seed))
    # Of the first batch, one rank's labels are all ignored; of the last one, only one counts.
    y[:8:2], y[-6:], y[-7] = -1, -1, 2
    return TensorDataset(x, torch.where(y < 0, -100, y))


def _counted(strategy="pardist_ddp", devices=2, batch_size=4):
    torch.manual_seed(0)
    loaders = [DataLoader(_counted_labels(length, seed), batch_size) for length, seed in ((40, 3), (23, 4))]
    trainer = quiet_trainer(strategy=strategy, devices=devices)
    (first, second) = trainer.test(Counted(), loaders, verbose=False)
    return first | second


@pytest.mark.parametrize("strategy", ["pardist_ddp", "pardist_zero3"])
def test_means_count_what_they_average(strategy):
    one = _counted("auto", 1, 8)
    for logged in run_ranks(2, _counted, strategy):
        assert logged.keys() == one.keys()
        for key, value in one.items():
            torch.testing.assert_close(
                logged[key], value, rtol=1e-6, atol=1e-7, msg=lambda text, key=key: f"{key}: {text}"
            )


def _predict(size, strategy="pardist_ddp", devices=2):
    class Writer(BasePredictionWriter):
        def __init__(self):
            super().__init__("batch_and_epoch")
            self.indices, self.epochs = [], 0

        def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, *args):
            assert len(prediction) == len(batch_indices)
            self.indices.extend(batch_indices)

        def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
            self.epochs += 1

    writer = Writer()
    torch.manual_seed(1)
    module = Measures()
    trainer = quiet_trainer(strategy=strategy, devices=devices, callbacks=[writer])
    predictions = trainer.predict(module, DataLoader(_dataset(size), batch_size=2))
    flat = torch.cat(predictions) if predictions else torch.zeros(0, 1)
    # A rank without any batch skips the loop with its hooks, as under Lightning's ddp.
    assert writer.epochs == bool(predictions)
    assert not getattr(module, "allow_zero_length_dataloader_with_multiple_devices", False)
    return writer.indices, flat


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_predict_every_sample_once(size):
    indices, want = _predict(size, "auto", 1)
    assert indices == list(range(size))
    results = run_ranks(2, _predict, size)
    together = dict(pair for indices, values in results for pair in zip(indices, values, strict=True))
    assert sum(len(indices) for indices, _ in results) == size
    assert_close({"all": torch.stack([together[i] for i in range(size)])}, {"all": want})


def _samplers():
    """The user's own samplers are kept, even if they give ranks unequal shares."""
    points, rank = _dataset(6), dist.get_rank()
    trainer = quiet_trainer(strategy="pardist_ddp", devices=2)
    module = Measures()
    sampler = DistributedSampler(points, num_replicas=2, rank=rank, shuffle=False)
    trainer.validate(module, DataLoader(points, batch_size=2, sampler=sampler), verbose=False)
    assert trainer.val_dataloaders.sampler is sampler
    whole = quiet_trainer(strategy="pardist_ddp", devices=2, use_distributed_sampler=False)
    loader = DataLoader(points, batch_size=2)
    whole.validate(module, loader, verbose=False)
    assert whole.val_dataloaders is loader

    class Stream(IterableDataset):
        def __iter__(self):
            return iter([points[i] for i in range(4 + rank)])

    logged = trainer.validate(Plain(), DataLoader(Stream(), batch_size=1), verbose=False)[0]
    assert logged["count"] == 4 + 5
    backwards = DataLoader(points, batch_size=4, sampler=list(range(5, -1, -1)))
    assert trainer.validate(Plain(), backwards, verbose=False)[0]["count"] == 6
    shuffled = DataLoader(points, batch_size=1, shuffle=True, drop_last=True)
    assert trainer.validate(Plain(), shuffled, verbose=False)[0]["count"] == 6
    weighted = DataLoader(points, batch_size=2, sampler=RandomSampler(points, num_samples=3))
    assert trainer.validate(Plain(), weighted, verbose=False)[0]["count"] in (3, 6)
    return True


class Plain(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def validation_step(self, batch, batch_idx):
        self.log("count", float(len(batch[0])), reduce_fx="sum")


def test_samplers_of_the_user():
    assert run_ranks(2, _samplers) == [True, True]


class BatchReader(DataLoader):
    """Loader whose sampler yields batches; it creates one unless it is given another, whatever that yields."""

    def __init__(self, dataset, *, batch_size=1, sampler=None, drop_last=False, **kwargs):
        if sampler is None:
            sampler = BatchSampler(SequentialSampler(dataset), batch_size=batch_size, drop_last=drop_last)
            batch_size = None
        super().__init__(dataset, batch_size=batch_size, sampler=sampler, **kwargs)


class Sees(Plain):
    def __init__(self):
        super().__init__()
        self.seen = {"train": [], "val": []}

    def training_step(self, batch, batch_idx):
        assert batch[0].dim() == 2
        self.seen["train"].append(batch[0][:, 0].tolist())
        return self.layer(batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        assert batch[0].dim() == 2
        self.seen["val"] += batch[0][:, 0].tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _drawn_batches():
    points = TensorDataset(torch.arange(12.0)[:, None].expand(12, 3).clone())
    mine = DistributedSampler(
        points, shuffle=False, num_replicas=2, rank=dist.get_rank() if dist.is_initialized() else 0
    )
    half = SequentialSampler(range(6))
    loaders = {
        "subclass": BatchReader(points, batch_size=2),
        "in order": DataLoader(points, batch_size=None, sampler=BatchSampler(SequentialSampler(points), 2, False)),
        "shuffled": DataLoader(points, batch_size=None, sampler=BatchSampler(RandomSampler(points), 2, False)),
        "half": DataLoader(points, batch_size=None, sampler=BatchSampler(half, 2, False)),
        "by batch_sampler": DataLoader(points, batch_sampler=BatchSampler(RandomSampler(points), 2, False)),
        "shares": DataLoader(points, batch_size=None, sampler=BatchSampler(mine, 2, False)),
        "shares by batch_sampler": DataLoader(points, batch_sampler=BatchSampler(mine, 2, False)),
    }
    found = {}
    for name, loader in loaders.items():
        # Ranks start with different random states.
        torch.manual_seed(int(os.environ.get("RANK", "0")) + 5)
        settings = {"max_epochs": 2, "limit_val_batches": 1.0, "num_sanity_val_steps": 0}
        trainer = quiet_trainer(strategy="pardist_ddp", devices=2, **settings)
        module = Sees()
        trainer.fit(module, loader, loader)
        found[name] = module.seen
    return found


def test_samplers_that_draw_batches():
    first, second = run_ranks(2, _drawn_batches)
    for name in first:
        size = 6 if name == "half" else 12
        batches = [first[name]["train"], second[name]["train"]]
        # Both epochs contain every sample once, over both ranks.
        for epoch in (0, 1):
            half = len(batches[0]) // 2
            drawn = [each for rank in batches for batch in rank[epoch * half :][:half] for each in batch]
            assert sorted(drawn) == list(range(size)), name
        assert sorted(first[name]["val"] + second[name]["val"]) == sorted([*range(size)] * 2), name
    assert first["in order"]["train"] == [[0, 2], [4, 6], [8, 10]] * 2
    shuffled = first["shuffled"]["train"]
    assert shuffled[:3] != shuffled[3:]


def _limits(strategy="pardist_ddp", devices=2):
    class Fits(Plain):
        def training_step(self, batch, batch_idx):
            return self.layer(batch[0]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    counts = []
    for kwargs in (
        {"limit_val_batches": 1},
        {"limit_val_batches": 0.5},
        {"num_sanity_val_steps": -1},
        {"inference_mode": False},
    ):
        trainer = quiet_trainer(strategy=strategy, devices=devices, **kwargs)
        trainer.fit(Fits(), DataLoader(_dataset(4), batch_size=2), DataLoader(_dataset(9), batch_size=1))
        counts.append(int(trainer.callback_metrics["count"]))
        trainer.validate(Plain(), DataLoader(_dataset(3), batch_size=1), verbose=False)
    trainer = quiet_trainer(strategy=strategy, devices=devices, fast_dev_run=True)
    trainer.fit(Fits(), DataLoader(_dataset(4), batch_size=2), DataLoader(_dataset(9), batch_size=1))
    return counts


def test_limits_and_sanity_checking():
    # A limit counts batches per rank, as in Lightning: 1 of 5, 2 of 5, then all 9 samples.
    assert run_ranks(2, _limits) == [[2, 4, 9, 9]] * 2


def _threads():
    trainer = quiet_trainer(strategy="pardist_ddp", devices=2)
    counts = []
    for _ in range(4):
        trainer.validate(Plain(), DataLoader(_dataset(4), batch_size=1), verbose=False)
        counts.append((len(psutil.Process().threads()), len(dist.distributed_c10d._world.pg_map)))
        trainer = quiet_trainer(strategy="pardist_ddp", devices=2)
    return counts


def test_runs_leave_no_process_groups_behind():
    for counts in run_ranks(2, _threads):
        assert len({groups for _, groups in counts}) == 1
        assert counts[-1][0] <= counts[0][0] + 2
