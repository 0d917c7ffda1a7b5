"""``plan_stages``: cuts a recorded run into stages, and determines the values sent between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Literal

from lightning_pardist.engines.common.tables import fold, table
from lightning_pardist.engines.pipeline.balance import balance
from lightning_pardist.engines.pipeline.errors import CannotPipelineError
from lightning_pardist.engines.pipeline.records import Escape, Source, StepRecord, TensorLeaf, Value

ReadPolicy = Literal["refuse", "send"]
#: Weight of parameter bytes (memory, optimizer time) in a stage's cost; the remaining weight is that of FLOPs.
BYTES_WEIGHT = 0.1


@dataclass(frozen=True)
class StageCost:
    """Compute, memory and communication of one stage.

    Attributes:
        flops: FLOPs of one micro-batch's forward.
        num_parameters: Number of parameter elements held.
        num_bytes: Their size in bytes.
        sent_bytes: Bytes sent to the next stage per micro-batch of the recorded shape.
        share: The stage's fraction of the total cost, as used for balancing.
    """

    flops: int
    num_parameters: int
    num_bytes: int
    sent_bytes: int
    share: float


@dataclass(frozen=True)
class PipelinePlan:
    """Assignment of unit calls and parameters to stages. Plain data, the same on every rank.

    Attributes:
        trace: The recorded run.
        bounds: Stage ``s`` runs calls ``bounds[s]`` to ``bounds[s + 1] - 1``.
        unit_stages: Stages that run each unit, or hold it if it is never called.
        parameter_stages: Stages that hold each parameter, by its first name.
        reads: Policy for values that free code reads: refuse them, or send them to every stage that reaches the read.
        by_owner: Whether there are no stages: every rank runs the whole step, with its own units' calls only.
    """

    trace: StepRecord
    bounds: tuple[int, ...]
    unit_stages: dict[str, tuple[int, ...]]
    parameter_stages: dict[str, tuple[int, ...]]
    reads: ReadPolicy = "refuse"
    by_owner: bool = False

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.bounds) - 1

    def calls_of(self, stage_index: int) -> range:
        """Return the indices of the calls that a stage runs."""
        return range(self.bounds[stage_index], self.bounds[stage_index + 1])

    @cached_property
    def sent(self) -> tuple[tuple[Value, ...], ...]:
        """Values that each stage sends to the next one, including received values that it passes on."""
        return _values_sent(self.trace, self.bounds, self.reads)

    @cached_property
    def costs(self) -> tuple[StageCost, ...]:
        """Cost of each stage."""
        shares = _item_costs(self.trace)
        flops = _item_flops(self.trace)
        found = []
        for stage_index in range(self.num_stages):
            held = [n for n, stages in self.parameter_stages.items() if stage_index in stages]
            infos = [self.trace.parameters[name] for name in held]
            sent = self.sent[stage_index] if stage_index + 1 < self.num_stages else ()
            calls = self.calls_of(stage_index)
            found.append(
                StageCost(
                    flops=sum(flops[call] for call in calls),
                    num_parameters=sum(_numel(info.shape) for info in infos),
                    num_bytes=sum(info.num_bytes for info in infos),
                    sent_bytes=_num_bytes(self.trace, sent),
                    share=sum(shares[call] for call in calls),
                )
            )
        return tuple(found)

    def modules_of(self, stage_index: int) -> list[str]:
        """Return the names of the units that a stage runs, in order of their first call."""
        return list(dict.fromkeys(self.trace.calls[call].unit for call in self.calls_of(stage_index)))

    def describe(self) -> str:
        """Return the plan as a table: stage, modules, parameters, forward MFLOPs, bytes sent per micro-batch, cost."""
        rows = [
            (
                str(index),
                _shorten(self.modules_of(index)),
                f"{cost.num_parameters:,}",
                f"{cost.flops / 1e6:,.2f}",
                f"{cost.sent_bytes:,}" if index + 1 < self.num_stages else "-",
                f"{cost.share:.0%}",
            )
            for index, cost in enumerate(self.costs)
        ]
        return table(("stage", "modules", "parameters", "MFLOPs", "sent bytes", "cost"), rows, wrap=("modules",))

    def adapt(self, other: StepRecord) -> PipelinePlan:
        """Return a plan with the same placement for another step of the same module (validation besides training).

        Args:
            other: The recorded run of that step.

        Raises:
            CannotPipelineError: If that step calls a module that is no unit of this plan, calls units in an order that
                does not follow the stages, or reads a parameter in a stage that does not hold it.
        """
        bounds = _follow_placement(self, other)
        adapted = replace(self, trace=other, bounds=bounds)
        for stage_index in range(self.num_stages):
            for source in sorted(_needs_of_stage(other, bounds, stage_index, self.reads), key=str):
                if isinstance(source, str) and stage_index not in self.parameter_stages[source]:
                    raise CannotPipelineError(
                        f"This step reads parameter {source!r} in stage {stage_index}, but the plan made from the"
                        f" training step keeps it on stage {self.parameter_stages[source]}."
                    )
        return adapted


def plan_stages(
    trace: StepRecord,
    num_stages: int,
    *,
    split: Sequence[str] | None = None,
    reads: ReadPolicy = "refuse",
    also: Sequence[StepRecord] = (),
) -> PipelinePlan:
    """Cut a recorded run into stages of about equal cost, between calls of units. Not collective.

    Args:
        trace: The recorded run of the training step.
        num_stages: Number of stages over all ranks (ranks times chunks per rank).
        split: Names of the modules that begin stages 1, 2, ...; ``num_stages - 1`` of them. None balances by cost.
        reads: ``"refuse"`` raises for a step that reads values between units (``if x.mean() > 0``, ``.item()``) if a
            later stage would have to read a stub. ``"send"`` sends these values to every stage that reaches the read,
            which is correct if they do not affect which units are called. Values for checks inside torch and for
            data-dependent shapes are always sent.
        also: Recorded runs of the module's other steps (validation), whose parameters the stages hold as well.

    Raises:
        CannotPipelineError: If the module cannot be cut as requested, with the reason and suitable strategies.
        ValueError: If ``split`` does not name the beginning of ``num_stages - 1`` stages.
    """
    if num_stages < 1:
        raise ValueError(f"num_stages={num_stages} is not positive. Use 1 or more.")
    allowed = _allowed_cuts(trace, reads)
    bounds = _bounds_from_setting(trace, num_stages, split) if split is not None else None
    if bounds is None:
        cut_costs = [float(_num_bytes(trace, _values_across(trace, cut))) for cut in range(len(trace.calls))]
        bounds = balance(_item_costs(trace), num_stages, cut_costs=cut_costs, allowed=[not why for why in allowed])
    if bounds is None:
        raise CannotPipelineError(_cut_refusal(trace, num_stages, allowed))
    for cut in bounds[1:-1]:
        if allowed[cut]:
            raise CannotPipelineError(f"A stage cannot begin at {trace.calls[cut].unit!r}: {allowed[cut]}")
    placed = _place(trace, bounds, reads)
    for other in also:
        placed = _add_parameters_read_by(placed, other)
    return placed


def _add_parameters_read_by(placed: PipelinePlan, other: StepRecord) -> PipelinePlan:
    """Add the parameters that another step reads to the stages that read them."""
    bounds = _follow_placement(placed, other)
    holders = {name: set(stages) for name, stages in placed.parameter_stages.items()}
    for stage_index in range(placed.num_stages):
        for source in _needs_of_stage(other, bounds, stage_index, placed.reads):
            if isinstance(source, str):
                holders[source].add(stage_index)
    return replace(placed, parameter_stages={name: tuple(sorted(stages)) for name, stages in holders.items()})


def _place(trace: StepRecord, bounds: tuple[int, ...], reads: ReadPolicy) -> PipelinePlan:
    num_stages = len(bounds) - 1
    unit_stages: dict[str, set[int]] = {}
    holders: dict[str, set[int]] = {name: set() for name in trace.parameters}
    for stage_index in range(num_stages):
        for call in range(bounds[stage_index], bounds[stage_index + 1]):
            unit_stages.setdefault(trace.calls[call].unit, set()).add(stage_index)
        for source in _needs_of_stage(trace, bounds, stage_index, reads):
            if isinstance(source, str):
                holders[source].add(stage_index)
    last, models = 0, _models_of_copies(trace)
    for name in trace.unit_names:
        # A unit that this step never calls is placed with the unit that it is a copy of, or with its predecessor.
        stages = {max(unit_stages[models[name]])} if name in models else {last}
        last = max(unit_stages.setdefault(name, stages))
    for name, info in trace.parameters.items():
        if info.unit is not None and not holders[name]:
            # A parameter of a copy has the holders of the original, several if that is tied.
            model = f"{models.get(info.unit, '')}.{name.removeprefix(f'{info.unit}.')}"
            holders[name] |= holders.get(model) or unit_stages[info.unit]
        holders[name] = holders[name] or {0}
    return PipelinePlan(
        trace,
        bounds,
        {name: tuple(sorted(stages)) for name, stages in unit_stages.items()},
        {name: tuple(sorted(stages)) for name, stages in holders.items()},
        reads,
    )


def _models_of_copies(trace: StepRecord) -> dict[str, str]:
    """Match units that the step never calls with the called units that they copy, for instance averaged weights.

    A copy has parameters of the same names and shapes, and a name with the same ending unless there is one candidate.
    """
    tables: dict[str, set[tuple[str, tuple[int, ...]]]] = {}
    for name, info in trace.parameters.items():
        if info.unit is not None:
            tables.setdefault(info.unit, set()).add((name.removeprefix(f"{info.unit}."), info.shape))
    called = list(dict.fromkeys(call.unit for call in trace.calls))
    found = {}
    for name in trace.unit_names:
        alike = [unit for unit in called if name in tables and tables.get(unit) == tables[name]]
        ends = [_same_ends(name, unit) for unit in alike]
        if name not in called and alike and (max(ends) or len(alike) == 1):
            found[name] = alike[ends.index(max(ends))]
    return found


def _same_ends(one: str, other: str) -> int:
    """Return the number of equal trailing parts of two dotted names."""
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _needs_of_stage(trace: StepRecord, bounds: tuple[int, ...], stage_index: int, reads: ReadPolicy) -> set[Source]:
    """Return the sources that a stage needs: for its calls, for reads that it reaches, and for the result if last."""
    begin, end = bounds[stage_index], bounds[stage_index + 1]
    is_last = stage_index == len(bounds) - 2
    needs: set[Source] = set()
    if begin == end and not is_last:
        return needs
    for call in trace.calls[begin:end]:
        needs |= call.needs
    if is_last:
        needs |= trace.result_needs
    for read in trace.reads:
        if is_last or (read.position < end and (reads == "send" or not read.explicit)):
            needs |= read.needs
    return needs


def _values_sent(trace: StepRecord, bounds: tuple[int, ...], reads: ReadPolicy) -> tuple[tuple[Value, ...], ...]:
    num_stages = len(bounds) - 1
    later: set[Value] = set()
    sent: list[tuple[Value, ...]] = [()]
    for stage_index in range(num_stages - 1, 0, -1):
        needs = _needs_of_stage(trace, bounds, stage_index, reads)
        later |= {source for source in needs if isinstance(source, Value)}
        later = {value for value in later if value.call < bounds[stage_index]}
        sent.append(tuple(sorted(later)))
    return tuple(reversed(sent))


def _values_across(trace: StepRecord, cut: int) -> set[Value]:
    """Return the values made before a cut and needed after it."""
    needs = set(trace.result_needs).union(*(call.needs for call in trace.calls[cut:]))
    return {source for source in needs if isinstance(source, Value) and source.call < cut}


def _num_bytes(trace: StepRecord, values: Iterable[Value]) -> int:
    leaves = [trace.leaf(value) for value in values]
    return sum(leaf.num_bytes for leaf in leaves if isinstance(leaf, TensorLeaf))


def _item_flops(trace: StepRecord) -> list[int]:
    flops = [call.flops + call.free_flops for call in trace.calls]
    if flops:
        flops[-1] += trace.tail_flops
    return flops


def _item_costs(trace: StepRecord) -> list[float]:
    """Return the cost of each call as a fraction of the total; a parameter's bytes count at its first reader."""
    flops = _item_flops(trace)
    sizes = [0] * len(trace.calls)
    counted: set[str] = set()
    for index, call in enumerate(trace.calls):
        mine = {source for source in call.needs if isinstance(source, str)} - counted
        sizes[index] = sum(trace.parameters[name].num_bytes for name in mine)
        counted |= mine
    all_flops, all_bytes = sum(flops) or 1, sum(sizes) or 1
    return [
        (1 - BYTES_WEIGHT) * count / all_flops + BYTES_WEIGHT * size / all_bytes
        for count, size in zip(flops, sizes, strict=True)
    ]


