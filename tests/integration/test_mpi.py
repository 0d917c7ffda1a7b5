"""Training under a real mpirun."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.helpers.cluster import STRATEGIES, TRAIN, alone, ended
from tests.helpers.hosts import Hosts, why_no_hosts
from tests.helpers.scripts import ENVIRONMENT, run_script


def _mpirun():
    return next((name for name in ("mpirun.openmpi", "mpirun") if shutil.which(name)), None)


pytestmark = [pytest.mark.alone, pytest.mark.skipif(_mpirun() is None, reason="mpirun is not installed")]


def _run(num_ranks, **given):
    command = [_mpirun(), "-np", str(num_ranks), "--oversubscribe", "python", TRAIN, json.dumps(given)]
    if os.geteuid() == 0:
        command.insert(1, "--allow-run-as-root")
    # Started through Python, to detect leftover processes.
    starter = f"import subprocess, sys; sys.exit(subprocess.run({command!r}).returncode)"
    return run_script("-c", starter, PATH=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")


def _is_open_mpi():
    shown = subprocess.run([_mpirun(), "--version"], capture_output=True, text=True, check=False)
    # The reported name depends on the name of the executable.
    return "Open MPI" in shown.stdout or "OpenRTE" in shown.stdout


@pytest.mark.skipif(_mpirun() is not None and not _is_open_mpi(), reason="this mpirun is not Open MPI's")
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_mpirun(num_ranks):
    finished = _run(num_ranks, strategy=STRATEGIES, devices=num_ranks)
    assert finished.code == 0, finished.output
    for strategy in STRATEGIES:
        found = ended(finished.output, strategy)
        assert set(found) == set(range(num_ranks)), finished.output
        assert {one.environment for one in found.values()} == {"MPIEnvironment"}
        # Reference: the same batches on one process.
        assert (found[0].steps, found[0].weights) == (8, pytest.approx(alone().weights, rel=1e-5)), strategy
    assert "listens at" not in finished.output, "one host needs no more than loopback"
    assert not finished.left


@pytest.mark.skipif(_mpirun() is not None and not _is_open_mpi(), reason="this mpirun is not Open MPI's")
@pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
@pytest.mark.slow
@pytest.mark.parametrize("told", [False, True], ids=["address found", "address given"])
def test_several_hosts(told):
    with Hosts(2) as hosts:
        given = json.dumps({"strategy": STRATEGIES, "devices": 1, "num_nodes": 2})
        options = ["-np", "2", "--host", "h1:1,h2:1", "--mca", "plm_rsh_agent", str(hosts.remote_shell())]
        # Variables of this process reach other hosts only if they are named, as over ssh.
        options += [word for name in ("PATH", *ENVIRONMENT) for word in ("-x", name)]
        if told:
            options += ["-x", "MASTER_ADDR=h1"]
        running = hosts.start("h1", _mpirun(), "--allow-run-as-root", *options, sys.executable, TRAIN, given)
        code, output = running.wait(timeout_s=200), running.output
    assert code == 0, output
    for strategy in STRATEGIES:
        found = ended(output, strategy)
        assert {rank: one.node for rank, one in found.items()} == {0: 0, 1: 1}, output
        assert {one.environment for one in found.values()} == {"MPIEnvironment"}
        assert (found[0].steps, found[0].weights) == (8, pytest.approx(alone().weights, rel=1e-5)), strategy


def test_wrong_number_of_devices():
    finished = _run(2, strategy="pardist_ddp", devices=4)
    assert finished.code != 0
    assert "Trainer(devices=4, num_nodes=1), but Open MPI's mpirun started 2 ranks" in finished.output
