"""Training under torchrun: restarts on one host, and several hosts with faults between them."""

import json
import re
import time

import pytest

from tests.helpers.hosts import Hosts, why_no_hosts
from tests.helpers.ranks import free_port
from tests.helpers.scripts import ROOT, run_script

TRAIN = str(ROOT / "tests" / "scripts" / "cluster_train.py")

needs_hosts = pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))


def _weights(output):
    found = re.search(r"done rank 0 of \d+ on node 0 steps (\d+) \w+ (\S+)", output)
    assert found, output
    return int(found[1]), float(found[2])


def _torchrun(*options, **given):
    return ("-m", "torch.distributed.run", *options, TRAIN, json.dumps({"strategy": "pardist_ddp"} | given))


@pytest.fixture(scope="module")
def alone():
    """What one process comes to."""
    cache = {}

    def result(**given):
        key = json.dumps(given)
        if key not in cache:
            cache[key] = _weights(run_script(TRAIN, json.dumps(given)).output)
        return cache[key]

    return result


@pytest.mark.slow
@pytest.mark.parametrize("shared_store", ["0", "1"], ids=["own_store", "agents_store"])
def test_restart_goes_on_from_the_newest_checkpoint(tmp_path, alone, shared_store):
    given = {"max_epochs": 2, "checkpoint_every": 3, "default_root_dir": str(tmp_path)}
    finished = run_script(
        *_torchrun("--standalone", "--max-restarts=1", "--nproc-per-node=2", devices=2, kill_at=11, **given),
        timeout_s=240,
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1" if shared_store == "0" else "0",
    )
    assert finished.code == 0, finished.output
    assert "This job was started before: continuing from" in finished.output
    steps, weights = _weights(finished.output)
    assert (steps, weights) == (16, pytest.approx(alone(max_epochs=2)[1], rel=1e-5))
    assert not finished.left


@pytest.mark.slow
@pytest.mark.parametrize("url", ["tcp", "file"])
def test_ranks_started_by_hand(tmp_path, url):
    where = f"tcp://127.0.0.1:{free_port()}" if url == "tcp" else f"file://{tmp_path}/meet"
    code = (
        "import runpy, subprocess, sys\n"
        "rank = sys.argv[1]\n"
        "if rank == '0':\n"
        "    other = subprocess.Popen([sys.executable, '-c', sys.argv[2], '1', sys.argv[2]])\n"
        "import lightning_pardist as lp\n"
        "import lightning.pytorch as pl\n"
        f"environment = lp.ManualEnvironment({where!r}, rank=int(rank), world_size=2)\n"
        f"script = runpy.run_path({TRAIN!r})\n"
        "trainer = pl.Trainer(strategy=lp.DDPStrategy(cluster_environment=environment), accelerator='cpu', devices=1,\n"
        "    num_nodes=2, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,\n"
        "    use_distributed_sampler=False)\n"
        "trainer.fit(script['Module'](0, 0), script['Data'](96))\n"
        "print('done', rank, trainer.global_step)\n"
        "if rank == '0':\n"
        "    sys.exit(other.wait())\n"
    )
    finished = run_script("-c", code, "0", code)
    assert finished.code == 0, finished.output
    assert "done 0 8" in finished.output
    assert "done 1 8" in finished.output
    assert not finished.left


def _on_hosts(hosts, tmp_path, *options, only=None, ddp=None, **given):
    """torchrun on every host (or ``only`` on one), the rendezvous on the first."""
    given = {"devices": 1, "num_nodes": len(hosts.names), "default_root_dir": str(tmp_path)} | given
    if ddp is not None:
        given["ddp"] = ddp
    meet = ("--rdzv-backend=c10d", "--rdzv-endpoint=h1:29400", "--rdzv-id=job", f"--nnodes={len(hosts.names)}")
    command = _torchrun(*meet, "--nproc-per-node=1", *options, **given)
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    names = hosts.names if only is None else [only]
    return {name: hosts.start(name, "python", *command, cwd=tmp_path, **variables) for name in names}


def _output(running):
    return "\n".join(f"--- {name}\n{process.output}" for name, process in running.items())


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_hosts_equal_one_process(tmp_path, alone, count):
    with Hosts(count) as hosts:
        running = _on_hosts(hosts, tmp_path)
        codes = [process.wait(240) for process in running.values()]
        output = _output(running)
    assert codes == [0] * count, output
    steps, weights = _weights(output)
    assert (steps, weights) == (8, pytest.approx(alone()[1], rel=1e-5))


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "cut"])
def test_lost_host_ends_the_job_in_time(tmp_path, fault):
    with Hosts(2) as hosts:
        running = _on_hosts(hosts, tmp_path, step_s=0.2, max_epochs=500, ddp={"heartbeat_timeout_s": 8})
        _wait_for_training(running)
        started = time.monotonic()
        getattr(hosts, fault)("h2")
        # The worker's own end; torchrun's agents may take longer to give up.
        running["h1"].wait_for("failed", timeout_s=60)
        seconds = time.monotonic() - started
        output = _output(running)
    assert seconds < 8 + 12, output
    print(f"{fault}: reported on the other host after {seconds:.1f} s")


@needs_hosts
@pytest.mark.slow
def test_host_that_comes_back(tmp_path, alone):
    given = {"max_epochs": 4, "step_s": 0.5, "checkpoint_every": 2}
    with Hosts(2) as hosts:
        running = _on_hosts(hosts, tmp_path, "--max-restarts=3", **given)
        _wait_for_training(running)
        time.sleep(5)
        hosts.kill("h2")
        time.sleep(2)
        back = _on_hosts(hosts, tmp_path, "--max-restarts=3", only="h2", **given)
        codes = [running["h1"].wait(240), back["h2"].wait(240)]
        output = _output(running) + _output(back)
    assert codes == [0, 0], output
    assert "This job was started before" in output
    steps, weights = _weights(output)
    assert (steps, weights) == (32, pytest.approx(alone(max_epochs=4)[1], rel=1e-5))


def _wait_for_training(running, timeout_s=120.0):
    deadline = time.monotonic() + timeout_s
    while "data_replicate" not in _output(running):
        assert time.monotonic() < deadline, _output(running)
        time.sleep(0.1)
    time.sleep(2)
