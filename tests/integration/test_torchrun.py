"""Training under torchrun: restarts on one host, and several hosts with faults in between."""

import json
import re
import time

import pytest

from tests.helpers.cluster import STRATEGIES, TRAIN, alone, ended, first
from tests.helpers.hosts import Hosts, why_no_hosts
from tests.helpers.ranks import free_port
from tests.helpers.scripts import run_script

pytestmark = pytest.mark.alone

needs_hosts = pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
#: Variable that the documented recipes set, and `pardist doctor` checks.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def _torchrun(*options, **given):
    return ("-m", "torch.distributed.run", *options, TRAIN, json.dumps({"strategy": "pardist_ddp"} | given))


@pytest.mark.slow
def test_one_host():
    finished = run_script(*_torchrun("--standalone", "--nproc-per-node=2", devices=2, strategy=STRATEGIES))
    assert finished.code == 0, finished.output
    for strategy in STRATEGIES:
        found = ended(finished.output, strategy)
        assert {one.environment for one in found.values()} == {"TorchrunEnvironment"}, finished.output
        assert (found[0].world_size, found[0].steps) == (2, 8)
        assert found[0].weights == pytest.approx(alone().weights, rel=1e-5), strategy
    assert "listens at" not in finished.output, "one host needs no more than loopback"
    assert not finished.left


@pytest.mark.slow
@pytest.mark.parametrize("shared_store", ["0", "1"], ids=["own_store", "agents_store"])
def test_restart_goes_on_from_the_newest_checkpoint(tmp_path, shared_store):
    given = {"max_epochs": 2, "checkpoint_every": 3, "default_root_dir": str(tmp_path)}
    fault = {"fault": "SIGKILL", "fault_at": 11}
    finished = run_script(
        *_torchrun("--standalone", "--max-restarts=1", "--nproc-per-node=2", devices=2, **fault, **given),
        timeout_s=240,
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1" if shared_store == "0" else "0",
    )
    assert finished.code == 0, finished.output
    assert "This job was started before: continuing from" in finished.output
    end = first(finished.output)
    assert (end.steps, end.weights) == (16, pytest.approx(alone(max_epochs=2).weights, rel=1e-5))
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
        "trainer.fit(script['Module'](), script['Data']())\n"
        "sys.stdout.write(f'done {rank} {trainer.global_step}\\n')\n"
        "if rank == '0':\n"
        "    sys.exit(other.wait())\n"
    )
    finished = run_script("-c", code, "0", code)
    assert finished.code == 0, finished.output
    assert "done 0 8" in finished.output
    assert "done 1 8" in finished.output
    assert not finished.left


def _on_hosts(hosts, tmp_path, *options, only=None, nnodes=None, **given):
    """Start torchrun on every host (or on ``only`` one), with the rendezvous on the first."""
    given = {"devices": 1, "num_nodes": len(hosts.names), "default_root_dir": str(tmp_path)} | given
    meet = ("--rdzv-backend=c10d", "--rdzv-endpoint=h1:29400", "--rdzv-id=job")
    command = _torchrun(*meet, f"--nnodes={nnodes or len(hosts.names)}", "--nproc-per-node=1", *options, **given)
    names = hosts.names if only is None else [only]
    return {name: hosts.start(name, "python", *command, cwd=tmp_path, **OWN_STORE) for name in names}


def _output(running):
    return "\n".join(f"--- {name}\n{process.output}" for name, process in running.items())


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_hosts_equal_one_process(tmp_path, count):
    with Hosts(count) as hosts:
        running = _on_hosts(hosts, tmp_path, strategy=STRATEGIES)
        codes = [process.wait(200) for process in running.values()]
        output = _output(running)
    assert codes == [0] * count, output
    for strategy in STRATEGIES:
        found = ended(output, strategy)
        assert {rank: one.node for rank, one in found.items()} == {rank: rank for rank in range(count)}, output
        assert (found[0].steps, found[0].weights) == (8, pytest.approx(alone().weights, rel=1e-5)), strategy


