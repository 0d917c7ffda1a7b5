"""Run a script as a user would, in separate processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
#: Variables for programs that tests start: they import this checkout, use one thread, and hide optional packages
#: whose import takes as long as all others together.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers" / "without_extras")]),
    "PARDIST_TEST_WITHOUT": "transformers,scipy,matplotlib",
}


@dataclass(frozen=True)
class Finished:
    """Result of a script; ``ended`` is the wall-clock time of its end."""

    code: int
    output: str
    seconds: float
    left: list[str]
    ended: float = 0.0


def run_script(*arguments: str, timeout_s: float = 120.0, **variables: str) -> Finished:
    """Run ``python ARGUMENTS``, and return its exit code, output and leftover processes."""
    mark = f"pardist-test-{os.getpid()}-{time.monotonic_ns()}"
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE")}
    environment |= ENVIRONMENT | {"PARDIST_TEST_MARK": mark} | variables
    started = time.monotonic()
    try:
        process = subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        output = late.output.decode(errors="replace") if isinstance(late.output, bytes) else late.output
        raise AssertionError(f"{arguments} has not ended within {timeout_s:g} s:\n{output}") from late
    seconds, ended = time.monotonic() - started, time.time()
    # Child processes may take a moment to exit after the main one.
    deadline = time.monotonic() + 10
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return Finished(process.returncode, process.stdout, seconds, left, ended)


def _marked(mark: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PARDIST_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
