"""Real SLURM cluster of several nodes on this machine, for the duration of a test module."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.helpers.ranks import free_port
from tests.helpers.scripts import ENVIRONMENT, Finished

_PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "unshare")
#: File in the cluster's folder with the process id of the test.
_OWNER = "owner"
_CONFIG = """\
ClusterName=pardist
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=1
JobRequeue=1
KillWait=5
ReturnToService=2
NodeName=DEFAULT CPUs=4 Sockets=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=2000
{nodes}
PartitionName=main Nodes=ALL Default=YES OverSubscribe=FORCE:4 MaxTime=INFINITE State=UP
"""


def why_no_slurm() -> str | None:
    """Return why a cluster cannot be started here, None if it can."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"SLURM is not installed ({', '.join(missing)} missing)"
    if os.geteuid() != 0:
        return "starting a SLURM cluster needs root"
    probe = subprocess.run(["unshare", "--mount", "--uts", "true"], capture_output=True, check=False)
    return "no permission to make namespaces" if probe.returncode else None


class Slurm:
    """One slurmctld and one slurmd per node; nodes have their own host names, and share the machine's network."""

    def __init__(self, folder: Path, num_nodes: int = 2) -> None:
        self.folder = folder
        self.nodes = [f"node{index + 1}" for index in range(num_nodes)]

    def __enter__(self) -> Slurm:
        # Remove clusters of killed tests.
        _end(lambda folder: (folder / _OWNER).exists() and not psutil.pid_exists(int((folder / _OWNER).read_text())))
        for name in ("state", "spool"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / _OWNER).write_text(str(os.getpid()))
        host = os.uname().nodename.split(".")[0]
        lines = [f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={free_port()}" for node in self.nodes]
        config = _CONFIG.format(host=host, port=free_port(), folder=self.folder, nodes="\n".join(lines))
        (self.folder / "slurm.conf").write_text(config)
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        # Every node resolves the others by name; this machine's own hosts file is not changed.
        hosts = Path("/etc/hosts").read_text() + "".join(f"127.0.0.1 {node}\n" for node in self.nodes)
        (self.folder / "hosts").write_text(hosts)
        self._start("slurmctld")
        for node in self.nodes:
            inside = f"mount --bind {self.folder}/hosts /etc/hosts; hostname {node}; exec slurmd -N {node}"
            self._start("unshare", "--mount", "--uts", "sh", "-c", inside)
        deadline = time.monotonic() + 20
        while len(self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").output.split()) < len(self.nodes):
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-500:] for path in self.folder.glob("*.log"))
                self.__exit__()
                pytest.skip(f"SLURM did not start: {logs}")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self.run("scancel", "--quiet", "--user=root", "--signal=KILL", "--full")
        self.run("scancel", "--quiet", "--user=root")
        _end(lambda folder: folder == self.folder)

    def environment(self, **variables: str) -> dict[str, str]:
        """Return the environment of a client command of this cluster, and of the jobs that it starts."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "LOCAL_RANK"))}
        path = f"{Path(sys.executable).parent}:{clean['PATH']}"
        own = ENVIRONMENT | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        return clean | own | {"PATH": path} | variables

    def run(self, *command: str, timeout_s: float = 120.0, cwd: Path | None = None, **variables: str) -> Finished:
        """Run a SLURM command to completion."""
        started = time.monotonic()
        finished = subprocess.run(
            command,
            env=self.environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=timeout_s,
            cwd=cwd,
            check=False,
        )
        return Finished(finished.returncode, finished.stdout, time.monotonic() - started, [])

    def submit(self, script: str, *, cwd: Path, **variables: str) -> str:
        """Submit a batch script given as text, and return the job id."""
        path = cwd / "job.sbatch"
        path.write_text(script)
        finished = self.run("sbatch", "--parsable", str(path), cwd=cwd, **variables)
        assert finished.code == 0, finished.output
        return finished.output.strip()

    def state(self, job: str) -> str:
        """Return a job's state: PENDING, RUNNING, COMPLETED, FAILED, ..."""
        shown = self.run("scontrol", "show", "job", job, "--oneliner").output
        fields = dict(field.partition("=")[::2] for field in shown.split())
        return fields.get("JobState", "UNKNOWN")

    def wait(self, job: str, *states: str, timeout_s: float = 120.0) -> str:
        """Wait until a job is in one of ``states``, by default until it has ended."""
        wanted = states or ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        deadline = time.monotonic() + timeout_s
        while (state := self.state(job)) not in wanted:
            assert time.monotonic() < deadline, f"job {job} is still {state} after {timeout_s:.0f} s"
            time.sleep(0.3)
        return state

    def _start(self, *command: str) -> None:
        finished = self.run(*command)
        assert finished.code == 0, finished.output


def _end(chosen: Callable[[Path], bool]) -> None:
    """End the processes of the chosen clusters, first with SIGTERM, then with SIGKILL."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError, ValueError):
            folder = _folder_of(process)
            if folder is not None and chosen(folder):
                processes.append(process)
                process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=3)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _folder_of(process: psutil.Process) -> Path | None:
    """Return the cluster folder of a process: a daemon, a task, or a slurmstepd, which outlives the daemon."""
    if process.name().startswith("slurmstepd"):
        # slurmstepd overwrites its environment with its process title.
        return Path(process.cwd())
    config = process.environ().get("SLURM_CONF")
    return None if config is None or process.pid == os.getpid() else Path(config).parent
