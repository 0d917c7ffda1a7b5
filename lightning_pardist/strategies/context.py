"""Context-parallel strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_pardist.axes.by_name import DataParallel, data_parallel_axis
from lightning_pardist.axes.context import ContextAxis, ContextParallelSize
from lightning_pardist.strategies.strategy import PardistStrategy


class ContextParallelStrategy(PardistStrategy):
    """Context parallel: splits the sequence of each batch over ranks that hold the same parameters.

    A rank has the activations of its part of every sequence. Layers that work token by token run as they are;
    attention exchanges heads for tokens and back (DeepSpeed-Ulysses, arXiv 2309.14509) where the number of heads
    divides, and puts keys and values together for each rank's rows where not. Masks keep their global meaning, whatever
    they are. User code keeps its global shapes; an operator that cannot run on parts runs on whole tensors, and is
    named in the log behind the first step, with what was split and what a forward sends. Losses and gradients are one
    process's.

    Args:
        context_parallel_size: Ranks that share the sequences of one batch; ``"auto"`` for all of them. The other ranks
            make up the data axis.
        sequence_dim: The sequence's dim in token ids, and in the inputs ``[samples, ..., features]`` of layers. By
            default the longest, which decides about cost alone: results are the same whatever dim is split.
        data_parallel: What the data axis does: ``"ddp"`` replicates; ``"zero1"``, ``"zero2"`` and ``"zero3"`` shard,
            over the context ranks as well.
        data_settings: Settings of the data axis' own strategy, ``{"bucket_size_mb": 50}`` say.
        **kwargs: See :class:`~lightning_pardist.strategies.strategy.PardistStrategy`.

    Raises:
        ValueError: If a setting is out of range; in the first step, if there is no sequence to split.
    """

    def __init__(
        self,
        *,
        context_parallel_size: ContextParallelSize = "auto",
        sequence_dim: int | None = None,
        data_parallel: DataParallel = "ddp",
        data_settings: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        context = ContextAxis(context_parallel_size=context_parallel_size, sequence_dim=sequence_dim)
        super().__init__(axes=[context, data_parallel_axis(data_parallel, **(data_settings or {}))], **kwargs)
