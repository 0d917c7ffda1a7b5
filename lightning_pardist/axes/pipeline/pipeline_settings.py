"""Settings of the pipeline axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_pardist.engines.common.meta_init import InitFunction
from lightning_pardist.engines.pipeline import SCHEDULES, SPLIT_BACKWARD, BatchDim, SplitFunction, stage_ranks
from lightning_pardist.engines.pipeline.stage_plan import ReadPolicy
from lightning_pardist.mesh import Degree
from lightning_pardist.settings import one_of, positive


@dataclass(frozen=True)
class PipelineSettings:
    """How a module is split into stages, and how micro-batches are scheduled on them.

    Attributes:
        pipeline_parallel_size: Number of pipeline ranks, ``"auto"`` for all that other axes leave, or ``"machine"``,
            see :func:`~lightning_pardist.mesh.degrees_of_machine`.
        num_microbatches: Micro-batches per training step. If None, the number with the shortest step, up to four times
            the ranks, with as many samples each as ``training_step`` needs; 1 if splitting a batch would change its
            loss. Always 1 for ``"mp"``. Batches with fewer samples make fewer.
        schedule: ``"mp"``, ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"interleaved_zb"`` or ``"zbv"``.
        chunks_per_rank: Number of stages per rank.
        split: Names of the modules with which stages 1, 2, ... begin; balanced by measured cost if None.
        reads: ``"send"`` allows the step to read values between blocks (``if x.mean() > 0``), as long as they do not
            determine which blocks run.
        batch_dim: Dim of the samples in a batch's tensors (dim 0 for tensors with fewer dims), or a dict of dims by
            name (``"0"``, ``"labels"``, ``"graph.x"``), with None for a tensor passed unsplit to every micro-batch.
        split_batch: Function that splits a batch, in place of ``batch_dim``: takes the batch and the maximum number of
            micro-batches, returns a list of batches or :class:`~lightning_pardist.MicroBatch` objects.
        eval_batches_in_flight: Batches that validation, test and predict run through the stages at the same time. If
            None, four times the ranks, or 1 if a hook or callback could observe the difference.
        message_timeout_s: Timeout of one message between stages, in seconds; on NCCL ``timeout_s`` applies instead.
        init: For modules on ``meta``: initializes the own parameters of one module, in place of its
            ``reset_parameters``.
    """

    pipeline_parallel_size: Degree | Literal["machine"] = "auto"
    num_microbatches: int | None = None
    schedule: str = "1f1b"
    chunks_per_rank: int = 1
    split: Sequence[str] | None = None
    reads: ReadPolicy = "refuse"
    batch_dim: BatchDim = 0
    split_batch: SplitFunction | None = None
    eval_batches_in_flight: int | None = None
    message_timeout_s: float = 600.0
    init: InitFunction | None = None

    def __post_init__(self) -> None:
        one_of("schedule", self.schedule, SCHEDULES)
        one_of("reads", self.reads, get_args(ReadPolicy))
        positive("chunks_per_rank", self.chunks_per_rank, "Use 1 or more.")
        positive("message_timeout_s", self.message_timeout_s, "Set the seconds that a message may take.")
        stage_ranks(self.schedule, 2, self.chunks_per_rank)
        for name in ("num_microbatches", "eval_batches_in_flight"):
            if (number := getattr(self, name)) is not None:
                positive(name, number, "Use 1 or more, or None.")
        if self.split_batch is not None and self.batch_dim != 0:
            raise ValueError("batch_dim and split_batch both say how a batch is cut. Leave one of them out.")
        if self.schedule == "mp" and self.num_microbatches not in (None, 1):
            raise ValueError(
                f"schedule='mp' makes no micro-batches, but num_microbatches={self.num_microbatches} is set. Use"
                " schedule='1f1b', or leave num_microbatches out."
            )

    def check_data(self, data_parallel: str, data_settings: Mapping[str, Any]) -> None:
        """Refuse settings that are incompatible with the data axis.

        Raises:
            ValueError: If there is one; names the setting and what to set instead.
        """
        if data_parallel != "zero3" or self.pipeline_parallel_size == 1:
            return
        if self.schedule in SPLIT_BACKWARD:
            raise ValueError(
                f"schedule={self.schedule!r} with data_parallel='zero3' would all-gather a stage a third time, for"
                " the half of the backward pass that it defers. Use schedule='1f1b' or 'interleaved', or"
                " data_parallel='zero2'."
            )
        for name in ("allow_divergent_forward", "tile_linear_above_mb"):
            if data_settings.get(name):
                raise ValueError(
                    f"{name}={data_settings[name]} is not available with data_parallel='zero3' in a pipeline, whose"
                    " schedule fixes what is all-gathered and when. Leave it out, or set pipeline_parallel_size=1."
                )
