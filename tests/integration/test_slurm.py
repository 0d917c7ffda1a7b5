"""Training under a real SLURM: two nodes on this machine."""

import json
import re
import time
from pathlib import Path

import pytest

from tests.helpers.cluster import STRATEGIES, TRAIN, alone, ended, first
from tests.helpers.scripts import ROOT, run_script
from tests.helpers.slurm import Slurm, why_no_slurm

pytestmark = [pytest.mark.alone, pytest.mark.skipif(why_no_slurm() is not None, reason=str(why_no_slurm()))]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with Slurm(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


def _train(**given):
    return ("python", TRAIN, json.dumps({"strategy": "pardist_ddp"} | given))


def _right(**given):
    """Return one process's weights on the same global batches, up to the order of sums."""
    return pytest.approx(alone(**given).weights, rel=1e-5)


def test_srun_over_two_nodes(slurm, tmp_path):
    # --ntasks alone, which Lightning's own class refuses.
    finished = slurm.run("srun", "-N2", "-n2", *_train(num_nodes=2, devices=1), cwd=tmp_path)
    assert finished.code == 0, finished.output
    found = ended(finished.output)
    assert {rank: (one.world_size, one.node, one.environment) for rank, one in found.items()} == {
        0: (2, 0, "SLURMEnvironment"),
        1: (2, 1, "SLURMEnvironment"),
    }
    assert found[0].weights == _right()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_srun_with_every_strategy(slurm, tmp_path, ranks):
    command = _train(num_nodes=2, devices=ranks // 2, strategy=STRATEGIES)
    finished = slurm.run("srun", "-N2", f"--ntasks-per-node={ranks // 2}", *command, cwd=tmp_path, timeout_s=200)
    assert finished.code == 0, finished.output
    for strategy in STRATEGIES:
        found = ended(finished.output, strategy)
        assert {rank: one.node for rank, one in found.items()} == {rank: rank // (ranks // 2) for rank in range(ranks)}
        assert (found[0].steps, found[0].weights) == (8, _right()), strategy


def test_batch_script_without_srun_and_mismatch_are_refused(slurm, tmp_path):
    script = f"""#!/bin/bash
#SBATCH -N1 --ntasks=2 --output=out.txt
{" ".join(_train(devices=2)[:2])} '{_train(devices=2)[2]}'
srun {" ".join(_train(devices=2)[:2])} '{_train(devices=4)[2]}'
"""
    job = slurm.submit(script, cwd=tmp_path)
    assert slurm.wait(job) == "FAILED"
    output = (tmp_path / "out.txt").read_text()
    assert "runs python without srun" in output
    assert "Trainer(devices=4), but srun started 2 task(s) on this node" in output


@pytest.mark.slow
def test_sbatch(slurm, tmp_path):
    command = _train(num_nodes=2, devices=1, strategy="pardist_zero2")
    script = f"#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=1 --output=out.txt\nsrun python {TRAIN} '{command[2]}'\n"
    job = slurm.submit(script, cwd=tmp_path)
    assert slurm.wait(job) == "COMPLETED", (tmp_path / "out.txt").read_text()
    assert first((tmp_path / "out.txt").read_text(), "pardist_zero2").weights == _right()


@pytest.mark.slow
def test_two_steps_at_once(slurm, tmp_path):
    command = f"srun --overlap -N2 -n2 python {TRAIN} '{_train(num_nodes=2, devices=1, step_s=1.0)[2]}'"
    script = f"#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=2\n{command} >a.txt 2>&1 &\n{command} >b.txt 2>&1 &\nwait\n"
    job = slurm.submit(script, cwd=tmp_path)
    assert slurm.wait(job, timeout_s=180) == "COMPLETED"
    for name in ("a.txt", "b.txt"):
        assert first((tmp_path / name).read_text()).weights == _right()


@pytest.mark.slow
def test_nodes_in_another_order_and_uneven_tasks(slurm, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("node2\nnode1\n")
    command = _train(num_nodes=2, devices=1, max_steps=2)
    finished = slurm.run("srun", "-N2", "-n2", "-m", "arbitrary", *command, cwd=tmp_path, SLURM_HOSTFILE=str(hosts))
    assert set(ended(finished.output)) == {0, 1}, finished.output
    finished = slurm.run("srun", "-N2", "-n3", *_train(num_nodes=2, devices=2, max_steps=2), cwd=tmp_path)
    assert set(ended(finished.output)) == {0, 1, 2}, finished.output


@pytest.mark.slow
@pytest.mark.parametrize("array", [False, True])
def test_signal_requeue_resume(slurm, tmp_path, array):
    given = {"max_epochs": 3, "samples": 144}
    command = _train(num_nodes=2, devices=1, step_s=0.4, **given)
    script = f"""#!/bin/bash
#SBATCH -N2 --ntasks-per-node=1 --requeue --open-mode=append --output=out.txt {"--array=3" if array else ""}
srun python {TRAIN} '{command[2]}'
"""
    job = slurm.submit(script, cwd=tmp_path) + ("_3" if array else "")
    output = tmp_path / "out.txt"
    _wait_for(output, "data_replicate")
    time.sleep(4)
    slurm.run("scancel", "--signal=USR1", job)
    assert slurm.wait(job, timeout_s=200) == "COMPLETED", output.read_text()
    text = output.read_text()
    stopped_at = int(re.search(r"Stopped by a signal after step (\d+)", text)[1])
    assert 0 < stopped_at < 36, text
    assert "This job was started before: continuing from" in text
    wanted = first(run_script(*_train(devices=2, **given)[1:]).output)
    assert first(text).steps == 36
    assert first(text).weights == wanted.weights, "the requeued job came to other weights"
    assert not list(tmp_path.rglob("stopped.ckpt"))


@pytest.mark.slow
def test_doctor(slurm, tmp_path):
    command = ("srun", "-N2", "-n2", "python", "-m", "lightning_pardist", "doctor", "--num-nodes", "2", "--devices")
    finished = slurm.run(*command, "1", cwd=tmp_path)
    assert finished.code == 0, finished.output
    assert "SLURMEnvironment: a task of srun" in finished.output
    assert re.search(r"^1 +1 +0 +node2 ", finished.output, re.MULTILINE), finished.output
    assert "data_replicate: all-reduce" in finished.output
    finished = slurm.run(*command, "2", cwd=tmp_path)
    assert finished.code != 0, finished.output
    assert "Trainer(devices=2), but srun started 1 task(s) on this node" in finished.output


@pytest.mark.slow
def test_interactive_step_is_one_process(slurm, tmp_path):
    finished = slurm.run(
        "srun", "-n1", "--job-name=bash", "bash", "-c", f"python {TRAIN} '{_train(devices=2)[2]}'", cwd=tmp_path
    )
    assert set(ended(finished.output)) == {0, 1}, finished.output
    assert "SLURMShellEnvironment" in finished.output


def _wait_for(path: Path, text: str, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, path.read_text() if path.exists() else f"{path} is not there"
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["one_node", "many_nodes", "requeue", "torchrun"])
def test_recipe(slurm, tmp_path, recipe):
    nodes = 1 if recipe == "one_node" else 2
    given = json.dumps({"strategy": "pardist_ddp", "num_nodes": nodes, "devices": 2 // nodes}, separators=(",", ":"))
    train = f"{TRAIN} {given}"
    command = ("sbatch", "--parsable", "--output=out.txt", str(ROOT / "recipes" / "slurm" / f"{recipe}.sbatch"))
    train = train if recipe == "torchrun" else f"python {train}"
    submitted = slurm.run(*command, cwd=tmp_path, TRAIN=train, RANKS_PER_NODE="1")
    assert submitted.code == 0, submitted.output
    assert slurm.wait(submitted.output.strip(), timeout_s=240) == "COMPLETED", (tmp_path / "out.txt").read_text()
    output = (tmp_path / "out.txt").read_text()
    assert first(output).weights == _right()
    assert recipe != "many_nodes" or "training could start" in output
