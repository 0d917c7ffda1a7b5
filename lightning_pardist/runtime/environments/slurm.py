"""SLURM environment: ranks are the tasks of a job step, started by ``srun``."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from typing_extensions import override

from lightning_pardist.compat.lightning_functions import IS_INTERACTIVE
from lightning_pardist.runtime.environments.external import (
    ExternalEnvironment,
    candidate_ports,
    check_address,
    chosen_address,
    chosen_port,
    required,
)
from lightning_pardist.runtime.environments.nodelist import expand_counts, expand_nodes
from lightning_pardist.runtime.rendezvous import RendezvousEndpoint

#: Step ids from here on denote batch scripts and interactive shells (slurm.h), which are not ranks.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
_SHELL_NAMES = ("bash", "sh", "zsh", "interactive")


class SLURMEnvironment(ExternalEnvironment):
    """Environment of the tasks of one ``srun``: a job step; the job may run other steps at the same time.

    Args:
        auto_requeue: Whether a job that receives ``requeue_signal`` saves a checkpoint and is requeued, to resume from
            it.
        requeue_signal: The signal that ``#SBATCH --signal=`` sends before the time limit.
    """

    def __init__(self, auto_requeue: bool = True, requeue_signal: signal.Signals = signal.SIGUSR1) -> None:
        super().__init__()
        self.auto_requeue = auto_requeue
        self.requeue_signal = requeue_signal

    @staticmethod
    @override
    def detect() -> bool:
        """Return whether ``srun`` started this process as a rank, and not as a shell or notebook of an allocation."""
        if "SLURM_PROCID" not in os.environ or _step() is None:
            return False
        return _num_tasks() > 1 or not _is_shell()

    @override
    def describe(self) -> str:
        names = ("JOB_ID", "STEP_ID", "PROCID", "LOCALID", "NODEID", "STEP_NUM_TASKS", "STEP_NODELIST")
        found = [f"SLURM_{name}={os.environ[f'SLURM_{name}']}" for name in names if f"SLURM_{name}" in os.environ]
        return f"a task of srun ({', '.join(found)})"

    @override
    def world_size(self) -> int:
        return _num_tasks()

    @override
    def global_rank(self) -> int:
        return required("SLURM_PROCID", "srun")

    @override
    def local_rank(self) -> int:
        return required("SLURM_LOCALID", "srun")

    @override
    def node_rank(self) -> int:
        return required("SLURM_NODEID", "srun")

    def tasks_per_node(self) -> list[int]:
        """Return the number of ranks on each node of the step, in the order of :meth:`nodes`."""
        text = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE")
        return expand_counts(text) if text else [_num_tasks()]

    def nodes(self) -> list[str]:
        """Return the nodes of the step. Rank 0 is on the first, except perhaps with ``--distribution=arbitrary``."""
        names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
        text = next((os.environ[name] for name in names if os.environ.get(name)), "localhost")
        return expand_nodes(text)

    @override
    def rendezvous_endpoint(self) -> RendezvousEndpoint:
        job, step = _job(), _step() or 0
        nodes = self.nodes()
        port = chosen_port()
        ports = candidate_ports(job, step) if port is None else (port,)
        token = f"slurm {job}.{step}"
        if address := chosen_address():
            return RendezvousEndpoint(address, ports, token)
        if len(nodes) == 1:
            return RendezvousEndpoint("127.0.0.1", ports, token)
        own = os.environ.get("SLURMD_NODENAME")
        if self.global_rank() == 0 and own in nodes:
            return RendezvousEndpoint(own, ports, token)
        return RendezvousEndpoint(nodes[0], ports, token, others=tuple(nodes[1:]))

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Check the Trainer's numbers against those of the step.

        Raises:
            ValueError: If they differ, with what was set, what was found and the line to change.
        """
        tasks, nodes = self.tasks_per_node(), self.nodes()
        here = tasks[min(self.node_rank(), len(tasks) - 1)]
        if num_nodes != len(tasks):
            raise ValueError(
                f"Trainer(num_nodes={num_nodes}), but srun started ranks on {len(tasks)} node(s)"
                f" ({os.environ.get('SLURM_STEP_NODELIST', ','.join(nodes))}). Set num_nodes={len(tasks)}, or"
                f" `#SBATCH --nodes={num_nodes}`."
            )
        if num_devices not in (here, max(tasks)):
            raise ValueError(
                f"Trainer(devices={num_devices}), but srun started {here} task(s) on this node"
                f" ({_tasks_were_set()}).{_visible_devices()} Set devices={here}, or"
                f" `#SBATCH --ntasks-per-node={num_devices}`"
                + (" (a single task that is to start its own ranks: run it without srun)." if here == 1 else ".")
            )
        point = self.rendezvous_endpoint()
        source = "MASTER_ADDR" if chosen_address() else "SLURM's node list"
        check_address(point.address, source=source, is_first=self.global_rank() == 0)

    @property
    @override
    def restart_count(self) -> int:
        return int(os.environ.get("SLURM_RESTART_COUNT", "0"))

    @property
    @override
    def job_key(self) -> str | None:
        return f"slurm-{requeue_id()}"

    @staticmethod
    def requeue(run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> str:
        """Requeue this job. Called by one rank.

        Args:
            run: Function that runs the command, as :func:`subprocess.run` does.

        Returns:
            An empty string if SLURM accepted, else the reason why it did not.
        """
        command = ["scontrol", "requeue", requeue_id()]
        try:
            finished = run(command, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"`{' '.join(command)}` could not be run ({error})"
        if finished.returncode:
            return f"`{' '.join(command)}` failed: {(finished.stderr or finished.stdout).strip()}"
        return ""


class SLURMShellEnvironment(LightningEnvironment):
    """A process in an allocation that ``srun`` did not start as a rank: a shell, notebook or batch script.

    It may train alone, and start ranks on its own node. It is not the first rank of the job's tasks, though SLURM's
    variables in a batch script look like it.
    """

    @staticmethod
    @override
    def detect() -> bool:
        """Return whether this process belongs to an allocation and is not a rank of a step."""
        return "SLURM_JOB_ID" in os.environ and not SLURMEnvironment.detect()

    def describe(self) -> str:
        """Return a readable description of what was detected."""
        return f"one process inside SLURM job {os.environ['SLURM_JOB_ID']}, not started by srun as a rank"

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Check that the Trainer does not wait for ranks that are never started.

        Raises:
            ValueError: If it would, with the line to change.
        """
        if "NODE_RANK" in os.environ and num_nodes > 1:
            return
        job, tasks = os.environ["SLURM_JOB_ID"], int(os.environ.get("SLURM_NTASKS", "1"))
        if num_nodes > 1:
            raise ValueError(
                f"Trainer(num_nodes={num_nodes}), but this process of SLURM job {job} was not started by srun: the"
                " ranks of the other nodes would never come. Put `srun` in front of `python`."
            )
        if num_devices > 1 and tasks > 1 and "SLURM_PROCID" in os.environ and not _is_shell():
            raise ValueError(
                f"SLURM job {job} has --ntasks={tasks}, but its script runs python without srun: this process looks"
                f" like rank 0 of {tasks}, and the others would never come. Put `srun` in front of `python`, or set"
                f" `#SBATCH --ntasks=1` if this one process is to start its {num_devices} ranks itself."
            )


def requeue_id() -> str:
    """Return this job's id as ``scontrol requeue`` takes it: ``ARRAY_TASK`` for a task of an array."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "0")


def _job() -> int:
    text = os.environ.get("SLURM_JOB_ID", "0")
    return int(text) if text.isdigit() else 0


def _step() -> int | None:
    text = os.environ.get("SLURM_STEP_ID", "")
    return int(text) if text.isdigit() and int(text) < _FIRST_SPECIAL_STEP else None


def _num_tasks() -> int:
    """Return the number of tasks of the step. The job's own number, which a step inherits, may be larger."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS") or "1")


def _is_shell() -> bool:
    """Return whether the process is interactive: notebook, Python prompt, or shell of ``srun --pty`` or ``salloc``."""
    return IS_INTERACTIVE or "SLURM_PTY_PORT" in os.environ or os.environ.get("SLURM_JOB_NAME") in _SHELL_NAMES


def _tasks_were_set() -> str:
    names = {"--ntasks-per-node": "SLURM_NTASKS_PER_NODE", "--ntasks": "SLURM_NTASKS"}
    given = [f"{option}={os.environ[name]}" for option, name in names.items() if name in os.environ]
    counts = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE", "1")
    return ", ".join([*given, f"tasks per node {counts}"])


def _visible_devices() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or "SLURM_GPUS_ON_NODE" not in os.environ:
        return ""
    count = len([device for device in visible.split(",") if device])
    text = f" SLURM gave this node {os.environ['SLURM_GPUS_ON_NODE']} GPU(s), of which this task sees {count}."
    if count == 1 and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        text += " With --gpus-per-task every task sees its own alone: use --gpus-per-node."
    return text
