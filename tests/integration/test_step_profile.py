"""StepProfile: all of a step's time is attributed, and the slowest rank is reported with the slow part."""

import json
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_pardist.callbacks import StepProfile
from lightning_pardist.callbacks.step_page import coarse
from lightning_pardist.callbacks.step_profile import report, slowest_rank
from tests.helpers.models import Classifier
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Data, quiet_trainer

pytestmark = pytest.mark.alone

STEPS = 6


class Slow(Classifier):
    """One rank computes or loads data slowly."""

    at = ""

    def training_step(self, batch, batch_idx):
        if self.at == "compute" and self.global_rank == 1:
            time.sleep(0.2)
        return super().training_step(batch, batch_idx)


class SlowData(Data):
    def __init__(self, *args, sleeps):
        super().__init__(*args)
        self.sleeps = sleeps

    def train_dataloader(self):
        return SlowLoader(super().train_dataloader(), self.sleeps and dist.get_rank() == 1)


class SlowLoader:
    def __init__(self, loader: DataLoader, sleeps: bool):
        self.loader, self.sleeps = loader, sleeps

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for batch in self.loader:
            if self.sleeps:
                time.sleep(0.2)
            yield batch


def _train(strategy, devices, at, folder):
    torch.manual_seed(0)
    module = Slow()
    module.at = at
    profile = StepProfile(STEPS, skip=1, dirpath=folder)
    data = SlowData(module.dataset(12 * (STEPS + 4)), sleeps=at == "data")
    waits = dist.Work.wait, dist.ProcessGroup.allreduce
    trainer = quiet_trainer(strategy=strategy, devices=devices, callbacks=[profile], use_distributed_sampler=False)
    before = trainer.profiler
    start = time.perf_counter()
    trainer.fit(module, datamodule=data)
    assert sum(sum(step.values()) for step in profile.seconds) < time.perf_counter() - start
    assert trainer.profiler is before
    assert (dist.Work.wait, dist.ProcessGroup.allreduce) == waits
    assert len(profile.seconds) == STEPS
    means = [sum(step.get(kind, 0.0) for step in profile.seconds) / STEPS for kind in ("compute", "data")]
    return means, {kind for step in profile.seconds for kind in step}


@pytest.mark.parametrize("at", ["compute", "data"])
def test_the_slowest_rank_and_what_it_is_slow_at(at, tmp_path):
    (fast, kinds), (slow, _) = run_ranks(2, _train, "pardist_zero2", 2, at, str(tmp_path))
    index = ("compute", "data").index(at)
    assert slow[index] - fast[index] > 0.1
    assert "wait data_shard" in kinds
    rows = [
        [json.loads(line) for line in (tmp_path / f"step_profile-rank{rank}.jsonl").read_text().splitlines()]
        for rank in range(2)
    ]
    page = (tmp_path / "step_profile.html").read_text()
    assert all(f">rank {rank}</text>" in page for rank in range(2))
    assert f"<title>{at}: " in page
    assert "<title>wait data_shard: " in page
    means = [
        {kind: sum(row.get(kind, 0.0) for row in of_rank) / STEPS for kind in of_rank[0] if kind != "step"}
        for of_rank in rows
    ]
    rank, kind, seconds = slowest_rank(means)
    assert (rank, kind) == (1, at)
    assert seconds > 0.1
    shown = report(means, STEPS)
    assert f"Rank 1 is the slowest: {1e3 * seconds:.2f} ms a step more than the median of the others in {at}." in shown
    assert ("More num_workers" in shown) == (at == "data")


def _train_twice(folder):
    _train("pardist_zero2", 2, "", folder)
    profiles = []
    for slow in (False, True):
        module = Slow()
        module.at = "compute" if slow else ""
        profile = StepProfile(3, skip=1)
        trainer = quiet_trainer(strategy="pardist_ddp", devices=2, callbacks=[profile], use_distributed_sampler=False)
        trainer.fit(module, datamodule=Data(module.dataset(12 * 6)))
        profiles.append(profile.shown)
    return profiles


def test_a_second_run_compares_its_own_numbers(tmp_path):
    (_, second), _ = run_ranks(2, _train_twice, str(tmp_path))
    assert "Rank 1 is the slowest" in second


def test_stages_wait_along_the_pipeline(tmp_path):
    for _, kinds in run_ranks(2, _train, "pardist_pp", 2, "", str(tmp_path)):
        assert "wait pipeline_parallel" in kinds


def test_a_step_is_drawn_without_what_nobody_would_see():
    spans = [("host", 0.0, 1.0), ("data", 1.0, 1.0005), ("host", 1.0005, 2.0), ("compute", 2.0, 4.0)]
    assert coarse(spans) == [("host", 0.0, 2.0), ("compute", 2.0, 4.0)]
    assert coarse([]) == []


def test_equal_ranks_have_no_slowest():
    assert slowest_rank([{"compute": 1.0, "wait": 0.1}, {"compute": 1.05}]) is None
    assert slowest_rank([{"compute": 1.0}]) is None


def test_nothing_to_measure_is_refused():
    with pytest.raises(ValueError, match="measures nothing"):
        StepProfile(0)
    with pytest.raises(ValueError, match="measures nothing"):
        StepProfile(skip=0)


def test_a_run_that_is_too_short_says_so():
    profile = StepProfile(3, skip=5)
    module = Slow()
    trainer = quiet_trainer(strategy="pardist_ddp", devices=1, callbacks=[profile])
    with pytest.warns(UserWarning, match="the run ended within 6 batches"):
        trainer.fit(module, datamodule=Data(module.dataset(12 * 3)))


def _one_measures(folder):
    module = Slow()
    profile = StepProfile(3, skip=1 if dist.get_rank() == 0 else 50)
    trainer = quiet_trainer(strategy="pardist_ddp", devices=2, callbacks=[profile], use_distributed_sampler=False)
    trainer.fit(module, datamodule=Data(module.dataset(12 * 6)))
    return profile.shown


def test_nobody_waits_long_for_a_rank_that_measures_nothing(tmp_path):
    shown, _ = run_ranks(2, _one_measures, str(tmp_path), timeout_s=60)
    assert "on 1 ranks" in shown
