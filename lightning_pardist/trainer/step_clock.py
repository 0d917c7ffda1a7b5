"""Breaks down the time of training steps on this rank's main thread by kind of activity."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.profilers import Profiler
from typing_extensions import override

COMPUTE, DATA, CHECKPOINT, HOST = "compute", "data", "checkpoint", "host"

_STRATEGY_STEPS = ("training_step", "backward", "optimizer_step")


#: (kind, start, end), with times in seconds since the epoch.
Span = tuple[str, float, float]


class StepClock:
    """Clock of seconds by kind, without overlap: a nested activity interrupts the outer one.

    Attributes:
        seconds: Seconds by kind since :meth:`take`, up to the latest start or end of an activity.
        spans: The same time as spans in chronological order.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.spans: list[Span] = []
        #: Offset from the monotonic clock to the time of day, which is comparable across hosts.
        self._epoch = time.time() - time.perf_counter()
        self._kinds = [HOST]
        self._since = time.perf_counter()

    @property
    def kind(self) -> str:
        """Kind of the current activity."""
        return self._kinds[-1]

    def push(self, kind: str) -> None:
        """Start an activity of ``kind``, which interrupts the current one."""
        self._credit()
        self._kinds.append(kind)

    def pop(self) -> None:
        """End the activity that started last."""
        self._credit()
        if len(self._kinds) > 1:
            self._kinds.pop()

    def take(self) -> tuple[dict[str, float], list[Span]]:
        """Return and reset seconds by kind and spans since the last call; the seconds sum to the elapsed time."""
        self._credit()
        taken = dict(self.seconds), self.spans
        self.seconds, self.spans = defaultdict(float), []
        return taken

    def _credit(self) -> None:
        now = time.perf_counter()
        kind = self._kinds[-1]
        self.seconds[kind] += now - self._since
        self.spans.append((kind, self._epoch + self._since, self._epoch + now))
        self._since = now


class ClockProfiler(Profiler):
    """Profiler that feeds the Trainer's actions to a clock and forwards them to the Trainer's own profiler.

    Args:
        clock: Clock that receives the actions.
        inner: The Trainer's own profiler.
        checkpoints: State keys of callbacks that save checkpoints.
    """

    def __init__(self, clock: StepClock, inner: Profiler, checkpoints: set[str]) -> None:
        super().__init__(inner.dirpath, inner.filename)
        self.clock = clock
        self.inner = inner
        self._checkpoints = checkpoints

    @override
    def start(self, action_name: str) -> None:
        self.inner.start(action_name)
        self.clock.push(self._kind_of(action_name))

    @override
    def stop(self, action_name: str) -> None:
        self.clock.pop()
        self.inner.stop(action_name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _kind_of(self, action: str) -> str:
        """Return the kind of a Trainer action.

        Unknown actions count as compute inside compute, unless they are a callback's, and as host elsewhere.
        """
        owner, _, name = action.rpartition(".")
        if action.endswith("_dataloader_next") or name in ("batch_to_device", "transfer_batch_to_device"):
            return DATA
        if action == "save_checkpoint" or owner.removeprefix("[Callback]") in self._checkpoints:
            return CHECKPOINT
        if name in _STRATEGY_STEPS:
            return COMPUTE
        if action.startswith("[Callback]") or self.clock.kind != COMPUTE:
            return HOST
        return COMPUTE


def checkpoint_keys(callbacks: list[Any]) -> set[str]:
    """Return the state keys of the callbacks that save checkpoints."""
    return {callback.state_key for callback in callbacks if isinstance(callback, Checkpoint)}
