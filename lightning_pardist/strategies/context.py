"""Context-parallel strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_pardist.axes.by_name import DataParallel, data_parallel_axis
from lightning_pardist.axes.context import ContextAxis, ContextParallelSize
from lightning_pardist.strategies.strategy import PardistStrategy


class ContextParallelStrategy(PardistStrategy):
    """Context parallel: splits the sequence of each batch over ranks that hold the same parameters.

    Each rank holds the activations of its part of every sequence. Token-wise layers run unchanged. Attention uses an
    all-to-all between the head and the sequence dim (DeepSpeed-Ulysses, arXiv 2309.14509) if the number of heads is
    divisible, and otherwise gathers keys and values for the local query rows. Attention masks of any form keep their
    global meaning. User code sees global shapes; an operator that cannot run on shards runs on full tensors. These
    operators, the tensors that were split and the communication of a forward are logged after the first step. Losses
    and gradients equal those of a single process.

    Args:
        context_parallel_size: Number of ranks that split the sequences of one batch; ``"auto"`` for all ranks. The
            remaining ranks form the data axis.
        sequence_dim: Sequence dim of token ids and of layer inputs ``[samples, ..., features]``. By default the
            longest dim. The choice affects cost only: results are the same whatever dim is split.
        data_parallel: Kind of data parallelism: ``"ddp"`` replicates; ``"zero1"``, ``"zero2"`` and ``"zero3"`` shard,
            over the context ranks as well.
        data_settings: Settings of the data-parallel strategy, for example ``{"bucket_size_mb": 50}``.
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
