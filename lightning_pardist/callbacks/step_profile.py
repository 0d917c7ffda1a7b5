"""Profile of training steps: where their time goes, on every rank."""

from __future__ import annotations

import contextlib
import json
import statistics
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_pardist.callbacks.step_page import coarse, step_page
from lightning_pardist.compat.collective_waits import timed_waits
from lightning_pardist.compat.process_groups import default_store
from lightning_pardist.engines.common.tables import table
from lightning_pardist.mesh import AXES
from lightning_pardist.strategies.strategy import PardistStrategy
from lightning_pardist.trainer.step_clock import (
    CHECKPOINT,
    COMPUTE,
    DATA,
    HOST,
    ClockProfiler,
    Span,
    StepClock,
    checkpoint_keys,
)

#: A rank is reported as the slowest if it works this much longer than the median of the others.
_SLOWER = 1.1
#: How long the first rank waits, at the end of training, for ranks that measure fewer steps or none.
_PATIENCE = timedelta(seconds=10)
#: Share of a step above which data loading is reported.
_SLOW_DATA = 0.1
#: Maximum number of ranks in a picture.
_PICTURED = 64
_OWN_WORK = (COMPUTE, DATA, CHECKPOINT, HOST)
#: Average seconds per step by kind; the spans of one step in order.
_Measured = tuple[dict[str, float], list[Span]]


