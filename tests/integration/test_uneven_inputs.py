"""Ranks with different numbers of batches: every sample counts once, and no rank blocks on one that is done."""

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

from lightning_pardist import (
    DDPStrategy,
    FSDPStrategy,
    HybridStrategy,
    LocalSGDStrategy,
    PipelineStrategy,
    ZeroStrategy,
)
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer

SAMPLES, EPOCHS = 8, 2
#: Batches of each rank.
BATCHES = (3, 5)
STRATEGIES = {
    "ddp": DDPStrategy,
    "zero1": lambda **kwargs: ZeroStrategy(zero_stage=1, **kwargs),
    "zero2": lambda **kwargs: ZeroStrategy(zero_stage=2, **kwargs),
    "zero3": FSDPStrategy,
    "tp": lambda **kwargs: HybridStrategy(tensor_parallel_size=2, **kwargs),
    "islands": lambda **kwargs: LocalSGDStrategy(sync_every=1000, **kwargs),
    "pp": lambda **kwargs: PipelineStrategy(pipeline_parallel_size=2, **kwargs),
}


class Module(pl.LightningModule):
    def __init__(self, has_norm=False):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8) if has_norm else nn.Tanh(), nn.Linear(8, 4))
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        values, targets = batch
        loss = F.cross_entropy(self.net(values), targets, ignore_index=0)
        self.log("loss", loss, on_epoch=True)
        self.log("number", values.mean(), on_step=False, on_epoch=True)
        self.mean.update(values.detach().mean(1))
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, self.trainer.max_epochs * 5)]


class Stream(IterableDataset):
    def __init__(self, data, batches):
        self.data, self.batches = data, batches

    def __iter__(self):
        for batch in self.batches:
            yield tuple(tensor[batch] for tensor in self.data.tensors)


def _loader(rank, kind, batches):
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(
        torch.randn(5 * SAMPLES, 6, generator=generator), torch.randint(0, 4, (5 * SAMPLES,), generator=generator)
    )
    half = SAMPLES // 2

    def of(step):
        """Return a step's samples; the first half of a global batch belongs to the first rank."""
        ranks = [each for each in (0, 1) if step < batches[each] and rank in (None, each)]
        return [step * SAMPLES + each * half + index for each in ranks for index in range(half)]

    chosen = [found for step in range(max(batches)) if (found := of(step))]
    if kind == "stream":
        return DataLoader(Stream(data, chosen), batch_size=None)
    return DataLoader(data, batch_sampler=chosen)


def _fit(strategy, devices, kind, batches, given, trainer_kwargs):
    torch.manual_seed(3)
    module = Module(has_norm=trainer_kwargs.get("sync_batchnorm", False))
    made = STRATEGIES[strategy](**given) if strategy != "single" else "auto"
    trainer = quiet_trainer(
        strategy=made, devices=devices, use_distributed_sampler=False, max_epochs=EPOCHS, **trainer_kwargs
    )
    rank = None if strategy == "single" else trainer.strategy.distributed_sampler_kwargs["rank"]
    trainer.fit(module, _loader(rank, kind, batches))
    logged = {name: value for name, value in trainer.callback_metrics.items() if not name.endswith("_step")}
    return {"weights": snapshot(module), "logged": logged, "steps": trainer.global_step}


def _run(strategy, kind="sized", *, world=2, batches=BATCHES, wanted_batches=None, given=None, **trainer_kwargs):
    wanted_batches = wanted_batches or batches
    (wanted,) = run_ranks(1, _fit, "single", 1, kind, wanted_batches, {}, trainer_kwargs)
    for found in run_ranks(world, _fit, strategy, world, kind, batches, given or {}, trainer_kwargs):
        assert found["steps"] == wanted["steps"]
        assert_close(found["weights"], wanted["weights"])
        assert_close(found["logged"], wanted["logged"])


