"""Which rank holds and runs each unit where no fixed stages exist: every call of a unit is run by its owner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_pardist.engines.pipeline.errors import CannotPipelineError
from lightning_pardist.engines.pipeline.nested import LEAF
from lightning_pardist.engines.pipeline.records import Attribute, Output, StepRecord, UnitCall
from lightning_pardist.engines.pipeline.stage_plan import PipelinePlan, cut_units


def plan_owners(records: Sequence[StepRecord], num_ranks: int, *, split: Sequence[str] | None = None) -> PipelinePlan:
    """Distribute units over ranks, in the order in which they are first called, by the cost of all their calls.

    Units that share parameters go to one rank, so that every parameter has one holder. Not collective.

    Args:
        records: Recorded runs of the module's steps; the first one's units and costs count, and what free code reads in
            any of them.
        num_ranks: How many there are.
        split: Names of the modules that begin ranks 1, 2, ...; by cost if None.

    Returns:
        A plan whose recorded run calls every unit once, with ``by_owner`` set.

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
    """Units that share parameters together, in order of their first call; those never called beside their neighbour."""
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
    """All calls of a unit as one."""
    first = records[0]
    own = [call for call in first.calls if call.unit == unit]
    side: list[Attribute] = []
    for call in (call for record in records for call in record.calls if call.unit == unit):
        known = {(attribute.module, attribute.name) for attribute in side}
        side += [attribute for attribute in call.output.side if (attribute.module, attribute.name) not in known]
    names = frozenset(name for name, info in first.parameters.items() if info.unit == unit)
    flops = sum(call.flops for call in own)
    return UnitCall(unit, Output(LEAF, 0, (), tuple(side)), names, flops, sum(call.free_flops for call in own))