class StepProfile(pl.Callback):
    """Attributes every second of some training steps to what this rank spent it on, and compares the ranks.

    - ``compute``: ``training_step``, backward and the optimizer's step, without waiting;
    - ``wait <axis>``: waiting in collectives or for messages of the ranks along that axis of the mesh, also because
      other ranks are late. Along ``pipeline_parallel`` it includes the idle time of the pipeline;
    - ``data``: loading the next batch and moving it to the device;
    - ``checkpoint``: callbacks that save checkpoints;
    - ``host``: the Trainer's loop, other callbacks and hooks.

    Kinds do not overlap, and together they are the wall time. The main thread of each process is measured: on devices
    that run asynchronously, such as CUDA, kernels count where the host waits for them.

    The first rank logs a table when all ranks have measured (``step_profile/<kind>_ms`` goes to the loggers), and the
    slowest rank, if it works 10 % longer than the median of the others. Ranks exchange their measurements through the
    job's store, which adds no collective to a step. After the measured steps, nothing of the callback remains in the
    loop.

    Args:
        steps: Number of batches to measure.
        skip: Number of batches before them, at least 1, which are slower than the rest.
        dirpath: Folder for one file per rank, ``step_profile-rank<n>.jsonl``, with a line of seconds by kind for each
            batch, and ``step_profile.html``, a page that shows one whole step of each rank (the first 64); nothing is
            written if None.

    Attributes:
        seconds: This rank's measurements: seconds by kind for each batch.
        shown: The text that the first rank has logged; empty before that, and on other ranks.

    Raises:
        ValueError: If ``steps`` or ``skip`` is not positive.
    """

    def __init__(self, steps: int = 20, *, skip: int = 2, dirpath: str | Path | None = None) -> None:
        if steps < 1 or skip < 1:
            raise ValueError(
                f"StepProfile(steps={steps}, skip={skip}) measures nothing. Use steps >= 1, and skip >= 1 since a step"
                " is measured from the end of the one before."
            )
        self.steps = steps
        self.skip = skip
        self.dirpath = dirpath
        self.seconds: list[dict[str, float]] = []
        self.shown = ""
        self._seen = 0
        self._spans: list[Span] = []
        self._clock: StepClock | None = None
        self._running = contextlib.ExitStack()
        self._axes: dict[int, str] = {}
        self._told = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seen, self.seconds, self.shown, self._told = 0, [], "", False
        self._axes.clear()
        if dist.is_initialized():
            # Left from an earlier run, if the store is the same.
            default_store().delete_key(_key(trainer.global_rank))
        if trainer.world_size > 1 and not isinstance(trainer.strategy, PardistStrategy):
            rank_zero_warn(
                f"StepProfile cannot see where {type(trainer.strategy).__name__} waits inside of torch, and counts"
                " these waits as compute. Use a strategy of this package to measure waits separately."
            )

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._seen += 1
        if self._clock is not None:
            seconds, self._spans = self._clock.take()
            self.seconds.append(seconds)
            if len(self.seconds) == self.steps:
                self._finish(trainer)
        elif self._seen == self.skip:
            self._begin(trainer)
        if self.seconds and self._clock is None and not self._told:
            self._log_report(trainer, wait=False)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._clock is not None and self.seconds:
            self._finish(trainer)
        self._end()
        if not self.seconds:
            rank_zero_warn(f"StepProfile measured nothing: the run ended within {self.skip + 1} batches. Set skip=1.")
        elif not self._told:
            self._log_report(trainer, wait=True)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._end()

    def _begin(self, trainer: pl.Trainer) -> None:
        """Start measuring at the end of a batch, so that loading the next one counts."""
        clock = self._clock = StepClock()
        waits = timed_waits(lambda group: clock.push(self._wait(trainer, group)), clock.pop)
        self._running.enter_context(waits)
        # Attributes of the Trainer that Lightning sets from other objects, invisible to type checkers.
        running: Any = trainer
        inner = running.profiler
        running.profiler = ClockProfiler(clock, inner, checkpoint_keys(running.callbacks))
        self._running.callback(setattr, running, "profiler", inner)

    def _end(self) -> None:
        self._running.close()
        self._clock = None

    def _finish(self, trainer: pl.Trainer) -> None:
        self._end()
        if self.dirpath is not None:
            folder = Path(self.dirpath)
            folder.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps({"step": number} | seconds) for number, seconds in enumerate(self.seconds)]
            (folder / f"step_profile-rank{trainer.global_rank}.jsonl").write_text("\n".join(lines) + "\n")
        if dist.is_initialized():
            default_store().set(_key(trainer.global_rank), json.dumps(self._measured(trainer.global_rank)))

    def _measured(self, rank: int) -> _Measured:
        return mean_seconds(self.seconds), coarse(self._spans) if rank < _PICTURED else []

    def _log_report(self, trainer: pl.Trainer, *, wait: bool) -> None:
        """Log the table on the first rank, once every rank has put its measurements into the store."""
        if not trainer.is_global_zero:
            return
        measured = [self._measured(0)]
        if dist.is_initialized() and trainer.world_size > 1:
            store, keys = default_store(), [_key(rank) for rank in range(trainer.world_size)]
            if not wait and not store.check(keys):
                return
            try:
                store.wait(keys, _PATIENCE)
                measured = [json.loads(store.get(key)) for key in keys]
            except RuntimeError:
                rank_zero_info("StepProfile: a rank has not measured its steps, so only the first one is shown.")
        self._told = True
        ranks = [seconds for seconds, _ in measured]
        self.shown = report(ranks, len(self.seconds))
        rank_zero_info(self.shown)
        if self.dirpath is not None:
            page = step_page(self.shown, ranks[:_PICTURED], [spans for _, spans in measured[:_PICTURED]])
            (Path(self.dirpath) / "step_profile.html").write_text(page)
        means = {kind: statistics.fmean(rank.get(kind, 0.0) for rank in ranks) for kind in kinds_of(ranks)}
        for logger in trainer.loggers:
            scalars = {f"step_profile/{kind.replace(' ', '_')}_ms": 1e3 * value for kind, value in means.items()}
            logger.log_metrics(scalars, step=trainer.global_step)

    def _wait(self, trainer: pl.Trainer, group: dist.ProcessGroup | None) -> str:
        """Return the kind of a wait: the mesh axes along which the group's ranks differ."""
        if group is None:
            return "wait"
        if id(group) not in self._axes:
            self._axes[id(group)] = f"wait {_axes_of(trainer, group)}".strip()
        return self._axes[id(group)]


