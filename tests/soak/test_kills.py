"""Random kills over all strategies: each is noticed in time, and each restart comes to the right weights.

``make soak`` runs this; PARDIST_SOAK_KILLS and PARDIST_SOAK_MINUTES bound it (50 kills, 60 minutes).
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from tests.helpers.scripts import ROOT, run_script

pytestmark = pytest.mark.soak

TRAIN = str(ROOT / "tests" / "scripts" / "cluster_train.py")
STRATEGIES = ["pardist_ddp", "pardist_zero1", "pardist_zero2", "pardist_zero3"]
KILLS = int(os.environ.get("PARDIST_SOAK_KILLS", "50"))
MINUTES = float(os.environ.get("PARDIST_SOAK_MINUTES", "60"))
#: A killed rank closes its connections, so that nobody has to wait for a timeout.
NOTICED_WITHIN_S = 60.0


@pytest.mark.timeout(MINUTES * 60 + 600)
def test_random_kills(tmp_path):
    chance = random.Random(7)
    end = time.monotonic() + MINUTES * 60
    wanted, noticed = {}, []
    for number in range(KILLS):
        if time.monotonic() > end:
            break
        strategy, ranks = chance.choice(STRATEGIES), chance.choice([2, 2, 3])
        given = {"max_epochs": 2, "checkpoint_every": chance.choice([1, 3]), "step_s": 0.3, "devices": ranks}
        if strategy not in wanted:
            wanted[strategy] = _weights(run_script(TRAIN, json.dumps({"max_epochs": 2})).output)
        folder = tmp_path / str(number)
        folder.mkdir()
        seconds, output = _train_and_kill(chance, folder, strategy=strategy, **given)
        assert _weights(output) == pytest.approx(wanted[strategy], rel=1e-5), output
        assert seconds < NOTICED_WITHIN_S, output
        noticed.append(seconds)
        print(f"{number}: {strategy} on {ranks} ranks, going on {seconds:.1f} s after the kill", flush=True)
    assert noticed
    print(f"{len(noticed)} kills, the longest {max(noticed):.1f} s until training went on")


def _train_and_kill(chance, folder, **given):
    """Start a job under torchrun, kill one rank at a random moment, and wait for the end of the job."""
    command = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=2"]
    command += [f"--nproc-per-node={given['devices']}", TRAIN, json.dumps({"default_root_dir": str(folder)} | given)]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    log = folder / "output.txt"
    with log.open("w") as file:
        job = subprocess.Popen(
            [sys.executable, *command], env=os.environ | variables, stdout=file, stderr=subprocess.STDOUT, cwd=folder
        )
    try:
        _wait_for(log, "Strategy: ", 1, job)
        time.sleep(chance.uniform(0.0, 4.0))
        worker = chance.choice(_workers(job.pid))
        worker.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        _wait_for(log, "Strategy: ", 2, job)
        seconds = time.monotonic() - killed
        job.wait(timeout=240)
    finally:
        with suppress(psutil.NoSuchProcess):
            for process in [*psutil.Process(job.pid).children(recursive=True), psutil.Process(job.pid)]:
                process.kill()
        job.wait()
    output = log.read_text()
    assert job.returncode == 0, output
    return seconds, output


def _workers(agent):
    children = psutil.Process(agent).children(recursive=True)
    found = [child for child in children if TRAIN in child.cmdline()]
    assert found, "no workers"
    return found


def _wait_for(log, text, times, job, timeout_s=180.0):
    deadline = time.monotonic() + timeout_s
    while log.read_text().count(text) < times:
        # A job that has ended before the kill has nothing to go on with.
        if job.poll() is not None:
            return
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def _weights(output):
    found = re.search(r"done rank 0 of \d+ on node 0 steps 16 \w+ (\S+)", output)
    assert found, output
    return float(found[1])