def _allowed_cuts(trace: StepRecord, reads: ReadPolicy) -> list[str]:
    """Return, for each call, the reason why no stage can begin there; an empty string if one can."""
    reasons = [""] * len(trace.calls)
    end = len(trace.calls)

    def join(first: int, last: int, why: str) -> None:
        for cut in range(first + 1, min(last + 1, end)):
            reasons[cut] = reasons[cut] or why

    consumers = [(index, call.needs, repr(call.unit)) for index, call in enumerate(trace.calls)]
    # All later stages run the free code with the read again, up to the last one.
    consumers += [(end, read.needs, read.where) for read in trace.reads]
    consumers.append((end, trace.result_needs, "the step's result"))
    for position, needs, reader in consumers:
        for source in needs:
            if isinstance(source, Escape):
                maker = trace.calls[source.call].unit
                join(source.call, position, f"{maker!r} passes a value to {reader} in another way than by its outputs.")
    for read in trace.reads:
        made = [source.call for source in read.needs if isinstance(source, Value)]
        if made and reads == "refuse" and read.explicit and read.position < end:
            maker = trace.calls[max(made)].unit
            join(min(made), end, f"code between units reads the value of the output of {maker!r}, in {read.where}.")
    return reasons


def cut_units(
    trace: StepRecord, num_stages: int, split: Sequence[str] | None, allowed: Sequence[bool]
) -> tuple[int, ...]:
    """Return bounds of parts of about equal cost, ignoring values sent between parts. Not collective.

    Args:
        trace: A run that calls at least ``num_stages`` units.
        num_stages: Number of parts.
        split: Names of the modules that begin parts 1, 2, ...; None balances by cost.
        allowed: Whether a part can begin at each call.

    Raises:
        ValueError: If ``split`` does not name the beginning of ``num_stages - 1`` parts.
    """
    if split is not None:
        bounds = _bounds_from_setting(trace, num_stages, split)
        if not all(allowed[bound] for bound in bounds[:-1]):
            raise ValueError(f"split={list(split)} separates layers that share parameters. Split elsewhere.")
        return bounds
    found = balance(_item_costs(trace), num_stages, cut_costs=[0.0] * len(trace.calls), allowed=allowed)
    if found is None:
        raise ValueError(f"{len(trace.calls)} calls cannot be cut into {num_stages} parts.")
    return found