def _axes_of(trainer: pl.Trainer, group: dist.ProcessGroup) -> str:
    if not isinstance(trainer.strategy, PardistStrategy):
        return ""
    places = [trainer.strategy.context.dims.coordinates(rank) for rank in dist.get_process_group_ranks(group)]
    return "+".join(axis for axis in AXES if len({place.get(axis) for place in places}) > 1)


def _key(rank: int) -> str:
    return f"pardist/step_profile/{rank}"


def mean_seconds(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the average seconds of one step by kind, over ``steps``."""
    return {kind: sum(step.get(kind, 0.0) for step in steps) / len(steps) for kind in kinds_of(steps)}


def kinds_of(rows: list[dict[str, float]]) -> list[str]:
    """Return all kinds that occur: compute first, waits next, then the rest."""
    found = {kind for row in rows for kind in row}
    waits = sorted(kind for kind in found if kind.startswith("wait"))
    return [kind for kind in (COMPUTE, *waits, DATA, CHECKPOINT, HOST) if kind in found]


def report(ranks: list[dict[str, float]], steps: int) -> str:
    """Return a table of milliseconds per step by kind, with the slowest rank and its slowest kind.

    Args:
        ranks: Seconds of one step by kind, for each rank.
        steps: Number of measured steps.
    """
    rows = []
    for kind in [*kinds_of(ranks), "step"]:
        values = [1e3 * (sum(rank.values()) if kind == "step" else rank.get(kind, 0.0)) for rank in ranks]
        share = sum(values) / max(1e3 * sum(sum(rank.values()) for rank in ranks), 1e-9)
        slowest = max(range(len(values)), key=values.__getitem__)
        spread = [f"{min(values):.2f}", f"{statistics.median(values):.2f}", f"{max(values):.2f}", str(slowest)]
        rows.append([kind, *spread, f"{share:.1%}"])
    head = ["ms a step", "least", "median", "most", "on rank", "share"]
    lines = [f"Where {steps} training steps went, on {len(ranks)} ranks", table(head, rows)]
    if late := slowest_rank(ranks):
        rank, kind, seconds = late
        lines.append(
            f"Rank {rank} is the slowest: {1e3 * seconds:.2f} ms a step more than the median of the others in {kind}."
        )
    data = sum(rank.get(DATA, 0.0) for rank in ranks) / max(sum(sum(rank.values()) for rank in ranks), 1e-9)
    if data > _SLOW_DATA:
        lines.append(
            f"Loaders take {data:.0%} of a step: the next batch is not ready when it is asked for. More num_workers,"
            " persistent_workers=True, and pin_memory=True with a device, let them work ahead."
        )
    return "\n".join(lines)


def slowest_rank(ranks: list[dict[str, float]]) -> tuple[int, str, float] | None:
    """Return the rank that works 10 % longer than the median of the others, its slowest kind, and the extra seconds.

    Args:
        ranks: Seconds of one step by kind, for each rank. Waiting is not work.
    """
    if len(ranks) < 2:
        return None
    work = [sum(rank.get(kind, 0.0) for kind in _OWN_WORK) for rank in ranks]
    slowest = max(range(len(ranks)), key=work.__getitem__)
    others = [each for rank, each in enumerate(work) if rank != slowest]
    if work[slowest] < _SLOWER * statistics.median(others):
        return None
    of_others = {
        kind: statistics.median(rank.get(kind, 0.0) for number, rank in enumerate(ranks) if number != slowest)
        for kind in _OWN_WORK
    }
    more = {kind: ranks[slowest].get(kind, 0.0) - of_others[kind] for kind in _OWN_WORK}
    kind = max(more, key=lambda each: more[each])
    return slowest, kind, more[kind]
