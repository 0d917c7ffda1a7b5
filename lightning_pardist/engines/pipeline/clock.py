"""A simulated clock over the real action lists: idle time and kept activations of a schedule, without running it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_pardist.engines.pipeline.schedule import COMPUTES, Action, ActionLists, Kind, needs_of


@dataclass(frozen=True)
class Durations:
    """How long each action takes for a stage, in any unit.

    A whole backward takes ``backward_input + backward_weight``.

    Attributes:
        forward: One micro-batch's forward of one stage.
        backward_input: The gradients of the stage's inputs.
        backward_weight: The gradients of its parameters.
        message: From a send to the end of its receive; 0 for the formulas of the literature.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    message: float = 0.0

    def of(self, action: Action) -> float:
        """The duration of an action."""
        if action.kind is Kind.FORWARD:
            return self.forward
        if action.kind is Kind.BACKWARD:
            return self.backward_input + self.backward_weight
        if action.kind is Kind.BACKWARD_INPUT:
            return self.backward_input
        if action.kind is Kind.BACKWARD_WEIGHT:
            return self.backward_weight
        return 0.0


@dataclass(frozen=True)
class TimedAction:
    """An action with its time, simulated or measured.

    Attributes:
        rank: Who.
        action: What.
        begin: When, from the step's beginning; seconds if measured.
        end: Until when.
    """

    rank: int
    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The timed actions of one step.

    Attributes:
        num_ranks: Rows.
        events: Computations, in no particular order.
    """

    num_ranks: int
    events: tuple[TimedAction, ...]

    @property
    def total(self) -> float:
        """Length of the step: from the first beginning to the last end."""
        return max(event.end for event in self.events) - min(event.begin for event in self.events)

    def busy(self, rank: int) -> float:
        """Time that a rank computes."""
        return sum(event.end - event.begin for event in self.events if event.rank == rank)

    @property
    def idle_share(self) -> float:
        """Idle time of all ranks over the time of all ranks."""
        return 1.0 - sum(self.busy(rank) for rank in range(self.num_ranks)) / (self.num_ranks * self.total)

    def peak_activations(self, rank: int) -> int:
        """The most forwards (micro-batches times chunks) whose backward is still to come, at any time on a rank."""
        own = sorted((event for event in self.events if event.rank == rank), key=lambda event: event.begin)
        kept = peak = 0
        for event in own:
            if event.action.kind is Kind.FORWARD:
                kept += 1
            elif event.action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                kept -= 1
            peak = max(peak, kept)
        return peak


def simulate(lists: ActionLists, durations: Durations | Callable[[Action], float] = Durations()) -> Timeline:
    """Let the ranks work through their lists, each action as soon as it can begin.

    Sending takes its rank no time; a receive is over when the message has come, and its rank waits for it only where a
    computation needs it.

    Args:
        lists: A checked schedule.
        durations: How long things take; all the same by default.
    """
    cost = durations.of if isinstance(durations, Durations) else durations
    message = durations.message if isinstance(durations, Durations) else 0.0
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
                ready = max((ended[need] for need in needs), default=0.0)
                if action.kind in COMPUTES:
                    begin = max(clock[rank], ready)
                    clock[rank] = ended[action] = begin + cost(action)
                    events.append(TimedAction(rank, action, begin, clock[rank]))
                else:
                    ended[action] = ready + (message if action.kind in _RECEIVES else 0.0)
                next_index[rank] += 1
                moved = True
    return Timeline(lists.num_ranks, tuple(events))


_RECEIVES = (Kind.RECV_FORWARD, Kind.RECV_BACKWARD)


def expected_idle_share(name: str, num_ranks: int, num_microbatches: int, *, chunks_per_rank: int = 1) -> float:
    """The literature's idle time over total, for equal forward, input and weight times of all stages.

    GPipe and 1F1B: ``(p - 1) / (m + p - 1)``. Interleaving divides the relative bubble ``(p - 1) / m`` by the chunks
    (arXiv 2104.04473); ZB-H1 leaves a third of it (arXiv 2401.10241, F = B = W). ZB-V idles nowhere between a rank's
    first and last action (``m >= 2p``); what remains is that ranks begin one chunk's forward after each other, a sixth.

    Args:
        name: A schedule.
        num_ranks: ``p``.
        num_microbatches: ``m``.
        chunks_per_rank: ``v``.
    """
    bubble = (num_ranks - 1) / num_microbatches
    if name in ("interleaved", "interleaved_zb"):
        bubble /= chunks_per_rank
    if name == "interleaved_zb":
        bubble /= 3
    if name == "zbv":
        bubble /= 6
    return bubble / (1 + bubble)
