"""Placement of units on ranks for steps without fixed stages: every call of a unit is run by the rank that owns it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_pardist.engines.pipeline.errors import CannotPipelineError
from lightning_pardist.engines.pipeline.nested import LEAF
from lightning_pardist.engines.pipeline.records import Attribute, Output, StepRecord, UnitCall
from lightning_pardist.engines.pipeline.stage_plan import PipelinePlan, cut_units


def plan_owners(records: Sequence[StepRecord], num_ranks: int, *, split: Sequence[str] | None = None) -> PipelinePlan:
    """Distribute units over ranks, in the order of their first call, balanced by the cost of all their calls.

    Units that share parameters are placed on one rank, so that every parameter has one holder. Not collective.

    Args:
        records: Recorded runs of the module's steps; units and costs are taken from the first one, parameters read by
            free code and units that write to their arguments from all of them.
        num_ranks: Number of ranks.
        split: Names of the modules that begin ranks 1, 2, ...; None balances by cost.

    Returns:
        A plan whose recorded run has one call per unit, with ``by_owner`` set.

    Raises:
        CannotPipelineError: If there are fewer units, or groups of tied ones, than ranks.
        ValueError: If ``split`` does not name the beginning of ``num_ranks - 1`` ranks.
    """
    first = records[0]
    groups = _groups(first)
    calls = [_call_of(unit, records) for group in groups for unit in group]
    starts = {0}
    for group in groups[:-1]:
        starts.add(max(starts) + len(group))
    read = frozenset[str]().union(*(record.free_parameters for record in records)) & set(first.parameters)
    writers = frozenset[str]().union(*(record.writers for record in records))
    compressed = replace(
        first,
        calls=tuple(calls),
        result_needs=frozenset(),
        reads=(),
        mutated=frozenset(),
        free_parameters=read,
        writers=writers,
    )
    if len(groups) < num_ranks:
        raise CannotPipelineError(
            f"{num_ranks} ranks were asked for, but the step calls only {len(groups)} layer(s), or groups of layers"
            f" that share parameters: {', '.join(repr(group[0]) for group in groups)}."
        )
    bounds = cut_units(compressed, num_ranks, split, [index in starts for index in range(len(calls))])
    rank_of = {call.unit: rank for rank in range(num_ranks) for call in calls[bounds[rank] : bounds[rank + 1]]}
    return PipelinePlan(
        compressed,
        bounds,
        {unit: (rank,) for unit, rank in rank_of.items()},
        {name: (0 if info.unit is None else rank_of[info.unit],) for name, info in compressed.parameters.items()},
        by_owner=True,
    )


def _groups(record: StepRecord) -> list[list[str]]:
    """Group units that share parameters, in order of their first call; an uncalled unit joins its neighbour's group."""
    called = list(dict.fromkeys(call.unit for call in record.calls))
    leader = {unit: unit for unit in record.unit_names}

    def find(unit: str) -> str:
        while leader[unit] != unit:
            unit = leader[unit]
        return unit

    before: str | None = None
    for unit in record.unit_names:
        if unit not in called and (before is not None or called):
            leader[find(unit)] = find(before if before is not None else called[0])
        before = unit
    for info in record.parameters.values():
        sharing = [unit for unit in record.unit_names if any(name.startswith(f"{unit}.") for name in info.names)]
        for unit in sharing[1:]:
            leader[find(unit)] = find(sharing[0])
    groups: dict[str, list[str]] = {}
    for unit in (*called, *(unit for unit in record.unit_names if unit not in called)):
        groups.setdefault(find(unit), []).append(unit)
    return list(groups.values())


def _call_of(unit: str, records: Sequence[StepRecord]) -> UnitCall:
    """Combine all calls of a unit into one."""
    first = records[0]
    own = [call for call in first.calls if call.unit == unit]
    side: list[Attribute] = []
    for call in (call for record in records for call in record.calls if call.unit == unit):
        known = {(attribute.module, attribute.name) for attribute in side}
        side += [attribute for attribute in call.output.side if (attribute.module, attribute.name) not in known]
    names = frozenset(name for name, info in first.parameters.items() if info.unit == unit)
    flops = sum(call.flops for call in own)
    return UnitCall(unit, Output(LEAF, 0, (), tuple(side)), names, flops, sum(call.free_flops for call in own))
