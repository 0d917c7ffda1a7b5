"""Workers that take over a lost worker's share of the data: a single worker with simulated losses, and a whole job."""

from collections import Counter

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from lightning_pardist.trainer.shared_epochs import SharedEpochs
from tests.helpers.lost import check_replay, done, lose, samples_of, told, trained
from tests.helpers.runs import quiet_trainer
from tests.scripts.lose import BATCH, dataset
from tests.scripts.lose import Module as LoseModule

SIZE = 24


class Module(pl.LightningModule):
    """Records the samples of each step, and where it steps, validates and counts epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.seen: list[tuple[int, list[int]]] = []
        self.steps: list[tuple[int, int]] = []
        self.validated: list[tuple[int, int]] = []
        self.rates: list[float] = []
        self.shared: SharedEpochs | None = None

    def training_step(self, batch, batch_idx):
        assert self.shared is not None
        (x,) = batch
        self.seen.append((self.current_epoch, x[:, 0].long().tolist() if self.shared.counts else []))
        return F.mse_loss(self.net(x), x)

    def on_before_optimizer_step(self, optimizer):
        self.steps.append((self.current_epoch, self.trainer.fit_loop.batch_idx))

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking and batch_idx == 0:
            self.validated.append((self.current_epoch, self.trainer.fit_loop.batch_idx))

    def on_train_epoch_end(self):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def loader(workers, rank, *, shuffle=True, size=SIZE, **options):
    data = TensorDataset(torch.arange(size, dtype=torch.float32)[:, None])
    sampler = DistributedSampler(data, num_replicas=workers, rank=rank, shuffle=shuffle)
    return DataLoader(data, **{"batch_size": 2, "sampler": sampler, **options})


def fit(rank, losses, *, workers=3, epochs=3, loaders=None, **options):
    """Train as one of several workers with simulated losses: at each meeting, the lost workers and their progress."""
    found = options.pop("settings", {})
    trainer = quiet_trainer(
        strategy="pardist_ddp", devices=1, max_epochs=epochs, use_distributed_sampler=False, num_sanity_val_steps=0,
        limit_val_batches=1, **options,
    )  # fmt: skip
    module, told = Module(), iter(losses)
    gone = {}

    def meet():
        gone.update(next(told, {}))
        return dict(gone)

    module.shared = SharedEpochs(trainer, "it", workers=range(workers), rank=rank, meet=meet)
    module.shared.attach()
    try:
        trainer.fit(module, loader(workers, rank, **found) if loaders is None else loaders, DataLoader(range(2)))
    finally:
        module.shared.detach()
    return module


def of(module, epoch):
    return [sample for number, samples in module.seen if number == epoch for sample in samples]


@pytest.mark.parametrize("loaders", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_every_sample_is_trained_on_once_in_each_epoch(loaders):
    settings = {"num_workers": loaders, "persistent_workers": loaders > 0}
    # Worker 1 is lost in the first epoch, worker 2 while it processes its part of worker 1's batches.
    losses = [{1: (0, 1)}, {2: (0, 4)}, {}]
    alone, first = fit(1, [], settings=settings), fit(0, losses, settings=settings)
    third = fit(2, [{1: (0, 1)}], settings=settings, epochs=1)
    assert [len(samples) for epoch, samples in first.seen if epoch == 0] == [2] * 7
    theirs = [samples for epoch, samples in third.seen if epoch == 0]
    assert theirs[4:] == [of(first, 0)[-2:], []]
    seen = of(first, 0) + [sample for samples in theirs[:4] for sample in samples] + of(alone, 0)[:2]
    assert sorted(seen) == list(range(SIZE))
    for epoch in (1, 2):
        assert sorted(of(first, epoch)) == list(range(SIZE))
    assert of(first, 1) != of(first, 2)


def test_steps_validation_and_schedules_are_those_of_a_longer_epoch():
    # Four batches, accumulated in threes with one left over: then two more.
    module = fit(0, [{1: (0, 0), 2: (0, 4)}, {}], accumulate_grad_batches=3, epochs=2)
    assert [step for epoch, step in module.steps if epoch == 0] == [2, 3, 5, 7]
    assert [step for epoch, step in module.steps if epoch == 1] == [2, 5, 8, 11]
    assert module.validated == [(0, 7), (1, 11)]
    assert module.rates == [5e-5, 2.5e-5]
    # With validation in the middle of an epoch.
    module = fit(0, [{1: (0, 0), 2: (0, 4)}, {}], epochs=2, val_check_interval=3)
    assert module.validated == [(0, 2), (0, 5), (1, 2), (1, 5), (1, 8), (1, 11)]
    module = fit(0, [{1: (0, 0), 2: (0, 4)}, {}], epochs=2, val_check_interval=0.5)
    assert module.validated == [(0, 1), (0, 3), (0, 7), (1, 5), (1, 11)]


def test_limits_hold_for_each_worker_and_what_was_not_begun_is_left_whole():
    # A worker lost in an evaluation, or before its first step of the epoch, leaves its whole share.
    module = fit(0, [{}, {1: (0, 2)}], epochs=3, limit_train_batches=2)
    assert [len([1 for epoch, _ in module.seen if epoch == number]) for number in range(3)] == [2, 3, 2]
    module = fit(0, [{1: (0, 2)}], epochs=2, limit_train_batches=0.5)
    assert [len([1 for epoch, _ in module.seen if epoch == number]) for number in range(2)] == [2, 3]
    module = fit(0, [{1: (0, 2)}], epochs=2, max_steps=4)
    assert len(module.seen) == 4
    bar = TQDMProgressBar(leave=True)
    module = fit(0, [{1: (0, 0)}], epochs=1, callbacks=[bar], enable_progress_bar=True)
    assert bar.train_progress_bar.total == bar.train_progress_bar.n == 6


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.zeros(4, 1)

    def __len__(self):
        return 4


@pytest.mark.parametrize(
    ("loaders", "message"),
    [
        (lambda: DataLoader(Stream(), batch_size=2), "Stream is an iterable dataset"),
        (lambda: range(4), "the training loader is a range"),
        (lambda: [loader(3, 0), loader(3, 0)], "there are 2 training loaders"),
        (lambda: DataLoader(range(4), batch_size=2, shuffle=True), "in the order of a RandomSampler"),
        (lambda: loader(3, 0, batch_size=None), "has no batch_size"),
        (lambda: loader(3, 1), "is for rank 1 of 3, instead of rank 0 of 3"),
        (lambda: loader(2, 0), "is for rank 0 of 2, instead of rank 0 of 3"),
    ],
)
def test_loaders_whose_batches_nobody_else_knows_are_refused(loaders, message):
    with pytest.raises(ValueError, match=f"{message}.*set lost_workers='report'"):
        fit(0, [], loaders=loaders())


@pytest.mark.slow
def test_a_job_trains_on_everything_once_without_a_worker(tmp_path):
    finished = lose(tmp_path, "kill", 1, LOSE_SHARE="1", LOSE_STEPS="8", LOSE_AT="3")
    assert finished.code == 0, finished.output
    assert not finished.left
    (line,) = told(finished)
    assert "Worker 1 has gone after 3 updates" in line
    assert "and take over the rest of its share of the data" in line
    assert "The 5 batches left of its share of this epoch go to these workers, in 3 more steps" in finished.output
    found = done(finished)
    assert sorted(found) == [0, 2, 3]
    assert {each["step"] for each in found.values()} == {8 + 3 + 12}
    assert len({(each["val"], each["test_val"], each["sum"]) for each in found.values()}) == 1
    for epoch in (0, 1):
        assert sorted(trained(tmp_path, epoch)) == list(range(8 * BATCH * 3))
    # Batches in flight in the killed worker were started again by another one.
    steps = [step for worker in range(3) for step in samples_of(tmp_path, worker) if step["epoch"] == 0]
    begun = Counter(sample for step in steps if step["counts"] for sample in step["samples"])
    under_way = samples_of(tmp_path, 1)[-1]["samples"]
    assert begun == Counter([*range(8 * BATCH * 3), *under_way])
    check_replay(tmp_path, size=8 * BATCH * 3)


@pytest.mark.slow
def test_a_second_loss_among_the_batches_of_a_first_one_leaves_nothing_out(tmp_path):
    # Four workers that accumulate two batches, with the Trainer's sampler and separate loader processes.
    settings = {
        "LOSE_SHUFFLE": "1",
        "LOSE_LOADERS": "1",
        "LOSE_SIZE": "128",
        "LOSE_ACCUMULATE": "2",
        "LOSE_MORE": "2:9",
    }
    finished = lose(
        tmp_path, "kill", 1, workers=4, servers=2, staleness=None,
        LOSE_SHARE="1", LOSE_STEPS="8", LOSE_AT="3", **settings,
    )  # fmt: skip
    assert finished.code == 0, finished.output
    first, second = told(finished)
    assert "Worker 1 has gone after 1 updates" in first
    assert "Worker 2 has gone after 4 updates" in second
    assert "The 2 batches left of its share of this epoch go to these workers, in 1 more steps" in finished.output
    for epoch in (0, 1):
        assert sorted(trained(tmp_path, epoch)) == list(range(128))
    steps = [step["batch"] for step in samples_of(tmp_path, 0)]
    assert steps == [*range(8 + 2 + 1), *range(16)]
    check_replay(tmp_path, workers=4, size=128, accumulate=2)


@pytest.mark.slow
def test_a_run_goes_on_with_what_was_left_of_an_epoch(tmp_path):
    finished = lose(tmp_path, "kill", 1, LOSE_SHARE="1", LOSE_STEPS="8", LOSE_AT="3", LOSE_SAVE="1", LOSE_EPOCHS="1")
    assert finished.code == 0, finished.output
    shares = [[step["samples"] for step in samples_of(tmp_path, worker)] for worker in range(3)]
    every = set(range(8 * BATCH * 3))
    # Resume in the epoch's own batches, with another loss after it, and in redistributed batches.
    for step, fault, rank, turns in ((4, "kill", 2, 5), (9, "none", -1, 1)):
        folder = tmp_path / str(step)
        folder.mkdir()
        begun = [*shares[0][:step], *shares[1][:3], *shares[2][:step]]
        resumed = lose(
            folder, fault, rank, LOSE_SHARE="1", LOSE_STEPS="8", LOSE_AT="5",
            LOSE_FROM=str(tmp_path / f"step={step}.ckpt"),
        )  # fmt: skip
        assert resumed.code == 0, resumed.output
        assert sorted(trained(folder, 0)) == sorted(every - {sample for batch in begun for sample in batch})
        assert sorted(trained(folder, 1)) == sorted(every)
        # Of five turns with 13 batches, worker 2 makes two, and leaves two batches.
        more, later = (1, 12) if fault == "kill" else (0, 8)
        assert {each["step"] for each in done(resumed).values()} == {step + turns + more + later}
        check_replay(folder, begin=tmp_path / f"step={step}.ckpt", size=8 * BATCH * 3)
    # Other strategies continue after as many batches as all workers together have begun.
    module = LoseModule()
    trainer = quiet_trainer(strategy="pardist_ddp", devices=1, max_epochs=2, default_root_dir=tmp_path)
    loader = DataLoader(dataset(8 * BATCH * 3), batch_size=BATCH)
    trainer.fit(module, loader, ckpt_path=str(tmp_path / "step=9.ckpt"))
    assert trainer.global_step == 9 + 3 + 24
    # The epoch's last checkpoint counts as a whole epoch.
    trainer = quiet_trainer(strategy="pardist_ddp", devices=1, max_epochs=2, default_root_dir=tmp_path)
    trainer.fit(LoseModule(), loader, DataLoader(dataset(16)), ckpt_path=str(tmp_path / "last.ckpt"))
    assert trainer.global_step == 11 + 24
