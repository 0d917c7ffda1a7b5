"""Search over candidates: traces, times and compares them, and skips those that cannot be the best."""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_pardist.compat.fake_tensors import enter_once
from lightning_pardist.engines.pipeline import CannotPipelineError
from lightning_pardist.mesh import AXES, GRADIENT_AXES, SHARD_AXES, ParallelDims
from lightning_pardist.planner.batches import resized, samples_of, tokens_of
from lightning_pardist.planner.candidates import NOT_PLANNED, Candidate, with_checkpointing
from lightning_pardist.planner.errors import PlanError
from lightning_pardist.planner.ledger import Event, Message, Operator
from lightning_pardist.planner.plan_result import Plan, Refused, Row, ranked
from lightning_pardist.planner.planned_rank import (
    STEP_WORK,
    Place,
    RankTrace,
    dims_of,
    stage_places,
    trace_rank,
    trace_ranks,
)
from lightning_pardist.planner.profiles import DeviceProfile
from lightning_pardist.planner.skipped_kernels import Forms
from lightning_pardist.planner.step_time import (
    StepTime,
    message_seconds,
    mixed,
    operator_seconds,
    sent_bytes,
    time_ranks,
    time_step,
    without_spans,
)
from lightning_pardist.planner.words import sentence, size_text

_log = logging.getLogger(__name__)
_NOT_BY_DEFAULT = (
    "not traced: it runs like one of the others, or is rarely the fastest. Name it in strategies to trace it."
)
#: Minimum number of strategies to trace for comparison with the best one, unless their states exceed the device.
_COMPARED = 4
#: Further time of the host for an operator on split tensors, whose layouts Python looks up, and for one in a stage of a
#: pipeline, relative to an operator of an ordinary step. Measured with eight small modules on CPU.
_SPLIT, _REPLAYED = 4.0, 1.0
_NOT_TRACED = "not traced, but may be the best for this device: make a new plan."


@dataclass(frozen=True)
class Job:
    """Devices, Trainer settings and global batch of a plan.

    Attributes:
        devices: Ranks per node.
        num_nodes: Number of nodes.
        settings: Further arguments of the Trainer.
        global_batch: Samples of all ranks in an optimizer step; None to use the given batch on each rank.
    """

    devices: int
    num_nodes: int
    settings: Mapping[str, Any]
    global_batch: int | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.devices * self.num_nodes

    @property
    def accumulated(self) -> int:
        """Batches per optimizer step."""
        return int(self.settings.get("accumulate_grad_batches", 1))


@dataclass(frozen=True)
class _Traced:
    """Traces of a candidate.

    Attributes:
        candidate: The candidate.
        ranks: Traces of one rank of each stage, or of the first rank.
        share: Samples per rank and step, as a fraction of the given batch's samples.
        meeting: Traces of a step in which islands synchronise; empty if all steps are equal.
        every: Steps between two synchronisations.
    """

    candidate: Candidate
    ranks: Sequence[RankTrace]
    share: float
    meeting: Sequence[RankTrace] = ()
    every: int = 1


@dataclass(frozen=True)
class _Bound:
    """A candidate with the data for bounds of its speed.

    Attributes:
        candidate: The candidate.
        dims: Its degrees of parallelism.
        share: See :class:`_Traced`.
    """

    candidate: Candidate
    dims: ParallelDims
    share: float


