"""Data-parallel strategy (DDP)."""

from __future__ import annotations

from typing import Any

from lightning_pardist.axes.ddp import DDPAxis
from lightning_pardist.engines.ddp import PowerSGD
from lightning_pardist.engines.ddp.compression import Compression
from lightning_pardist.strategies.strategy import PardistStrategy


class DDPStrategy(PardistStrategy):
    """Data parallel: full model on every rank, gradients all-reduced in buckets that overlap with backward.

    Results equal those of Lightning's ``ddp`` and of a single process with the same global batch. Parameters that are
    unused in a step, on all ranks or on some, need no flag. Sends ``2 Psi (N-1)/N`` per rank and step and holds
    ``4 Psi`` (fp32 Adam; Psi parameters, N ranks).

    Args:
        bucket_size_mb: Size of gradient buckets in MiB. Larger buckets use the bandwidth better, smaller ones are sent
            earlier.
        gradient_compression: ``"bf16"`` or ``"fp16"`` cast fp32 gradients to half precision for communication,
            ``"powersgd"`` or a :class:`~lightning_pardist.PowerSGD` send low-rank factors. All of them change results;
            None does not.
        overlap: Whether gradients are sent while backward runs.
        **kwargs: See :class:`~lightning_pardist.strategies.strategy.PardistStrategy`.

    Raises:
        ValueError: If a setting is out of range.
    """

    def __init__(
        self,
        *,
        bucket_size_mb: float = 25.0,
        gradient_compression: Compression | PowerSGD | None = None,
        overlap: bool = True,
        **kwargs: Any,
    ) -> None:
        data = DDPAxis(bucket_size_mb=bucket_size_mb, gradient_compression=gradient_compression, overlap=overlap)
        super().__init__(axes=[data], **kwargs)
