"""Attributes the time of training steps, as this rank's main thread spends it, to what it was spent on."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.profilers import Profiler
from typing_extensions import override

COMPUTE, DATA, CHECKPOINT, HOST = "compute", "data", "checkpoint", "host"

_STRATEGY_STEPS = ("training_step", "backward", "optimizer_step")


#: What a step was spent on from when to when, in seconds since the epoch.
Span = tuple[str, float, float]


class StepClock:
    """Seconds by kind, without overlap: what begins inside something else interrupts it.

    Attributes:
        seconds: Of what has ended or been interrupted since :meth:`take`, by kind.
        spans: The same in its order.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.spans: list[Span] = []
        #: Ranks of one host share a clock; those of several have the time of day in common.
        self._epoch = time.time() - time.perf_counter()
        self._kinds = [HOST]
        self._since = time.perf_counter()

    @property
    def kind(self) -> str:
        """What the time is spent on now."""
        return self._kinds[-1]

    def push(self, kind: str) -> None:
        """Something begins."""
        self._credit()
        self._kinds.append(kind)

    def pop(self) -> None:
        """What began last has ended."""
        self._credit()
        if len(self._kinds) > 1:
            self._kinds.pop()

    def take(self) -> tuple[dict[str, float], list[Span]]:
        """Seconds by kind since the last call, whose sum is the time that went by, and the same in its order."""
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
    """Tells a clock what the Trainer does, beside the profiler that the Trainer has.

    Args:
        clock: Is told.
        inner: The Trainer's own profiler, which is told as before.
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
        """What an action of the Trainer is counted as; what is not known belongs to what it happens in."""
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
    """State keys of the callbacks that save checkpoints."""
    return {callback.state_key for callback in callbacks if isinstance(callback, Checkpoint)}
