"""Training under a real mpirun."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.helpers.scripts import ROOT, run_script

TRAIN = str(ROOT / "tests" / "scripts" / "cluster_train.py")


def _mpirun():
    return next((name for name in ("mpirun.openmpi", "mpirun") if shutil.which(name)), None)


pytestmark = pytest.mark.skipif(_mpirun() is None, reason="mpirun is not installed")


def _run(num_ranks, **given):
    command = [_mpirun(), "-np", str(num_ranks), "--oversubscribe", "python", TRAIN, json.dumps(given)]
    if os.geteuid() == 0:
        command.insert(1, "--allow-run-as-root")
    # Through Python, so that leftovers are looked for.
    starter = f"import subprocess, sys; sys.exit(subprocess.run({command!r}).returncode)"
    return run_script("-c", starter, PATH=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")


def _is_open_mpi():
    shown = subprocess.run([_mpirun(), "--version"], capture_output=True, text=True, check=False)
    return "Open MPI" in shown.stdout


@pytest.mark.skipif(_mpirun() is not None and not _is_open_mpi(), reason="this mpirun is not Open MPI's")
@pytest.mark.parametrize(
    ("num_ranks", "strategy"),
    [
        (2, "pardist_ddp"),
        pytest.param(4, "pardist_ddp", marks=pytest.mark.slow),
        pytest.param(4, "pardist_zero2", marks=pytest.mark.slow),
        pytest.param(4, "pardist_zero3", marks=pytest.mark.slow),
    ],
)
def test_mpirun(num_ranks, strategy):
    finished = _run(num_ranks, strategy=strategy, devices=num_ranks)
    assert finished.code == 0, finished.output
    found = re.findall(rf"done rank (\d) of {num_ranks} on node 0 steps 8 MPIEnvironment (\S+)", finished.output)
    assert sorted(rank for rank, _ in found) == [str(rank) for rank in range(num_ranks)], finished.output
    # The same batches on one process.
    alone = re.search(r"done rank 0 .* (\S+)\n", run_script(TRAIN, "{}").output)
    assert float(dict(found)["0"]) == pytest.approx(float(alone[1]), rel=1e-5)
    assert not finished.left


def test_wrong_number_of_devices():
    finished = _run(2, strategy="pardist_ddp", devices=4)
    assert finished.code != 0
    assert "Trainer(devices=4, num_nodes=1), but Open MPI's mpirun started 2 ranks" in finished.output
