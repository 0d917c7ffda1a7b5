"""Diagnosis of hangs: where each rank waits.

[Note: deadlock or long transfer] Ranks that wait in different collectives wait for ever, but a rank that receives
gigabytes over a slow link stands still as well. The latter uses its processor: gloo's threads copy what arrives; and on
a link so slow that this takes no time, the rank that sends still writes. So a rank counts as standing only while its
main thread waits in one place and the whole process does and sends next to nothing. Where all ranks stand, nobody will
free them, also if they wait in the same place: they disagree on what is sent there. A backend that waits by spinning
(NCCL) never stands in this sense; there the process group's timeout ends the wait.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterable
from types import FrameType

#: Share of one core below which a process does next to nothing: its watchdog works, too.
_IDLE_SHARE = 0.1
#: Bytes a second below which a process sends next to nothing: its watchdog talks, too.
_IDLE_BYTES_S = 64 * 1024
_SHOWN_FRAMES = 6
#: Packages inside of those that read and write files.
_DISK = ("torch/distributed/checkpoint", "lightning_pardist/engines/offload")
_LIBRARIES = ("/torch/", "/lightning/", "/lightning_pardist/")


def main_stack(thread: int | None) -> str:
    """The Python stack of a thread at this moment, innermost call last."""
    frame = _frame(thread)
    return "".join(traceback.format_stack(frame)) if frame is not None else "(no Python frame)"


def waits_in_collective(stack: str) -> bool:
    """Whether a stack ends in a collective operation, or in another wait for a rank."""
    return ".wait(" in _last_frame(stack) or is_in_engines(stack)


def is_in_engines(stack: str) -> bool:
    """Whether a stack ends in torch.distributed or in this package's engines, where ranks wait for each other alone."""
    last = _last_frame(stack)
    # A slow disk holds up one rank, and is no reason to end a job.
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
    """Format which ranks wait where.

    Args:
        stacks: Stack by rank.
    """
    ranks_at: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        ranks_at.setdefault(stack, []).append(rank)
    shown = []
    for stack, ranks in ranks_at.items():
        numbers = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
        shown.append(f"Rank {numbers} waits in:\n{_tail(stack)}")
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
        """Look again. Called every second or so."""
        now, worked, place = time.monotonic(), time.process_time(), _place(_frame(self._thread))
        elapsed, sent = max(now - self._seen, 1e-3), _bytes_written()
        busy = worked - self._worked > _IDLE_SHARE * elapsed or sent - self._sent > _IDLE_BYTES_S * elapsed
        if busy or place != self._place:
            self._since, self._place = now, place
        self._seen, self._worked, self._sent = now, worked, sent
        return now - self._since


def _bytes_written() -> int:
    """Bytes that this process has given to sockets and files; 0 where the system does not tell."""
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
    """The innermost frames of the user's own code, and where it waits."""
    frames = ["  File " + frame.rstrip("\n") for frame in stack.split("  File ")[1:]]
    own = [frame for frame in frames[:-1] if not any(library in frame.splitlines()[0] for library in _LIBRARIES)]
    return "\n".join([*own[-_SHOWN_FRAMES:], *frames[-2:]])
