"""Environment of a measurement besides the code: hardware, versions, commit, and the load by other programs."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "lightning", "lightning_pardist", "numpy", "deepspeed")
#: Variables that change how often freed memory returns to the system, and thereby the cost of a step.
_ALLOCATOR = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
_HZ = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def describe() -> dict[str, Any]:
    """Return hardware, system, versions and commit."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": versions,
        "allocator": {key: os.environ[key] for key in sorted(os.environ) if key.startswith(_ALLOCATOR)},
        "commit": _commit(),
    }


def load_average() -> list[float]:
    """Return the load average over 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def busy_cpu_s() -> float | None:
    """Return the CPU seconds used by all cores together since boot, None if the system does not report it."""
    try:
        numbers = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return None
    idle, waiting = numbers[3], numbers[4]
    return (sum(numbers) - idle - waiting) / _HZ


def process_cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used, 0 if the system does not report it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _HZ


def page_faults() -> int:
    """Return the number of minor page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def wait_until_quiet(patience_s: float, *, busy_cores: float = 0.2, watch_s: float = 0.5) -> bool:
    """Wait, at most ``patience_s`` seconds, until all processes together use less than ``busy_cores`` cores."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        before = busy_cpu_s()
        if before is None:
            return False
        time.sleep(watch_s)
        if ((busy_cpu_s() or 0.0) - before) / watch_s < busy_cores:
            return True
    return False


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process so far, in bytes."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # In KiB on Linux, in bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def keep(folder: Path | None, name: str, lines: Sequence[str]) -> None:
    """Print a table; if a folder is given, also write it there with command, load, hardware and versions."""
    print("\n".join(lines), flush=True)
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    text = [f"# {name}", "", f"`{command}`, load afterwards {load_average()}", "", str(describe()), "", *lines, ""]
    (folder / f"{date.today()}-{name}.md").write_text("\n".join(text))


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str:
    root = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + (" with local changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
