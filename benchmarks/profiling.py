"""Profile of some steps of one candidate: operators by host and device time, and the device's idle time."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.settings import Settings

_STEPS = 5
_ROWS = 25
#: Calls in which the host waits for the device.
_WAITS = ("Synchronize", "cudaMalloc", "cudaFree", "aten::item", "aten::_local_scalar_dense", "cudaMemcpy")


class _ProfilingGate:
    """Gate that passes every step, profiles some after the warm-up, and ends the process.

    Args:
        settings: Settings of the run; ``warmup`` is the number of steps before the profiled ones.
        report: Called with the finished profile.
    """

    def __init__(self, settings: Settings, report: Callable[[Any], None]) -> None:
        activities = [ProfilerActivity.CPU]
        if settings.accelerator != "cpu":
            activities += [each for each in torch.profiler.supported_activities() if each != ProfilerActivity.CPU]
        self._profile = profile(activities=activities)
        self._wait = (lambda: None) if settings.accelerator == "cpu" else torch.accelerator.synchronize
        self._first, self._index, self._report = settings.warmup, 0, report

    def before_step(self, held: object) -> None:
        """See :class:`benchmarks.rank.Gate`."""
        if self._index == self._first:
            self._wait()
            self._profile.start()
        if self._index == self._first + _STEPS:
            self._wait()
            self._profile.stop()
            self._report(self._profile)
            # Exit at once, from inside the candidate's loop.
            sys.stdout.flush()
            os._exit(0)
        self._index += 1

    def took(self, loss: Tensor) -> None:
        """See :class:`benchmarks.rank.Gate`."""


def profile_all(settings: Settings, names: Iterable[str], folder: Path) -> int:
    """Profile candidates one after another, each on one rank in a process of its own; return the exit status.

    The printed text is also written to ``folder/profile-NAME.txt``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in names:
        process = multiprocessing.get_context("spawn").Process(target=_rank, args=(settings, name, folder))
        process.start()
        process.join(timeout=300)
        if process.is_alive():
            process.kill()
            process.join()
        failed |= process.exitcode != 0
    return int(failed)


def _rank(settings: Settings, name: str, folder: Path) -> None:
    import lightning_pardist  # noqa: F401  (before lightning)
    from benchmarks.candidates import find
    from benchmarks.harness import free_port

    candidate = find(name)
    if not candidate.single:
        os.environ |= {"WORLD_SIZE": "1", "NODE_RANK": "0", "GROUP_RANK": "0", "RANK": "0", "LOCAL_RANK": "0"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    on_device = settings.accelerator != "cpu"

    def report(made: Any) -> None:
        text = "\n".join([f"\n=== {name}, {_STEPS} steps ===", *_lines(made, on_device=on_device)])
        print(text, flush=True)
        (folder / f"profile-{name.replace('/', '_')}.txt").write_text(text + "\n")

    try:
        candidate.run(settings, _ProfilingGate(settings, report))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(1)


def _lines(made: Any, *, on_device: bool) -> list[str]:
    events, averages = made.events(), made.key_averages()
    host = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    span = (min(event.time_range.start for event in host), max(event.time_range.end for event in events))
    wall_us = span[1] - span[0]
    lines = [f"{wall_us / _STEPS / 1e3:.3f} ms a step under the profiler, which slows the host"]
    if on_device:
        # The device's timeline also contains annotations, which span gaps between kernels.
        work = [
            event.time_range
            for event in events
            if event.device_type != torch.autograd.DeviceType.CPU and not event.is_user_annotation
        ]
        busy_us = _covered([(each.start, each.end) for each in work])
        lines.append(
            f"device: busy {busy_us / _STEPS / 1e3:.3f} ms a step, idle {1 - busy_us / wall_us:.1%} of the time,"
            f" {len(work) / _STEPS:.0f} kernels and copies a step"
        )
        waits = {row.key: row for row in averages if any(part in row.key for part in _WAITS)}
        lines += [
            f"  {key}: {row.count / _STEPS:.1f} a step, {row.self_cpu_time_total / _STEPS / 1e3:.3f} ms"
            for key, row in sorted(waits.items())
        ]
        lines += ["", "by self time on the device", averages.table("self_device_time_total", _ROWS)]
    lines += ["", "by self time on the host", averages.table("self_cpu_time_total", _ROWS)]
    return lines


def _covered(ranges: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(ranges):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
