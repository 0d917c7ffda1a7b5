"""Diagnosis of hangs: where each rank is waiting.

[Note: deadlock or long transfer] Ranks that wait in different collectives wait for ever, but a rank that receives
gigabytes over a slow link makes no progress in Python either. The latter uses its processor: gloo's threads copy what
arrives; and on a link so slow that this takes no time, the sending rank still writes. A rank therefore counts as
stalled only while its main thread stays in one place and the whole process computes and sends next to nothing. If all
ranks are stalled, the wait will never end, even if all wait in the same place: what they send there does not match. A
backend that waits by spinning (NCCL) never counts as stalled; there the process group's timeout ends the wait.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterable
from types import FrameType

from lightning_pardist.engines.common.collective_record import named

#: Share of one core below which a process counts as idle: its watchdog uses some, too.
_IDLE_SHARE = 0.1
#: Bytes per second below which a process counts as not sending: its watchdog sends some, too.
_IDLE_BYTES_S = 64 * 1024
_SHOWN_FRAMES = 6
#: A look that takes this many seconds more than it should is due to a suspended process.
SUSPENDED_S = 5.0
#: Packages, inside torch.distributed and the engines, that read and write files.
_DISK = ("torch/distributed/checkpoint", "lightning_pardist/engines/offload")
_LIBRARIES = ("/torch/", "/lightning/", "/lightning_pardist/")


def main_stack(thread: int | None) -> str:
    """Return the current Python stack of a thread, innermost call last."""
    frame = _frame(thread)
    return "".join(traceback.format_stack(frame)) if frame is not None else "(no Python frame)"


def waits_in_collective(stack: str) -> bool:
    """Return whether a stack ends in a collective operation, or in another wait for a rank."""
    return ".wait(" in _last_frame(stack) or is_in_engines(stack)


def is_in_engines(stack: str) -> bool:
    """Return whether a stack ends in torch.distributed or in this package's engines, which wait only for ranks."""
    last = _last_frame(stack)
    # A slow disk delays one rank, and is no reason to end a job.
    engines = any(name in last for name in ("torch/distributed", "lightning_pardist/engines"))
    return engines and not any(f"{name}/" in last for name in _DISK)


def _last_frame(stack: str) -> str:
    return stack.rstrip().rsplit("  File ", 1)[-1]


def advice(stacks: Iterable[str]) -> str:
    """What the engine in which ranks wait for each other needs of the user's code; empty where nothing is known."""
    if any("lightning_pardist/engines/fsdp" in stack for stack in stacks):
        return (
            " Under ZeRO-3 and FSDP all ranks have to call the same layers as often as each other in a step, or set"
            " allow_divergent_forward=True."
        )
    return ""


def places(stacks: dict[int, str]) -> str:
    """Return a text that lists the ranks by the place where they wait.

    Args:
        stacks: Stack by rank.
    """
    ranks_at: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        ranks_at.setdefault(stack, []).append(rank)
    shown = []
    for stack, ranks in ranks_at.items():
        shown.append(f"{named(ranks)} waits in:\n{_tail(stack)}")
    return "\n".join(shown)


class StallDetector:
    """Measures how long a thread has been stalled: same frame, idle process.

    Args:
        thread: The thread, by its identifier.
    """

    def __init__(self, thread: int | None) -> None:
        self._thread = thread
        self._place: list[tuple[str, int]] = []
        self._since = self._seen = time.monotonic()
        self._worked = time.process_time()
        self._sent = _bytes_written()

    def seconds(self) -> float:
        """Return for how many seconds the thread has been stalled. To be called every second or so."""
        now, worked, place = time.monotonic(), time.process_time(), _place(_frame(self._thread))
        elapsed, sent = max(now - self._seen, 1e-3), _bytes_written()
        busy = worked - self._worked > _IDLE_SHARE * elapsed or sent - self._sent > _IDLE_BYTES_S * elapsed
        if busy or place != self._place:
            self._since, self._place = now, place
        elif elapsed > SUSPENDED_S:
            self._since += elapsed
        self._seen, self._worked, self._sent = now, worked, sent
        return now - self._since


def _bytes_written() -> int:
    """Return the bytes that this process has written to sockets and files; 0 if the system does not report them."""
    try:
        with open("/proc/self/io") as counters:
            return next(int(line.split()[1]) for line in counters if line.startswith("wchar"))
    except (OSError, StopIteration):
        return 0


def _frame(thread: int | None) -> FrameType | None:
    return sys._current_frames().get(thread or -1)


def _place(frame: FrameType | None) -> list[tuple[str, int]]:
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return found


def _tail(stack: str) -> str:
    """Return the innermost frames of the user's own code, and the last two frames of the stack."""
    frames = ["  File " + frame.rstrip("\n") for frame in stack.split("  File ")[1:]]
    own = [frame for frame in frames[:-1] if not any(library in frame.splitlines()[0] for library in _LIBRARIES)]
    return "\n".join([*own[-_SHOWN_FRAMES:], *frames[-2:]])
