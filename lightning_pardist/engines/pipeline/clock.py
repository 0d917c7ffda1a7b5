"""The timed actions of a pipeline step, and how much of it ranks idle by the literature's formulas."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_pardist.engines.pipeline.schedule import Action


@dataclass(frozen=True)
class TimedAction:
    """An action with its time.

    Attributes:
        rank: Who.
        action: What.
        begin: When, in seconds from the step's beginning.
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
