"""Settings of the pipeline axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_pardist.engines.fully_sharded.materialize import InitFunction
from lightning_pardist.engines.pipeline import SCHEDULES, SPLIT_BACKWARD, stage_ranks
from lightning_pardist.engines.pipeline.plan import ReadPolicy
from lightning_pardist.mesh import Degree
from lightning_pardist.strategies.settings import one_of, positive


@dataclass(frozen=True)
class PipelineSettings:
    """How a module is split into stages, and how micro-batches go through them.

    Attributes:
        pipeline_parallel_size: Ranks that a module is split over, or ``"auto"`` for all that are left.
        num_microbatches: Micro-batches a step; four times the ranks if None, and always 1 for ``"mp"``. Batches with
            fewer samples make fewer.
        schedule: ``"mp"``, ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"interleaved_zb"`` or ``"zbv"``.
        chunks_per_rank: Stages a rank.
        split: Names of the modules with which stages 1, 2, ... begin; by measured cost if None.
        loss_weight: A micro-batch's weight in the batch's loss, for losses that are no mean over samples: given the
            micro-batch, returns its number of tokens, say. ``"sum"`` for a loss that is a sum.
        reads: ``"send"`` allows values between blocks to be looked at (``if x.mean() > 0``), as long as that does not
            decide which blocks run.
        message_timeout_s: Longest wait for one message between stages, in seconds.
        init: For modules on ``meta``: initializes the own parameters of one module, in place of its
            ``reset_parameters``.
    """

    pipeline_parallel_size: Degree = "auto"
    num_microbatches: int | None = None
    schedule: str = "1f1b"
    chunks_per_rank: int = 1
    split: Sequence[str] | None = None
    loss_weight: Callable[[Any], float] | Literal["sum"] | None = None
    reads: ReadPolicy = "refuse"
    message_timeout_s: float = 600.0
    init: InitFunction | None = None

    def __post_init__(self) -> None:
        one_of("schedule", self.schedule, SCHEDULES)
        one_of("reads", self.reads, get_args(ReadPolicy))
        positive("chunks_per_rank", self.chunks_per_rank, "Use 1 or more.")
        positive("message_timeout_s", self.message_timeout_s, "Use the seconds that a message may take.")
        stage_ranks(self.schedule, 2, self.chunks_per_rank)
        if self.num_microbatches is not None:
            positive("num_microbatches", self.num_microbatches, "Use 1 or more, or None.")
        if self.schedule == "mp" and self.num_microbatches not in (None, 1):
            raise ValueError(
                f"schedule='mp' takes no micro-batches, not num_microbatches={self.num_microbatches}."
                " Use schedule='1f1b', or leave num_microbatches out."
            )

    def check_data(self, data_parallel: str, data_settings: Mapping[str, Any]) -> None:
        """Refuse what makes no sense with a data axis of this kind.

        Raises:
            ValueError: With what was set and what to set in its place.
        """
        if data_parallel != "zero3" or self.pipeline_parallel_size == 1:
            return
        if self.schedule in SPLIT_BACKWARD:
            raise ValueError(
                f"schedule={self.schedule!r} with data_parallel='zero3' would gather a stage a third time, for the half"
                " of backward that it puts off. Use schedule='1f1b' or 'interleaved', or data_parallel='zero2'."
            )
        for name in ("rank_dependent", "tile_linear_above_mb"):
            if data_settings.get(name):
                raise ValueError(
                    f"{name}={data_settings[name]} is not for data_parallel='zero3' under a pipeline, whose schedule"
                    " fixes what is gathered when. Leave it out, or set pipeline_parallel_size=1."
                )

    def microbatches(self, num_ranks: int) -> int:
        """Micro-batches a step over this many ranks."""
        if self.schedule == "mp":
            return 1
        return self.num_microbatches or 4 * num_ranks
