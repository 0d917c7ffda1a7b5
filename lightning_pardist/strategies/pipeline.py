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
    """Pipeline parallel: each rank runs a stage of the module's layers, and micro-batches pass through the stages.

    The module and its steps need no changes. Each training batch is split into micro-batches, which pass through the
    stages one after the other; batches of validation, test and predict pass whole. Losses, logged values, metrics and
    step outputs are those of the batch, on every rank. The idle fraction is ``(p - 1) / (m + p - 1)`` for GPipe
    (arXiv 1811.06965) and 1F1B (PipeDream-Flush, arXiv 2006.09503), with ``p`` ranks and ``m`` micro-batches;
    interleaving divides the relative bubble by the chunks per rank (arXiv 2104.04473), zero-bubble schedules reduce it
    to a third (arXiv 2401.10241). GPipe keeps the activations of ``m`` micro-batches, 1F1B those of ``p``.

    ``training_step`` runs on each micro-batch in place of the batch: batch norm normalizes over micro-batches (with
    ``sync_batchnorm=True`` every batch is one micro-batch), and losses that compare samples of a batch compare those of
    a micro-batch. Losses of micro-batches are weighted by their counts, see ``loss_weight``; a loss of several means
    with different counts makes all forwards of a step run before its backwards, as in GPipe. Attributes and buffers
    that a step updates (counters, sums, moving means, recurrent states) are combined to their values after the whole
    batch; a warning names those that cannot be combined. Hooks outside of steps see only the parameters of their rank's
    stages: reading the values of others raises an error.

    Steps that fixed stages cannot run (manual optimization, a ``backward`` hook, layers called in loops, shapes that
    depend on values, as those of packed sequences) run under ``"mp"`` on every rank, each layer on the rank that holds
    it, which sends outputs in forward and gradients in backward. Results equal those of a single process, dropout
    included, and a log message reports it. Under the other schedules manual optimization raises an error.

    Args:
        pipeline_parallel_size: Number of ranks that the module is split over; ``"auto"`` for all ranks. The remaining
            ranks form further pipelines with different samples.
        num_microbatches: Micro-batches per training step; always 1 for ``"mp"``. By default the number that makes a
            step shortest, up to four times the ranks of a pipeline, each with as many samples as ``training_step``
            needs (batch norm needs more than one value per channel). Batches with fewer samples make fewer. The number
            and the reason are logged.
        schedule: ``"mp"`` (one stage at a time, no micro-batches), ``"gpipe"``, ``"1f1b"``, ``"interleaved"``,
            ``"interleaved_zb"`` (zero bubble) or ``"zbv"``.
        chunks_per_rank: Stages per rank; 2 for ``"zbv"``, 1 for all but the interleaved schedules.
        split: Names of the modules with which stages 1, 2, ... begin; chosen by measured cost if None.
        reads: What to do with modules that read tensor values between their blocks (``if x.mean() > 0``): ``"refuse"``
            raises an error; ``"send"`` allows it, which is correct as long as these values do not determine which
            blocks run.
        batch_dim: Sample dim of a batch's tensors, and dim 0 for tensors with fewer dims; or a mapping from names
            (``"0"``, ``"labels"``, ``"graph.x"``) to dims if tensors differ, with None for a tensor that every
            micro-batch gets whole. Without it, tensors with different numbers of samples in a batch are an error.
        split_batch: For batches that cannot be split along a dim (graphs, packed sequences): a function of a batch and
            a number that returns at most that many micro-batches, or :class:`~lightning_pardist.MicroBatch` objects
            with their sizes.
        eval_batches_in_flight: Number of whole batches that are in flight in validation, test and predict. By default
            four times the ranks, and 1 if the results could depend on it (hooks around batches, attributes that steps
            assign).
        data_parallel: Kind of data parallelism: ``"ddp"`` replicates, ``"zero1"``, ``"zero2"`` and ``"zero3"`` shard.
            Under ``"zero3"`` the units of a stage are all-gathered for every forward and backward of every
            micro-batch; ``reshard_after_forward=False`` in ``data_settings`` all-gathers once per step and keeps full
            parameters until its end, ``accumulate="unsharded"`` does the same for gradients.
        data_settings: Settings of the data-parallel strategy, such as ``bucket_size_mb``.
        message_timeout_s: Timeout of one message between stages, in seconds; on NCCL ``timeout_s`` applies instead.
        init: For modules built on ``meta`` (in ``configure_model``, or under ``Trainer.init_module(empty_init=True)``),
            of which each rank materializes only its stages: a function that initializes the direct parameters of one
            module, in place of its ``reset_parameters``.
        **kwargs: See :class:`~lightning_pardist.strategies.strategy.PardistStrategy`.

    Raises:
        ValueError: If a setting is out of range; during a run, if the module uses manual optimization under a schedule
            other than ``"mp"``, or an optimizer or a callback needs parameters that no rank holds.
        CannotPipelineError: During a run, if the module cannot be split with these settings, with the reason.
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
