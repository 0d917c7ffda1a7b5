"""Simulated clock over the real action lists: idle time and live activations of a schedule, without running it."""

from __future__ import annotations

from collections.abc import Callable

from lightning_pardist.engines.pipeline import Action, ActionLists, Kind, TimedAction, Timeline
from lightning_pardist.engines.pipeline.schedule import COMPUTES, needs_of

#: A full backward computes the gradients of inputs and those of parameters.
_DURATIONS = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}


def simulate(lists: ActionLists, cost: Callable[[Action], float] | None = None) -> Timeline:
    """Simulate the ranks' lists, starting each action as soon as its dependencies are met; messages take no time.

    Args:
        lists: A checked schedule.
        cost: Duration of an action; by default 1 for a forward and for each half of a backward.
    """
    cost = cost or (lambda action: _DURATIONS[action.kind])
    ended: dict[Action, float] = {}
    clock = [0.0] * lists.num_ranks
    next_index = [0] * lists.num_ranks
    events: list[TimedAction] = []
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists.actions):
            while next_index[rank] < len(actions):
                action = actions[next_index[rank]]
                needs = needs_of(action, lists)
                if not all(need in ended for need in needs):
                    break
                ended[action] = max((ended[need] for need in needs), default=0.0)
                if action.kind in COMPUTES:
                    begin = max(clock[rank], ended[action])
                    clock[rank] = ended[action] = begin + cost(action)
                    events.append(TimedAction(rank, action, begin, clock[rank]))
                next_index[rank] += 1
                moved = True
    return Timeline(lists.num_ranks, tuple(events))


def peak_activations(timeline: Timeline, rank: int) -> int:
    """Return the peak number of forwards (micro-batches times chunks) on a rank whose backward has not ended."""
    own = sorted((event for event in timeline.events if event.rank == rank), key=lambda event: event.begin)
    kept = peak = 0
    for event in own:
        if event.action.kind is Kind.FORWARD:
            kept += 1
        elif event.action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            kept -= 1
        peak = max(peak, kept)
    return peak