@pytest.mark.push("tp-4-sized", "zero3-2-stream", "zero2-2-sized", "ddp-2-stream")
@pytest.mark.parametrize("kind", ["sized", "stream"])
@pytest.mark.parametrize(
    ("strategy", "world"), [("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2), ("tp", 4)], ids=str
)
def test_every_sample_counts_once(strategy, world, kind):
    _run(strategy, kind, world=world)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_only_batches_that_count_enter_synchronized_statistics(strategy):
    # The first rank, whose buffers are sent to the others, is through first.
    _run(strategy, "stream", sync_batchnorm=True)


_PIPELINES = [
    *(({}, "sized"), ({"data_parallel": "zero3"}, "stream"), ({"schedule": "mp"}, "sized")),
    *(
        pytest.param(given, kind, marks=pytest.mark.slow)
        for given, kind in (
            ({}, "stream"),
            ({"data_parallel": "zero2"}, "sized"),
            ({"data_parallel": "zero2"}, "stream"),
            ({"data_parallel": "zero3"}, "sized"),
            ({"schedule": "mp"}, "stream"),
        )
    ),
]


@pytest.mark.push("{}-sized")
@pytest.mark.parametrize(("given", "kind"), _PIPELINES, ids=str)
def test_every_sample_counts_once_in_pipelines(given, kind):
    _run("pp", kind, world=4, given=given)


def test_a_pipeline_may_be_through_first():
    _run("pp", "stream", world=4, batches=(5, 2), accumulate_grad_batches=2)


@pytest.mark.parametrize("kind", ["sized", "stream"])
def test_the_first_rank_may_have_more(kind):
    _run("ddp", kind, batches=(5, 2), accumulate_grad_batches=2)


@pytest.mark.parametrize("kind", ["sized", "stream"])
def test_batches_that_not_all_have_are_dropped_on_request(kind):
    _run("zero2", kind, wanted_batches=(3, 3), given={"uneven_inputs": "drop"})


def test_ranks_may_be_weighed_alike_as_long_as_they_have_batches():
    run_ranks(2, _fit, "ddp", 2, "stream", BATCHES, {"loss_weight": "ranks"}, {})


def _island(rank):
    """Return the result of a rank that trains alone: steps for missing batches have zero gradients."""
    torch.manual_seed(3)
    module = Module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, EPOCHS * 5)
    for _ in range(EPOCHS):
        batches = list(_loader(rank, "sized", BATCHES))
        for step in range(max(BATCHES)):
            optimizer.zero_grad(set_to_none=False)
            if step < len(batches):
                F.cross_entropy(module.net(batches[step][0]), batches[step][1], ignore_index=0).backward()
            optimizer.step()
        schedule.step()
    return snapshot(module)


def test_an_island_of_one_rank_learns_and_logs_nothing_of_batches_that_stand_in():
    ranks = [_island(rank) for rank in range(2)]
    wanted = {name: (ranks[0][name] + ranks[1][name]) / 2 for name in ranks[0]}
    values = torch.cat([values for rank in range(2) for values, _ in _loader(rank, "sized", BATCHES)])
    for found in run_ranks(2, _fit, "islands", 2, "sized", BATCHES, {}, {}):
        assert_close(found["weights"], wanted)
        assert_close({"number": found["logged"]["number"]}, {"number": values.mean()})


def test_a_rank_without_any_batch_is_named():
    with pytest.raises(Exception, match="uneven_inputs='drop'"):
        run_ranks(2, _fit, "ddp", 2, "stream", (0, 3), {}, {})


def test_unknown_setting():
    with pytest.raises(ValueError, match="uneven_inputs='wait'"):
        DDPStrategy(uneven_inputs="wait")
    with pytest.raises(ValueError, match="loss_weight='words'"):
        DDPStrategy(loss_weight="words")


class EveryNth(IterableDataset):
    """Splits its batches over all ranks by itself, as datasets of files do, regardless of tensor or pipeline ranks."""

    def __iter__(self):
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        generator = torch.Generator().manual_seed(2)
        for index in range(6):
            batch = torch.randn(SAMPLES, 6, generator=generator), torch.randint(0, 4, (SAMPLES,), generator=generator)
            if index % ranks == rank:
                yield batch


def _fit_every_nth(strategy, devices, workers):
    torch.manual_seed(3)
    module = Module()
    made = STRATEGIES[strategy]() if strategy != "single" else "auto"
    trainer = quiet_trainer(strategy=made, devices=devices, max_epochs=EPOCHS)
    context = "fork" if workers else None
    trainer.fit(module, DataLoader(EveryNth(), batch_size=None, num_workers=workers, multiprocessing_context=context))
    return snapshot(module) | {"steps": torch.tensor(trainer.global_step)}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("strategy", ["tp", "pp"])
def test_datasets_that_ask_torch_for_rank_and_size_are_told_those_with_other_samples(strategy, workers):
    (wanted,) = run_ranks(1, _fit_every_nth, "single", 1, workers)
    for found in run_ranks(2, _fit_every_nth, strategy, 2, workers):
        assert_close(found, wanted)


def _fit_by_global_rank(strategy, kind):
    """Give each rank a different number of batches, as if all ranks had different samples."""
    trainer = quiet_trainer(
        strategy=STRATEGIES[strategy](), devices=2, use_distributed_sampler=False, max_epochs=EPOCHS
    )
    with pytest.raises(ValueError, match="distributed_sampler_kwargs") as refusal:
        trainer.fit(Module(), _loader(trainer.global_rank, kind, (2, 3)))
    return str(refusal.value)


@pytest.mark.parametrize("kind", ["sized", "stream"])
@pytest.mark.parametrize("strategy", ["tp", "pp"])
def test_ranks_of_one_group_with_different_numbers_of_batches(strategy, kind):
    for message in run_ranks(2, _fit_by_global_rank, strategy, kind):
        assert message.startswith("Ranks that share their batches have different numbers of batches: ")