_LOSS = r"Nothing was heard of rank|stopped answering|store has not answered|lost the job's store|is gone"


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "lost", "settings", "limit_s"),
    [
        ("kill", "h2", {"heartbeat_timeout_s": 8}, 18),
        ("cut", "h2", {"heartbeat_timeout_s": 8}, 18),
        ("cut", "h1", {"heartbeat_timeout_s": 8}, 18),
        ("cut", "h2", {}, 60),
    ],
    ids=["kill", "cut", "cut_first", "cut_with_defaults"],
)
def test_lost_host_ends_the_job_in_time(tmp_path, fault, lost, settings, limit_s):
    """The remaining host ends, and so does the other one if it is only disconnected."""
    with Hosts(2) as hosts:
        running = _on_hosts(hosts, tmp_path, step_s=0.2, max_epochs=500, settings=settings)
        _wait_for_training(running)
        started = time.monotonic()
        getattr(hosts, fault)(lost)
        seconds = {}
        for name in ("h1", "h2") if fault == "cut" else ("h1",):
            # Measures the worker's end; torchrun's agents may take longer to give up.
            _wait_until(lambda name=name: not hosts.ranks(name), running, timeout_s=limit_s + 30)
            seconds[name] = round(time.monotonic() - started, 1)
        output = _output(running)
        told = {name: re.search(_LOSS, running[name].output, re.IGNORECASE) for name in seconds}
    assert max(seconds.values()) < limit_s, (seconds, output)
    assert all(told.values()), output
    print(f"{fault} {lost}: the ranks ended {seconds} s later ({settings or 'heartbeat_timeout_s by default'})")


@needs_hosts
@pytest.mark.slow
def test_link_that_heals_in_time(tmp_path):
    with Hosts(2) as hosts:
        running = _on_hosts(hosts, tmp_path, step_s=0.2, max_epochs=6)
        _wait_for_training(running)
        hosts.cut("h2")
        time.sleep(4)
        hosts.plug_in("h2")
        codes = [process.wait(120) for process in running.values()]
        output = _output(running)
    assert codes == [0, 0], output
    assert first(output).weights == pytest.approx(alone(max_epochs=6).weights, rel=1e-5)


@needs_hosts
@pytest.mark.slow
def test_host_that_comes_back(tmp_path):
    given = {"max_epochs": 4, "step_s": 0.5, "checkpoint_every": 2}
    with Hosts(2) as hosts:
        running = _on_hosts(hosts, tmp_path, "--max-restarts=3", **given)
        _wait_for_training(running)
        time.sleep(5)
        hosts.kill("h2")
        time.sleep(2)
        back = _on_hosts(hosts, tmp_path, "--max-restarts=3", only="h2", **given)
        codes = [running["h1"].wait(200), back["h2"].wait(200)]
        output = _output(running) + _output(back)
    assert codes == [0, 0], output
    assert "This job was started before" in output
    end = first(output)
    assert (end.steps, end.weights) == (32, pytest.approx(alone(max_epochs=4).weights, rel=1e-5))


@needs_hosts
@pytest.mark.slow
def test_goes_on_with_the_hosts_that_are_left(tmp_path):
    """Elastic job: fewer ranks, the same global batch by accumulation, the same weights."""
    batch = {"batch_size": 6, "global_batch_size": 12}
    given = {"max_epochs": 3, "step_s": 0.4, "checkpoint_every": 2, "nnodes": "1:2"} | batch
    with Hosts(2) as hosts:
        waits = "--rdzv-conf=join_timeout=90,last_call_timeout=5"
        running = _on_hosts(hosts, tmp_path, "--max-restarts=3", waits, **given)
        _wait_for_training(running)
        hosts.kill("h2")
        code = running["h1"].wait(200)
        output = running["h1"].output
    assert code == 0, output
    assert "A step takes 6 samples x 2 ranks x 1 batches" in output
    assert "A step takes 6 samples x 1 ranks x 2 batches" in output
    end = first(output)
    assert (end.world_size, end.steps) == (1, 24)
    assert end.weights == pytest.approx(alone(max_epochs=3).weights, rel=1e-5)


def _wait_until(condition, running, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, _output(running)
        time.sleep(0.1)


def _wait_for_training(running):
    _wait_until(lambda: "data_replicate" in _output(running), running, timeout_s=120)
    time.sleep(2)
