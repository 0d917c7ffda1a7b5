"""Pipeline-parallel strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_pardist.axes.by_name import DataParallel, data_parallel_axis
from lightning_pardist.axes.pipeline import PipelineAxis, PipelineSettings
from lightning_pardist.engines.common.meta_init import InitFunction
from lightning_pardist.engines.pipeline import BatchDim, SplitFunction
from lightning_pardist.engines.pipeline.stage_plan import ReadPolicy
from lightning_pardist.mesh import Degree
from lightning_pardist.strategies.strategy import PardistStrategy


class PipelineStrategy(PardistStrategy):
    """Pipeline parallel: each rank runs a stage of the module's layers, micro-batches pass through the stages.

    The module and its steps stay as they are. Each training batch is cut into micro-batches, which go through the
    stages one behind the other; batches of validation, test and predict do so whole. Losses, logged values, metrics and
    step outputs are those of the batch, on every rank. Idle time over total is ``(p - 1) / (m + p - 1)`` for GPipe
    (arXiv 1811.06965) and 1F1B (PipeDream-Flush, arXiv 2006.09503), ``p`` ranks and ``m`` micro-batches; interleaving
    divides the relative bubble by the chunks a rank (arXiv 2104.04473), zero-bubble schedules leave a third of it
    (arXiv 2401.10241). GPipe keeps ``m`` micro-batches' activations, 1F1B ``p``.

    What ``training_step`` computes from a whole batch, it computes from each micro-batch: batch norm normalizes
    micro-batches (with ``sync_batchnorm=True`` every batch is one), and losses that compare samples of a batch compare
    those of a micro-batch. The losses of micro-batches are weighed by what they count, see ``loss_weight``; a loss of
    several means, each with a count of its own, makes all forwards of a step come before its backwards, as in GPipe.
    What a step keeps in attributes and buffers (counters, sums, moving means, recurrent states) is afterwards what the
    whole batch would have left; a warning names what does not go together. Hooks outside of steps see the parameters of
    their rank's stages only: asking for the values of others raises an error.

    Steps that no fixed stages can run (manual optimization, a ``backward`` hook, layers called in loops, shapes that
    depend on values, as those of packed sequences) run under ``"mp"`` on every rank, each layer on the rank that holds
    it, which sends outputs forward and gradients back: one process's numbers, dropout included. The log says so. Under
    the other schedules manual optimization is refused.

    Args:
        pipeline_parallel_size: Ranks that the module is split over. Other ranks form further pipelines with other
            samples. ``"auto"``: all ranks.
        num_microbatches: Micro-batches a training step; always 1 for ``"mp"``. By default as many as make a step short,
            up to four times the ranks of a pipeline, of as many samples as ``training_step`` needs (batch norm wants
            more than one value a channel). Batches with fewer samples make fewer. The log says how many and why.
        schedule: ``"mp"`` (one stage at a time, no micro-batches), ``"gpipe"``, ``"1f1b"``, ``"interleaved"``,
            ``"interleaved_zb"`` (zero bubble) or ``"zbv"``.
        chunks_per_rank: Stages a rank; 2 for ``"zbv"``, 1 for all but the interleaved schedules.
        split: Names of the modules with which stages 1, 2, ... begin; by measured cost if None.
        reads: ``"refuse"`` modules that look at values between their blocks (``if x.mean() > 0``); ``"send"`` allows
            it, which is right as long as what they see does not decide which blocks run.
        batch_dim: Dim of the samples in a batch's tensors, those with fewer dims having them first; or by name
            (``"0"``, ``"labels"``, ``"graph.x"``) where tensors differ, with None for a tensor that goes whole to every
            micro-batch. Batches whose tensors disagree on the number of samples are refused otherwise.
        split_batch: For batches that no dim cuts (graphs, packed sequences): a function of a batch and a number that
            returns at most so many micro-batches, or :class:`~lightning_pardist.MicroBatch` objects with their sizes.
        eval_batches_in_flight: Whole batches that validation, test and predict have on their way through the stages.
            By default four times the ranks, and 1 where something between two batches could tell the difference (hooks
            around batches, attributes that steps assign).
        data_parallel: What serves the data axis: ``"ddp"`` replicates, ``"zero1"``, ``"zero2"`` and ``"zero3"`` shard.
            Under ``"zero3"`` a stage is gathered again, unit by unit, for every forward and backward of every
            micro-batch; ``reshard_after_forward=False`` in ``data_settings`` gathers it once a step and holds it whole
            that long, ``accumulate="unsharded"`` does the same for gradients.
        data_settings: Settings of that, as ``bucket_size_mb``.
        message_timeout_s: Longest wait for one message between stages, in seconds.
        init: For modules built on ``meta`` (in ``configure_model``, or under ``Trainer.init_module(empty_init=True)``),
            of which each rank creates its stages only: initializes the own parameters of one module, in place of its
            ``reset_parameters``.
        **kwargs: See :class:`~lightning_pardist.strategies.strategy.PardistStrategy`.

    Raises:
        ValueError: If a setting is out of range; during a run, if the module optimizes by hand under another schedule
            than ``"mp"``, or an optimizer or a callback needs what no rank has.
        CannotPipelineError: During a run, if the module cannot be split as asked, with the reason.
    """

    def __init__(
        self,
        *,
        pipeline_parallel_size: Degree = "auto",
        num_microbatches: int | None = None,
        schedule: str = "1f1b",
        chunks_per_rank: int = 1,
        split: Sequence[str] | None = None,
        reads: ReadPolicy = "refuse",
        batch_dim: BatchDim = 0,
        split_batch: SplitFunction | None = None,
        eval_batches_in_flight: int | None = None,
        data_parallel: DataParallel = "ddp",
        data_settings: Mapping[str, Any] | None = None,
        message_timeout_s: float = 600.0,
        init: InitFunction | None = None,
        **kwargs: Any,
    ) -> None:
        settings = PipelineSettings(
            pipeline_parallel_size=pipeline_parallel_size,
            num_microbatches=num_microbatches,
            schedule=schedule,
            chunks_per_rank=chunks_per_rank,
            split=split,
            reads=reads,
            batch_dim=batch_dim,
            split_batch=split_batch,
            eval_batches_in_flight=eval_batches_in_flight,
            message_timeout_s=message_timeout_s,
            init=init,
        )
        settings.check_data(data_parallel, data_settings or {})
        data = data_parallel_axis(data_parallel, **(data_settings or {}))
        super().__init__(axes=[PipelineAxis(settings), data], **kwargs)
