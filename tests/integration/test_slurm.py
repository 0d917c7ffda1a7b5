"""Training under a real SLURM: two nodes on this machine."""

import json
import re
import time
from pathlib import Path

import pytest

from tests.helpers.scripts import ROOT, run_script
from tests.helpers.slurm import Slurm, why_no_slurm

pytestmark = pytest.mark.skipif(why_no_slurm() is not None, reason=str(why_no_slurm()))

TRAIN = str(ROOT / "tests" / "scripts" / "cluster_train.py")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with Slurm(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


def _train(**given):
    return ("python", TRAIN, json.dumps({"strategy": "pardist_ddp"} | given))


def _ended(output):
    """Final weights' checksum by the first rank, and the ranks that ended."""
    found = re.findall(r"done rank (\d+) of (\d+) on node (\d+) steps (\d+) (\w+) (\S+)", output)
    return {int(rank): rest for rank, *rest in found}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What two ranks without a cluster come to."""
    cache = {}

    def result(**given):
        key = json.dumps(given, sort_keys=True)
        if key not in cache:
            finished = run_script(TRAIN, json.dumps({"strategy": "pardist_ddp", "devices": 2} | given))
            cache[key] = _ended(finished.output)[0][-1]
        return cache[key]

    return result


def test_srun_over_two_nodes(slurm, tmp_path, uninterrupted):
    # --ntasks alone, which Lightning's own class refuses.
    finished = slurm.run("srun", "-N2", "-n2", *_train(num_nodes=2, devices=1), cwd=tmp_path)
    assert finished.code == 0, finished.output
    ended = _ended(finished.output)
    assert {rank: (world, node, kind) for rank, (world, node, _, kind, _) in ended.items()} == {
        0: ("2", "0", "SLURMEnvironment"),
        1: ("2", "1", "SLURMEnvironment"),
    }
    assert ended[0][-1] == uninterrupted()


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
@pytest.mark.parametrize("strategy", ["pardist_zero2", "pardist_zero3"])
def test_sbatch(slurm, tmp_path, uninterrupted, strategy):
    command = _train(num_nodes=2, devices=1, strategy=strategy)
    script = f"#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=1 --output=out.txt\nsrun python {TRAIN} '{command[2]}'\n"
    job = slurm.submit(script, cwd=tmp_path)
    assert slurm.wait(job) == "COMPLETED", (tmp_path / "out.txt").read_text()
    assert _ended((tmp_path / "out.txt").read_text())[0][-1] == uninterrupted(strategy=strategy)


@pytest.mark.slow
def test_two_steps_at_once(slurm, tmp_path, uninterrupted):
    command = f"srun --overlap -N2 -n2 python {TRAIN} '{_train(num_nodes=2, devices=1, step_s=1.0)[2]}'"
    script = f"#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=2\n{command} >a.txt 2>&1 &\n{command} >b.txt 2>&1 &\nwait\n"
    job = slurm.submit(script, cwd=tmp_path)
    assert slurm.wait(job, timeout_s=180) == "COMPLETED"
    for name in ("a.txt", "b.txt"):
        assert _ended((tmp_path / name).read_text())[0][-1] == uninterrupted(), (tmp_path / name).read_text()


@pytest.mark.slow
def test_nodes_in_another_order_and_uneven_tasks(slurm, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("node2\nnode1\n")
    command = _train(num_nodes=2, devices=1, max_steps=2)
    finished = slurm.run("srun", "-N2", "-n2", "-m", "arbitrary", *command, cwd=tmp_path, SLURM_HOSTFILE=str(hosts))
    assert set(_ended(finished.output)) == {0, 1}, finished.output
    finished = slurm.run("srun", "-N2", "-n3", *_train(num_nodes=2, devices=2, max_steps=2), cwd=tmp_path)
    assert set(_ended(finished.output)) == {0, 1, 2}, finished.output


@pytest.mark.slow
@pytest.mark.parametrize("array", [False, True])
def test_signal_requeue_resume(slurm, tmp_path, uninterrupted, array):
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
    ended = _ended(text)
    assert ended[0][2] == "36"
    assert ended[0][-1] == uninterrupted(**given), "the requeued job came to other weights"
    assert not list(tmp_path.rglob("stopped.ckpt"))


@pytest.mark.slow
def test_interactive_step_is_one_process(slurm, tmp_path):
    finished = slurm.run(
        "srun", "-n1", "--job-name=bash", "bash", "-c", f"python {TRAIN} '{_train(devices=2)[2]}'", cwd=tmp_path
    )
    assert set(_ended(finished.output)) == {0, 1}, finished.output
    assert "SLURMShellEnvironment" in finished.output


def _wait_for(path: Path, text: str, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, path.read_text() if path.exists() else f"{path} is not there"
        time.sleep(0.2)
