"""Scripts that start their own ranks: every launch method, and every kind of failure."""

import json
import os
import re
import sys
import time

import psutil
import pytest

from tests.helpers.cluster import TRAIN as CLUSTER_TRAIN
from tests.helpers.models import Classifier
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, Data, quiet_trainer
from tests.helpers.scripts import ENVIRONMENT, ROOT, run_script

pytestmark = pytest.mark.alone

TRAIN = str(ROOT / "tests" / "scripts" / "train.py")


def test_popen_trains_and_every_rank_ends_with_the_same_weights():
    finished = run_script(TRAIN, "pardist_ddp", "2")
    assert finished.code == 0, finished.output
    sums = dict(re.findall(r"done (\d) (\S+)", finished.output))
    assert set(sums) == {"0", "1"}
    assert len(set(sums.values())) == 1
    assert not finished.left


@pytest.mark.parametrize("name", [pytest.param("pardist_ddp_spawn", marks=pytest.mark.slow), "pardist_ddp_notebook"])
def test_worker_processes(name):
    finished = run_script(TRAIN, name, "2")
    assert finished.code == 0, finished.output
    assert "done 0" in finished.output
    assert not finished.left


def test_exception_on_a_started_rank_is_what_the_job_shows_last():
    finished = run_script(TRAIN, "pardist_ddp", "2", "raise", "1")
    assert finished.code == 1
    last = finished.output.strip().splitlines()
    assert last[-1].endswith("ValueError: the user's own mistake"), finished.output
    assert any(line.startswith("The job ended because rank 1") for line in last), finished.output
    assert not finished.left


@pytest.mark.slow
def test_exception_on_the_first_rank():
    finished = run_script(TRAIN, "pardist_ddp", "2", "raise", "0")
    assert finished.code == 1
    assert finished.output.strip().splitlines()[-1].endswith("ValueError: the user's own mistake"), finished.output
    assert not finished.left


def test_killed_rank_is_named():
    finished = run_script(TRAIN, "pardist_ddp", "2", "kill", "1")
    assert finished.code == 1
    assert "was killed by SIGKILL" in finished.output.strip().splitlines()[-1], finished.output
    assert not finished.left


def test_killed_first_rank_leaves_nobody_behind():
    finished = run_script(TRAIN, "pardist_ddp", "2", "kill", "0")
    assert finished.code == -9
    assert not finished.left
    assert "rank 0" in finished.output or "is gone" in finished.output, finished.output


@pytest.mark.parametrize("fault", ["hang", "hang in backward"])
def test_hanging_rank_is_found_and_its_place_shown(fault):
    finished = run_script(TRAIN, "pardist_ddp", "2", fault, "1")
    assert finished.code == 1
    report = finished.output[finished.output.rindex("The job ended because rank 1") :]
    assert "time.sleep(600)" in report, finished.output
    assert not finished.left


def test_ranks_that_wait_in_the_same_place_are_ended_long_before_the_timeout():
    finished = run_script(TRAIN, "pardist_ddp", "2", "stuck", "0")
    assert finished.code == 1
    assert "All ranks have waited in the same collective for 5 s" in finished.output, finished.output
    assert "torch.distributed.recv(torch.zeros(1)" in finished.output, finished.output
    assert not finished.left


@pytest.mark.slow
def test_ranks_in_different_collectives_are_named_long_before_the_timeout():
    finished = run_script(TRAIN, "pardist_ddp", "2", "desync", "1")
    assert finished.code == 1
    assert "Ranks wait in different collectives" in finished.output, finished.output
    report = finished.output[finished.output.rindex("Ranks wait in different collectives") :]
    assert "torch.distributed.barrier()" in report, finished.output
    assert "Rank 0 waits in" in report, finished.output
    assert "Rank 1 waits in" in report, finished.output
    assert not finished.left


def test_ranks_that_call_a_layer_another_number_of_times_are_named():
    """The layer's parameters have another size than those that the other rank gathers meanwhile."""
    finished = run_script(TRAIN, "units", "2", "layer", "1")
    assert finished.code == 1
    report = finished.output[finished.output.rindex("Ranks wait in different collectives") :]
    assert "or set allow_divergent_forward=True" in report, finished.output
    assert "inputs = self.before(inputs)" in report, finished.output
    assert not finished.left


@pytest.mark.slow
def test_stopped_rank_is_named():
    finished = run_script(TRAIN, "pardist_ddp", "2", "stop", "1")
    assert finished.code == 1
    assert "Nothing was heard of rank 1" in finished.output, finished.output
    assert not finished.left


