"""Random kills over all strategies: each is detected in time, and the restarted job reaches the correct weights.

``make soak`` runs this; PARDIST_SOAK_KILLS and PARDIST_SOAK_MINUTES bound it (50 kills, 60 minutes).
"""

import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress

import psutil
import pytest

from tests.helpers.cluster import TRAIN, alone, first
from tests.helpers.hosts import Hosts, why_no_hosts
from tests.helpers.scripts import ENVIRONMENT

pytestmark = pytest.mark.soak

#: Strategies that equal one process; the others send quantised gradients, or start ranks in another way.
STRATEGIES = [
    *("pardist_ddp", "pardist_zero1", "pardist_zero2", "pardist_zero3", "pardist_fsdp", "pardist_zero2_offload"),
    *("pardist_zero3_offload", "pardist_tp", "pardist_mp", "pardist_pp", "pardist_pp_gpipe", "pardist_pp_interleaved"),
    "pardist_pp_zb",
]
KILLS = int(os.environ.get("PARDIST_SOAK_KILLS", "50"))
MINUTES = float(os.environ.get("PARDIST_SOAK_MINUTES", "60"))
SEED = int(os.environ.get("PARDIST_SOAK_SEED", "7"))
#: The heartbeat's default guarantee. A killed rank closes its connections, which should be detected earlier.
NOTICED_WITHIN_S = 60.0
KILLS_A_JOB, EPOCHS = 5, 6
#: Ranks are killed within this time of a start: while they import, rendezvous, load a checkpoint or train.
MOMENT_S = 9.0


class Job:
    """Training on two ranks that can be restarted, and then resumes.

    Args:
        folder: The job's own folder.
        command: Arguments of the Python interpreter.
    """

    def __init__(self, folder, command):
        self.log = folder / "output.txt"
        self.command = command
        self.folder = folder

    def start(self):
        variables = ENVIRONMENT | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with self.log.open("a") as file:
            self.process = psutil.Popen(
                [sys.executable, *self.command],
                env=os.environ | variables,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
            )

    def has_ended(self):
        return self.process.poll() is not None

    def code(self):
        return self.process.wait(timeout=120)

    def close(self):
        with suppress(psutil.NoSuchProcess):
            for process in (*self.process.children(recursive=True), self.process):
                process.kill()
        self.process.wait()

    def output(self):
        return self.log.read_text()


class Torchrun(Job):
    """Job whose ranks torchrun restarts."""

    def __init__(self, folder, given):
        options = ("--standalone", "--max-restarts=20", "--nproc-per-node=2")
        super().__init__(folder, ["-m", "torch.distributed.run", *options, TRAIN, json.dumps({"devices": 2} | given)])

    def ranks(self):
        return _alive(self.process.children())

    def kill(self, rank):
        rank.kill()

    def start_again(self):
        """Do nothing: torchrun restarts the ranks."""


class Script(Job):
    """Script whose first rank starts the second, and which is restarted from outside."""

    def __init__(self, folder, given):
        settings = {"settings": {"resume": "always"}, "devices": 2}
        super().__init__(folder, [TRAIN, json.dumps(settings | given)])

    def ranks(self):
        children = self.process.children() if self.process.is_running() else []
        return _alive([self.process, *children]) if children else []

    def kill(self, rank):
        rank.kill()

    def start_again(self):
        self.process.wait(timeout=60)
        self.start()