class Search:
    """Traces and compares candidates. Not collective.

    Args:
        module: The module before training.
        batch: A sample batch.
        profile: Profile of the device.
        job: Devices, Trainer settings and global batch of the plan.
        leave_out: Whether candidates that cannot be the best are not traced.
        time_limit_s: Seconds after which, once a candidate fits, no further one is traced.

    Raises:
        PlanError: If the module's own step fails.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        batch: Any,
        profile: DeviceProfile,
        job: Job,
        *,
        leave_out: bool,
        time_limit_s: float | None = None,
    ) -> None:
        enter_once()
        self._ends_at = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
        self._module, self._batch, self._profile, self._job = module, batch, profile, job
        self._leave_out = leave_out
        self._traced: list[_Traced] = []
        self._rows: list[Row] = []
        self._refused: list[Refused] = []
        self._left_out: list[_Bound] = []
        self._forms: Forms = {}
        #: Findings about the module that its traces share, by the settings that change it and its batch.
        self._found: dict[Any, dict[Any, Any]] = {}
        # Errors of the module itself are raised here; otherwise every strategy would report them as a refusal.
        self._alone = self._traced_alone()

    def add_all(self, candidates: Iterable[Candidate]) -> None:
        """Plan candidates in order of their bounds: replicas first, then the most promising, to skip others early.

        Candidates with offloaded states come last; they are for modules that fit in no other way.
        """
        some = list(candidates)
        if self._leave_out:
            some.sort(key=lambda each: (not each.offloads, self._speed_bound(each)), reverse=True)
        for candidate in some:
            self.add(candidate)

    def _speed_bound(self, candidate: Candidate) -> float:
        """Return a bound of a candidate's samples per second; infinite for ``pardist_ddp``, which is planned first."""
        if candidate.strategy == "pardist_ddp":
            return math.inf
        try:
            dims = dims_of(candidate.make(), self._first)
            return self._max_samples_per_s(_Bound(candidate, dims, self._share(dims)), self._profile)[0]
        except (ValueError, MisconfigurationException):
            return 0.0

    def add(self, candidate: Candidate) -> None:
        """Plan a candidate, and if it does not fit also with activation checkpointing."""
        if (why := NOT_PLANNED.get(candidate.strategy)) is not None:
            self._refused.append(Refused(candidate, f"cannot be planned: {why}."))
            return
        try:
            dims = dims_of(candidate.make(), self._first)
            bound = _Bound(candidate, dims, self._share(dims))
        except (ValueError, MisconfigurationException) as error:
            self._refused.append(Refused(candidate, f"refused: {sentence(error)}"))
            return
        if self._leave_out and (why := self._exclusion_reason(bound, self._rows, self._profile)) is not None:
            self._refused.append(Refused(candidate, why))
            self._left_out.append(bound)
            return
        if time.monotonic() > self._ends_at and any(row.fits for row in self._rows):
            self._refused.append(Refused(candidate, "not traced: the time limit of the search was reached."))
            return
        traced = self._tried(bound)
        if isinstance(traced, Refused):
            self._refused.append(traced)
            return
        try:
            row = self._row(traced, self._profile)
        except PlanError as error:
            self._refused.append(Refused(candidate, f"cannot be planned: {sentence(error)}."))
            return
        self._traced.append(traced)
        self._rows.append(row)
        if traced.ranks[0].microbatches > 1:
            # A default of one micro-batch means that the batch cannot be split.
            self._vary_microbatches(bound, row)
        may_fit = _may_fit_with_checkpointing(row, self._profile) or not self._leave_out
        if not row.fits and may_fit and "activation_checkpointing" not in candidate.settings:
            self.add(with_checkpointing(candidate))

    def _vary_microbatches(self, bound: _Bound, row: Row) -> None:
        """Try twice and half the default number of micro-batches of a pipeline, and continue while that is faster.

        More micro-batches reduce the bubble but issue more and smaller operators; only a trace shows which effect wins.
        """
        stages = bound.dims.pipeline_parallel
        if stages == 1 or "num_microbatches" in bound.candidate.settings or not bound.candidate.takes_microbatches:
            return
        usual, samples = bound.candidate.microbatches(stages, self._resized(bound.share)), round(row.samples)
        for factor in (2.0, 0.5):
            count, best = int(usual * factor), row
            while stages <= count <= samples and samples % count == 0:
                tried = bound.candidate.with_settings(num_microbatches=count)
                before = len(self._rows)
                self.add(tried)
                found = self._rows[before] if len(self._rows) > before else None
                if found is None or found.samples_per_s <= best.samples_per_s:
                    break
                count, best = int(count * factor), found

    def leave_out(self, names: Iterable[str]) -> None:
        """Report names that are not planned by default, with the reason."""
        for name in names:
            why = NOT_PLANNED.get(name)
            reason = _NOT_BY_DEFAULT if why is None else f"cannot be planned: {why}."
            self._refused.append(Refused(Candidate(name), reason))

    def plan(self, notes: Sequence[str] = ()) -> Plan:
        """Return the plan of all candidates, the best first, with reasons.

        Raises:
            PlanError: If every candidate is refused.
        """
        if not self._rows:
            reasons = "; ".join(f"{each.candidate}: {each.reason}" for each in self._refused)
            raise PlanError(f"No candidate can be planned. {reasons}")
        return self._plan_for(self._profile, tuple(notes))

    def _plan_for(self, profile: DeviceProfile, notes: Sequence[str]) -> Plan:
        rows, refused, untraced = self._rows, self._refused, list[Candidate]()
        if profile is not self._profile:
            rows = [self._row(each, profile) for each in self._traced]
            refused, untraced = self._rechecked(rows, profile)
        return Plan(
            ranked(rows, profile, all_traced=not untraced),
            refused,
            device=profile,
            devices=self._job.devices,
            num_nodes=self._job.num_nodes,
            notes=notes,
            untraced=untraced,
            again=lambda other: self._plan_for(other, notes),
            scaling=lambda: self._scaling(profile),
        )

    def _rechecked(self, rows: Sequence[Row], profile: DeviceProfile) -> tuple[list[Refused], list[Candidate]]:
        """Return candidates without a row for another profile, and those of them that may be the best there.

        The latter are candidates that a bound excluded here but would not exclude there, and rows that may fit only
        with activation checkpointing, which the search tries only for candidates that do not fit.
        """
        refused, untraced = [], []
        for each in self._refused:
            bound = next((bound for bound in self._left_out if bound.candidate is each.candidate), None)
            if bound is not None:
                why = self._exclusion_reason(bound, rows, profile)
                each = Refused(each.candidate, why or _NOT_TRACED)
                untraced += [each.candidate] if why is None else []
            refused.append(each)
        known = [row.candidate for row in rows] + [each.candidate for each in self._refused]
        for before, row in zip(self._rows, rows, strict=True):
            if "activation_checkpointing" in row.candidate.settings:
                continue
            lighter = with_checkpointing(row.candidate)
            if not row.fits and lighter not in known and (before.fits or _may_fit_with_checkpointing(row, profile)):
                refused.append(Refused(lighter, _NOT_TRACED))
                untraced.append(lighter)
        return refused, untraced

    def _scaling(self, profile: DeviceProfile) -> list[tuple[int, float]]:
        """Return samples per second of ``pardist_ddp`` by number of devices; buckets do not depend on that number."""
        plain = (each for each in self._traced if each.candidate.strategy == "pardist_ddp")
        traced = next((each for each in plain if set(each.candidate.settings) <= {"activation_checkpointing"}), None)
        if traced is None:
            return []
        found, devices = [], 1
        while devices <= max(1024, self._job.world_size):
            ranks = tuple(range(devices))
            events = [replace(event, ranks=ranks) if isinstance(event, Message) else event
                      for event in traced.ranks[0].events]  # fmt: skip
            step = time_step(events, profile, ranks_per_node=self._job.devices).step
            samples = samples_of(self._batch) * traced.share * self._job.accumulated
            found.append((devices, devices * samples / step))
            devices *= 2
        return found

    # --- traces -------------------------------------------------------------------------------------------------

    @property
    def _first(self) -> Place:
        return Place(0, self._job.devices, self._job.num_nodes, self._profile.backend)

    def _share(self, dims: ParallelDims) -> float:
        """Return the samples per rank and step as a fraction of the sample batch's.

        Raises:
            ValueError: If the global batch is not divisible by the number of batches.
        """
        wanted, parts = self._job.global_batch, dims.batch_size * self._job.accumulated
        if wanted is None:
            return 1.0
        if wanted % parts:
            raise ValueError(
                f"a global batch of {wanted} samples cannot be divided into {parts} equal batches ({dims.batch_size}"
                f" data-parallel ranks, {self._job.accumulated} batches per rank and step)."
            )
        return wanted / parts / samples_of(self._batch)

    def _trace(self, candidate: Candidate, places: Sequence[Place], share: float) -> list[RankTrace]:
        batch = self._resized(share)
        settings: dict[str, Any] = {"trainer_settings": self._job.settings, "forms": self._forms}
        changed = share, candidate.settings.get("activation_checkpointing")
        settings["found"] = self._found.setdefault(changed, {})
        if len(places) == 1:
            return [trace_rank(self._module, batch, candidate.make, places[0], **settings)]
        return trace_ranks(self._module, batch, candidate.make, places, **settings)

    def _resized(self, share: float) -> Any:
        return resized(self._batch, round(samples_of(self._batch) * share))

    def _tried(self, bound: _Bound) -> _Traced | Refused:
        """Trace a candidate, or return why it cannot be traced; errors of the module's code count as a reason."""
        candidate, dims, share = bound.candidate, bound.dims, bound.share
        places = stage_places(dims, self._first)
        try:
            if (islands := candidate.by_sync_interval()) is None:
                return _Traced(candidate, self._trace(candidate, places, share), share)
            every, *both = islands
            apart, together = (self._trace(each, places, share) for each in both)
            return _Traced(candidate, apart, share, together, every)
        except (ValueError, MisconfigurationException, CannotPipelineError) as error:
            return Refused(candidate, f"refused: {sentence(error)}")
        except Exception as error:
            if _is_own_defect(error):
                raise
            _log.debug("%s cannot be planned.", candidate, exc_info=error)
            reason = f"cannot be planned, although training may work: {type(error).__name__}: {sentence(error)}"
            return Refused(candidate, reason)

    def _traced_alone(self) -> RankTrace:
        """Trace the module in a single process, which no strategy refuses.

        Raises:
            PlanError: If the module's own step fails.
        """
        try:
            place = Place(0, 1, 1, self._profile.backend)
            return self._trace(Candidate("pardist_ddp"), [place], 1.0)[0]
        except Exception as error:
            if _is_own_defect(error):
                raise
            raise PlanError(
                "The module's training step failed on this batch in a simulation without values:"
                f" {type(error).__name__}: {sentence(error)}"
            ) from error

    def _exclusion_reason(self, bound: _Bound, rows: Sequence[Row], profile: DeviceProfile) -> str | None:
        """Return by bounds why a candidate cannot be the best; None if it can. Replicas hold the unsharded states.

        If a candidate whose ranks share a batch fits but is slower than others, larger groups are skipped: they send or
        wait more.
        """
        candidate, dims = bound.candidate, bound.dims
        states = self._alone.held.by_kind["parameters"] + self._alone.held.by_kind["optimizer"]
        states //= dims.size("tensor_parallel", "pipeline_parallel")
        if candidate.replicates and states + profile.reserved_bytes > profile.memory_bytes:
            return (
                f"not traced: parameters and optimizer state alone take {size_text(states)} of a rank's"
                f" {size_text(profile.memory_bytes)}. Name it in strategies to trace it."
            )
        best = max((row.samples_per_s for row in rows if row.fits), default=0.0)
        if not best:
            return None
        if candidate.offloads:
            return (
                "not traced: others fit, and offloaded states add copies and an optimizer step on the host. Name it"
                " in strategies to trace it."
            )
        for row in rows if dims.world_size > dims.batch_size else ():
            if row.fits and row.samples_per_s < best and candidate.is_wider_than(row.candidate):
                return (
                    f"not traced: {row.candidate} fits but is slower than others, and larger groups communicate or"
                    " wait more for the same computation. Name it in strategies to trace it."
                )
        most, why = self._max_samples_per_s(bound, profile)
        strategies = {row.candidate.strategy for row in rows}
        if most > best or (len(strategies) < _COMPARED and candidate.strategy not in strategies):
            return None
        return (
            f"not traced: {why}, which limits it to {most:.1f} samples/s; another strategy that fits reaches"
            f" {best:.1f}. Name it in strategies to trace it."
        )

    def _max_samples_per_s(self, bound: _Bound, profile: DeviceProfile) -> tuple[float, str]:
        """Return an upper bound of the samples per second, and what limits it."""
        (computes, why), sends = self._min_compute_time(bound, profile), self._min_communication_time(bound, profile)
        if sends > computes:
            what = "gradients" if bound.candidate.replicates else "gradients and parameters"
            why = f"sending its {what} takes at least {1000 * sends:.1f} ms a step"
        least, samples = max(computes, sends), samples_of(self._batch) * bound.share * bound.dims.batch_size
        return samples * self._job.accumulated / least if least else math.inf, why

    def _min_compute_time(self, bound: _Bound, profile: DeviceProfile) -> tuple[float, str]:
        """Return a lower bound of a step's compute time in seconds, and the reason.

        The ranks that share a batch divide at most its arithmetic. Tensor ranks issue as many operators as a single
        process, stages issue theirs for each micro-batch; the same holds for the optimizer step, unless parameters are
        flattened.
        """
        candidate, dims, share = bound.candidate, bound.dims, bound.share
        apart = dims.world_size // dims.batch_size
        if apart == 1:
            return 0.0, ""
        flat = candidate.settings.get("data_parallel") in ("zero1", "zero2")
        begins = self._alone.before_optimizer
        steps = [event for event in self._alone.events[begins:] if isinstance(event, Operator) and not flat]
        work = [event for event in self._alone.events[:begins] if isinstance(event, Operator)]
        stages = dims.pipeline_parallel
        # A stage issues its operators once per micro-batch.
        times = candidate.microbatches(stages, self._resized(share))
        computes = share * sum(operator_seconds(each, profile) for each in (*work, *steps) if each.flops) / apart
        computes /= 1 - candidate.least_idle_share(stages, times)
        slow = sum(not event.is_quick for event in work) * times
        quick = (len(work) * times - slow) + len(steps)
        operators = STEP_WORK * stages + _host_factor(dims) * slow
        issues = operators * profile.host_s_per_operator + quick * profile.host_s_per_update
        parts = f", in {times} micro-batches" if times > 1 else ""
        return max(computes, issues / stages), f"{apart} ranks share each batch{parts}"

    def _min_communication_time(self, bound: _Bound, profile: DeviceProfile) -> float:
        """Return a lower bound of a step's communication time for gradients, in seconds, in its slowest group.

        Replicas all-reduce gradients uncompressed. Sharded states are reduce-scattered and all-gathered at least once,
        in at least two bytes per element, taken as half of the gradients' size.
        """
        candidate, dims = bound.candidate, bound.dims
        size = self._gradients // dims.size("tensor_parallel", "pipeline_parallel")
        messages: list[tuple[str, tuple[str, ...], int]] = []
        if candidate.replicates:
            messages = [("allreduce_", GRADIENT_AXES, size)]
        elif candidate.shards:
            shards = dims.size(*SHARD_AXES)
            messages = [("reduce_scatter_and_gather", SHARD_AXES, size)]
            messages += [("allreduce_", ("data_replicate",), size // 2 // shards)] if dims.data_replicate > 1 else []
        sent = (Message(name, dims.first_ranks_along(*axes), size, ()) for name, axes, size in messages)
        return max((message_seconds(each, profile, ranks_per_node=self._job.devices) for each in sent), default=0.0)

    @cached_property
    def _gradients(self) -> int:
        """Peak bytes of gradients in a single process."""
        now = most = 0
        for event in self._alone.events:
            if isinstance(event, tuple) and event[0].kind == "gradients":
                now += event[1]
                most = max(most, now)
        return most

    # --- rows ---------------------------------------------------------------------------------------------------

    def _row(self, traced: _Traced, profile: DeviceProfile) -> Row:
        job, ranks = self._job, traced.ranks
        dims = ranks[0].dims
        times, sent = self._timed(ranks, profile)
        fullest = max((*ranks, *traced.meeting), key=lambda each: each.held.peak)
        if traced.meeting:
            meeting, sent_there = self._timed(traced.meeting, profile)
            times = {rank: mixed(time, meeting[rank], 1 / traced.every) for rank, time in times.items()}
            sent = {
                axis: sent.get(axis, 0.0) + (sent_there.get(axis, 0.0) - sent.get(axis, 0.0)) / traced.every
                for axis in (*sent, *sent_there)
            }
        longest = max(times.values(), key=lambda each: each.compute)
        samples = samples_of(self._batch) * traced.share
        steps_per_s = dims.batch_size * job.accumulated / longest.step if longest.step else 0.0
        peak = profile.flops_of(_main_dtype(self._alone.events)) / profile.matmul_efficiency
        flops = sum(event.flops for event in self._alone.events if isinstance(event, Operator)) / job.accumulated
        return Row(
            traced.candidate,
            dims,
            {**fullest.held.by_kind, "peak": fullest.held.peak},
            fullest.peak_in,
            fullest.rank,
            sent,
            without_spans(longest),
            sum(each.stages for each in times.values()) / (len(times) * longest.step) if longest.step else 0.0,
            samples,
            samples * steps_per_s,
            tokens_of(self._batch) * traced.share * steps_per_s,
            flops * traced.share * steps_per_s / (peak * dims.world_size),
            fullest.held.peak + profile.reserved_bytes <= profile.memory_bytes,
            looked_at=tuple(dict.fromkeys(place for each in ranks for place in each.looked_at)),
            timelines=times,
            on_host=fullest.on_host,
            in_files=fullest.in_files,
        )

    def _timed(
        self, ranks: Sequence[RankTrace], profile: DeviceProfile
    ) -> tuple[dict[int, StepTime], dict[str, float]]:
        """Return times by rank, and the bytes by axis of the rank that sends most."""
        events = {each.rank: each.events for each in ranks}
        factor = _host_factor(ranks[0].dims)
        times = time_ranks(events, profile, ranks_per_node=self._job.devices, host_factor=factor)
        sent = [_sent_by_axis(each.events, each.dims) for each in ranks]
        return times, max(sent, key=lambda by_axis: sum(by_axis.values()))


def _host_factor(dims: ParallelDims) -> float:
    """Return the host's time for an operator of forward and backward, relative to an ordinary step."""
    splits = dims.tensor_parallel > 1 or dims.context_parallel > 1
    return 1.0 + (_SPLIT if splits else 0.0) + (_REPLAYED if dims.pipeline_parallel > 1 else 0.0)


def _is_own_defect(error: BaseException) -> bool:
    """Return whether an error is a defect of the planner itself, and not of the code that it traces."""
    if not isinstance(error, (AssertionError, AttributeError, KeyError, NameError, TypeError)):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").startswith(f"{__package__}.")


def _may_fit_with_checkpointing(row: Row, profile: DeviceProfile) -> bool:
    """Return whether the memory other than activations fits the device."""
    return row.memory["peak"] - row.memory["activations"] + profile.reserved_bytes <= profile.memory_bytes


def _sent_by_axis(events: Sequence[Event], dims: ParallelDims) -> dict[str, float]:
    found: dict[str, float] = {}
    names: dict[tuple[int, ...], str] = {}
    for event in events:
        if isinstance(event, Message) and len(event.ranks) > 1:
            if event.ranks not in names:
                places = [dims.coordinates(each) for each in event.ranks]
                axes = [axis for axis in AXES if len({place[axis] for place in places}) > 1]
                names[event.ranks] = " x ".join(axes)
            name = names[event.ranks]
            found[name] = found.get(name, 0.0) + sent_bytes(event)
    return found


def _main_dtype(events: Sequence[Event]) -> str:
    """Return the dtype of most of the arithmetic."""
    by_dtype: dict[str, int] = {}
    for event in events:
        if isinstance(event, Operator) and event.flops:
            name = str(event.dtype).removeprefix("torch.")
            by_dtype[name] = by_dtype.get(name, 0) + event.flops
    most = max(by_dtype, key=lambda name: by_dtype[name]) if by_dtype else "float32"
    return "tf32" if most == "float32" and torch.get_float32_matmul_precision() != "highest" else most
