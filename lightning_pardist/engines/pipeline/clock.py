"""Timeline of a pipeline step, and the pipeline bubble expected from the literature's formulas."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_pardist.engines.pipeline.schedule import Action


@dataclass(frozen=True)
class TimedAction:
    """An action with its start and end time.

    Attributes:
        rank: Rank that executes it.
        action: The action.
        begin: Start, in seconds from the beginning of the step.
        end: End, in the same unit.
    """

    rank: int
    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The timed actions of one step.

    Attributes:
        num_ranks: Number of ranks.
        events: Computations, in no particular order.
    """

    num_ranks: int
    events: tuple[TimedAction, ...]

    @property
    def total(self) -> float:
        """Duration of the step, from the first start to the last end."""
        return max(event.end for event in self.events) - min(event.begin for event in self.events)

    def busy(self, rank: int) -> float:
        """Return the total compute time of a rank."""
        return sum(event.end - event.begin for event in self.events if event.rank == rank)

    @property
    def idle_share(self) -> float:
        """Idle time as a fraction of the total time, summed over all ranks."""
        return 1.0 - sum(self.busy(rank) for rank in range(self.num_ranks)) / (self.num_ranks * self.total)


def expected_idle_share(name: str, num_ranks: int, num_microbatches: int, *, chunks_per_rank: int = 1) -> float:
    """Return the literature's bubble fraction, for equal forward, input and weight times of all stages.

    GPipe and 1F1B: ``(p - 1) / (m + p - 1)``. Interleaving divides the relative bubble ``(p - 1) / m`` by the number of
    chunks (arXiv 2104.04473); ZB-H1 leaves a third of it (arXiv 2401.10241, F = B = W). ZB-V has no idle time between a
    rank's first and last action (``m >= 2p``); a sixth remains, since each rank starts one chunk's forward later.

    Args:
        name: Name of the schedule.
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