@pytest.mark.slow
def test_stopped_first_rank_holds_nobody(tmp_path):
    """The first rank also holds the job's store, which stops responding."""
    command = [sys.executable, TRAIN, "pardist_ddp", "2", "stop", "0"]
    output = tmp_path / "output.txt"
    with output.open("w") as file:
        job = psutil.Popen(command, stdout=file, stderr=file, env=os.environ | ENVIRONMENT)
    try:
        _until(lambda: job.status() == psutil.STATUS_STOPPED)
        stopped = time.monotonic()
        _until(lambda: all(child.status() == psutil.STATUS_ZOMBIE for child in job.children()))
        print(f"the other rank ended {time.monotonic() - stopped:.1f} s after the first was stopped")
        assert time.monotonic() - stopped < 5 + 5, output.read_text()
    finally:
        for process in (*job.children(), job):
            process.kill()
        job.wait()
    assert "The job's store has not answered rank 1" in output.read_text(), output.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "fault", "reported"),
    [
        ("pardist_zero3", "barrier", "Ranks wait in different collectives"),
        ("pardist_tp", "barrier", "Ranks wait in different collectives"),
        ("pardist_pp", "barrier", "Ranks wait in different collectives"),
        ("pardist_pp", "SIGSTOP", "Nothing was heard of rank 1"),
        ("pardist_tp", "SIGKILL", "was killed by SIGKILL"),
        ("pardist_pp", "raise", "ValueError: the user's own mistake"),
    ],
)
def test_every_kind_of_strategy_ends_in_time(strategy, fault, reported):
    given = {"strategy": strategy, "devices": 2, "settings": {"heartbeat_timeout_s": 5}, "fault": fault, "fault_at": 3}
    finished = run_script(CLUSTER_TRAIN, json.dumps(given))
    seconds = finished.ended - float(re.search(r"fault at (\S+)", finished.output)[1])
    print(f"{strategy}, {fault}: the job has ended {seconds:.1f} s later (heartbeat_timeout_s=5)")
    assert finished.code == 1
    assert reported in finished.output, finished.output
    # Heartbeat timeout plus the time a rank gets to exit by itself.
    assert seconds < 5 + 10, finished.output
    assert not finished.left


def _until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_rank_that_dies_before_training():
    finished = run_script(TRAIN, "pardist_ddp", "2", "import", "1")
    assert finished.code == 1
    assert "no such module on this rank" in finished.output
    assert "exit code 1. Training had not begun." in finished.output.strip().splitlines()[-1], finished.output
    assert not finished.left


def test_rank_that_fails_after_training_fails_the_job():
    finished = run_script(TRAIN, "pardist_ddp", "2", "late", "1")
    assert finished.code == 1
    assert "exit code 3" in finished.output, finished.output


@pytest.mark.slow
def test_exception_in_a_spawned_rank():
    finished = run_script(TRAIN, "pardist_ddp_spawn", "2", "raise", "1")
    assert finished.code == 1
    assert "ValueError: the user's own mistake" in finished.output.strip().splitlines()[-1], finished.output
    assert not finished.left


def test_torchrun():
    finished = run_script(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", TRAIN, "pardist_ddp", "2"
    )
    assert finished.code == 0, finished.output
    assert len(set(re.findall(r"done \d (\S+)", finished.output))) == 1
    assert not finished.left


class Mistaken(Classifier):
    mistake = True

    def on_train_start(self):
        if self.mistake:
            raise LookupError("made on every rank")


def _all_mistaken():
    module = Mistaken()
    trainer = quiet_trainer(strategy="pardist_ddp", devices=2)
    for _ in range(2):
        with pytest.raises(LookupError, match="made on every rank"):
            trainer.fit(module, datamodule=Data(module.dataset(BATCH)))
    module.mistake = False
    trainer.fit(module, datamodule=Data(module.dataset(BATCH)))
    return trainer.global_step


def test_an_exception_of_all_ranks_is_raised_on_all_and_may_be_caught():
    assert run_ranks(2, _all_mistaken) == [1, 1]


def test_children_by_fork_after_a_run():
    code = (
        "import gc, os, runpy, sys; sys.argv = ['', 'by_name', '1']\n"
        "import lightning_pardist, lightning.pytorch as pl, torch\n"
        f"module = runpy.run_path({TRAIN!r})['Module']('none', 0)\n"
        "data = torch.utils.data.TensorDataset(torch.randn(4, 8), torch.randint(0, 3, (4,)))\n"
        "gc.disable()\n"
        "for _ in range(3):\n"
        "    trainer = pl.Trainer(accelerator='cpu', strategy='pardist_ddp', devices=1, fast_dev_run=1)\n"
        "    trainer.fit(module, torch.utils.data.DataLoader(data))\n"
        "    del trainer\n"
        "    if not (child := os.fork()):\n"
        "        gc.collect()\n"
        "        os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
        "print('collected')\n"
    )
    finished = run_script("-c", code, timeout_s=60)
    assert finished.code == 0, finished.output
    assert "collected" in finished.output


def test_interactive_session():
    code = (
        "import sys; sys.ps1 = '>>> '; sys.argv = ['', 'by_name', '2']\n"
        "import runpy, lightning_pardist\n"
        "import lightning.pytorch as pl\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        f"module = runpy.run_path({TRAIN!r})['Module']('none', 0)\n"
        "import torch\n"
        "data = TensorDataset(torch.randn(16, 8), torch.randint(0, 3, (16,)))\n"
        "trainer = pl.Trainer(accelerator='cpu', strategy='pardist_ddp', devices=2, max_epochs=1, logger=False,\n"
        "    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)\n"
        "before = module.net.weight.clone()\n"
        "trainer.fit(module, DataLoader(data, batch_size=4))\n"
        "print('moved', not torch.equal(before, module.net.weight))\n"
    )
    finished = run_script("-c", code)
    assert finished.code == 0, finished.output
    assert "moved True" in finished.output
    assert not finished.left
