"""Data parallelism: whole parameters on every rank, gradients averaged."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pardist.engines.api import DataEngine
from lightning_pardist.engines.data_parallel import (
    AllReduce,
    GradientReducer,
    HookedAllReduce,
    PowerSGD,
    compression_hook,
)
from lightning_pardist.engines.data_parallel.compression import Compression
from lightning_pardist.engines.data_parallel.transport import Transport
from lightning_pardist.mesh import ParallelDims
from lightning_pardist.strategies.base import PardistStrategy, lanes_of


class DDPStrategy(PardistStrategy):
    """Every rank trains on its own samples; gradients are averaged while backward still runs.

    The results are those of Lightning's ``ddp`` and of one process with the same global batch. Parameters that take no
    part in a step, or a different part on each rank, need no flag. Sends ``2 Psi (N-1)/N`` per rank and step and holds
    ``4 Psi`` (fp32 Adam; Psi parameters, N ranks).

    Args:
        bucket_size_mb: Gradients are sent in buckets of this many MiB. Larger ones use the wire better, smaller ones
            are on their way earlier.
        gradient_compression: ``"bf16"`` or ``"fp16"`` send halves of fp32 gradients, ``"powersgd"`` or a
            :class:`~lightning_pardist.PowerSGD` low-rank factors. All of them change the numbers; None does not.
        overlap: Whether gradients are sent while backward runs.
        **kwargs: See :class:`~lightning_pardist.strategies.base.PardistStrategy`.

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
        super().__init__(**kwargs)
        if bucket_size_mb <= 0:
            raise ValueError(f"bucket_size_mb={bucket_size_mb} is not positive. 25 is a good start.")
        if not isinstance(gradient_compression, PowerSGD) and gradient_compression not in (
            None,
            "bf16",
            "fp16",
            "powersgd",
        ):
            raise ValueError(
                f"gradient_compression={gradient_compression!r} is unknown."
                " Use 'bf16', 'fp16', 'powersgd', a PowerSGD(...) or None."
            )
        self.bucket_size_mb = bucket_size_mb
        self.gradient_compression = gradient_compression
        self.overlap = overlap

    @override
    def resolve_dims(self, world_size: int) -> ParallelDims:
        return ParallelDims.resolve(world_size, data_replicate="auto")

    @override
    def make_data_engine(self, module: nn.Module, optimizers: list[Optimizer]) -> DataEngine:
        group = self.data_group
        transport: Transport = AllReduce(group)
        if self.gradient_compression is not None:
            transport = HookedAllReduce(group, *compression_hook(self.gradient_compression, group=group))
        return GradientReducer(
            module,
            transport=transport,
            lanes=lanes_of(optimizers),
            bucket_size_mb=self.bucket_size_mb,
            first_bucket_size_mb=min(1.0, self.bucket_size_mb),
            overlap=self.overlap,
        )