class OnHosts(Job):
    """One rank per host; the second host is powered off and on, the first one holds torchrun's store."""

    def __init__(self, folder, given):
        meet = ("--rdzv-backend=c10d", "--rdzv-endpoint=h1:29400", "--rdzv-id=job", "--max-restarts=20", "--nnodes=2")
        given = {"devices": 1, "num_nodes": 2} | given
        super().__init__(folder, ["-m", "torch.distributed.run", *meet, "--nproc-per-node=1", TRAIN, json.dumps(given)])
        self.exit = ExitStack()
        self.hosts = self.exit.enter_context(Hosts(2))
        self.running = []

    def start(self, names=("h1", "h2")):
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.running += [
            self.hosts.start(name, "python", *self.command, cwd=self.folder, **variables) for name in names
        ]

    def ranks(self):
        found = [self.hosts.ranks(name) for name in ("h1", "h2")]
        return [*found[0], *found[1]] if all(found) else []

    def kill(self, rank):
        self.hosts.kill("h2")
        # A rank that has not met the other one yet cannot distinguish a lost rank from a late one.
        time.sleep(1)
        self.start(["h2"])

    def start_again(self):
        """Do nothing: the host has been restarted already."""

    def has_ended(self):
        return self.running[0].has_ended()

    def code(self):
        # The second host's torchrun may not have noticed yet.
        return self.running[0].wait(120)

    def close(self):
        self.exit.close()

    def output(self):
        return "\n".join(running.output for running in self.running)


@pytest.mark.timeout(MINUTES * 60 + 600)
def test_random_kills(tmp_path):
    chance = random.Random(SEED)
    end = time.monotonic() + MINUTES * 60
    kinds = [Torchrun, Script] + [OnHosts] * (why_no_hosts() is None)
    wanted = alone(max_epochs=EPOCHS).weights
    strategies, noticed, count, failures = [], [], Counter(), []
    for number in itertools.count():
        if len(noticed) >= KILLS or time.monotonic() > end - 60:
            break
        strategies = strategies or chance.sample(STRATEGIES, len(STRATEGIES))
        strategy, kind, every = strategies.pop(), chance.choice(kinds), chance.choice([1, 3])
        folder = tmp_path / str(number)
        folder.mkdir()
        given = {"strategy": strategy, "max_epochs": EPOCHS, "checkpoint_every": every, "step_s": 0.1}
        job = kind(folder, given | {"default_root_dir": str(folder)})
        seconds = []
        try:
            _kill_and_go_on(job, chance, min(KILLS_A_JOB, KILLS - len(noticed)), end - 60, seconds)
            result = first(job.output(), strategy)
            assert (result.steps, result.weights) == (8 * EPOCHS, pytest.approx(wanted, rel=1e-5)), job.output()
            assert max(seconds, default=0) < NOTICED_WITHIN_S, job.output()
            verdict = "right"
        except (AssertionError, subprocess.TimeoutExpired, psutil.TimeoutExpired) as failure:
            failures.append(f"--- {strategy}, {kind.__name__}\n{failure}\n{job.output()}")
            verdict = "WRONG"
        finally:
            job.close()
        noticed += seconds
        count[strategy] += len(seconds)
        shown = ", ".join(f"{one:.1f}" for one in seconds)
        print(f"{strategy}, {kind.__name__}, a checkpoint every {every}: ended after {shown} s; {verdict}", flush=True)
    median = sorted(noticed)[len(noticed) // 2]
    print(f"{len(noticed)} kills, ended within {max(noticed):.1f} s (median {median:.1f}); {dict(count)}")
    assert not failures, "\n".join(failures)


def _kill_and_go_on(job, chance, kills, end, seconds):
    """Let a job train to its end with some kills on the way; record how long ranks lived after each."""
    job.start()
    while len(seconds) < kills and time.monotonic() < end:
        ranks = _until(lambda: job.has_ended() or (len(found := job.ranks()) == 2 and found), job)
        if ranks is True or not _sleep(chance.uniform(0.0, MOMENT_S), job):
            break
        ranks = job.ranks()
        if "done " in job.output():
            break
        if len(ranks) < 2:
            continue
        victim = chance.choice(ranks)
        killed = time.monotonic()
        job.kill(victim)
        _until(lambda ranks=ranks: not _alive(ranks), job)
        seconds.append(time.monotonic() - killed)
        job.start_again()
    assert job.code() == 0


def _sleep(seconds, job):
    """Return whether the job keeps running for the given time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not job.has_ended():
        time.sleep(0.05)
    return not job.has_ended()


def _until(condition, job, timeout_s=NOTICED_WITHIN_S + 30):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, job.output()
        time.sleep(0.05)
    return found


def _alive(processes):
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