def _bounds_from_setting(trace: StepRecord, num_stages: int, split: Sequence[str]) -> tuple[int, ...]:
    if len(split) != num_stages - 1:
        raise ValueError(
            f"split={list(split)} names {len(split)} cuts, but {num_stages} stages need {num_stages - 1}."
            " Name the first module of every stage but the first."
        )
    bounds = [0]
    for name in split:
        first = [i for i, call in enumerate(trace.calls) if call.unit == name or call.unit.startswith(f"{name}.")]
        behind = [i for i in first if i > bounds[-1]]
        if not behind:
            units = ", ".join(call.unit for call in trace.calls)
            raise ValueError(
                f"split={list(split)}: {name!r} does not begin a stage after {trace.calls[bounds[-1]].unit!r}."
                f" Use names from the order of calls: {units}."
            )
        bounds.append(behind[0])
    return (*bounds, len(trace.calls))


def _cut_refusal(trace: StepRecord, num_stages: int, reasons: list[str]) -> str:
    if not trace.calls:
        return "The step calls no module that holds parameters, so there is nothing to cut."
    if len(trace.calls) < num_stages:
        units = ", ".join(f"{call.unit!r}" for call in trace.calls)
        giant = " It is one layer that cannot be cut." if len(trace.calls) == 1 else ""
        return (
            f"{num_stages} stages were asked for, but the step calls only {len(trace.calls)} unit(s): {units}.{giant}"
        )
    parts = 1 + sum(not reason for reason in reasons[1:])
    why = next(reason for reason in reasons if reason)
    return f"{num_stages} stages were asked for, but the step can be cut into {parts} only: {why}"


def _follow_placement(placed: PipelinePlan, other: StepRecord) -> tuple[int, ...]:
    """Return bounds for another run, such that every call is in a stage that has its unit."""
    bounds, stage_index = [0], 0
    for index, call in enumerate(other.calls):
        stages = placed.unit_stages.get(call.unit)
        if stages is None:
            raise CannotPipelineError(f"This step calls {call.unit!r}, which is no unit of the training step's plan.")
        fitting = [stage for stage in stages if stage >= stage_index]
        if not fitting:
            raise CannotPipelineError(
                f"This step calls {call.unit!r} of stage {stages[-1]} after {other.calls[index - 1].unit!r} of stage"
                f" {stage_index}: it runs through the stages more than once."
            )
        bounds += [index] * (fitting[0] - stage_index)
        stage_index = fitting[0]
    bounds += [len(other.calls)] * (placed.num_stages - len(bounds))
    return (*bounds, len(other.calls))


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _shorten(names: list[str]) -> str:
    """Abbreviate ``blocks.0, blocks.1, blocks.2`` as ``blocks.0-2``."""
    return ", ".join(name for name, _ in fold(names, str, lambda _: None))


__all__ = ["PipelinePlan", "ReadPolicy", "StageCost", "plan_stages"]
