"""ZeRO: data parallelism that shards optimizer state and gradients."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pardist.engines.api import DataEngine
from lightning_pardist.engines.zero import ZeroEngine
from lightning_pardist.mesh import ParallelDims
from lightning_pardist.strategies.base import PardistStrategy


class ZeroStrategy(PardistStrategy):
    """Every rank updates an even slice of the parameters, and keeps optimizer state for that slice only.

    Parameters stay ordinary, whole tensors on every rank. Sends ``2 Psi (N-1)/N`` per rank and step, as data
    parallelism does. In fp32 with Adam, stage 1 holds ``2 Psi + 2 Psi/N`` and stage 2, which keeps slices of gradients
    too, ``Psi + 3 Psi/N`` (Psi parameters, N ranks; ZeRO, arXiv 1910.02054). Under gradient accumulation stage 1 sends
    gradients once an optimizer step, stage 2 with every backward.

    Parameters in bf16 or fp16 (``precision="bf16-true"``) are updated in fp32, kept for the slice only.

    Args:
        zero_stage: 1 shards optimizer state, 2 gradients as well.
        bucket_size_mb: Gradients and parameters travel in buckets of this many MiB.
        overlap: Whether gradients are sent while backward runs.
        **kwargs: See :class:`~lightning_pardist.strategies.base.PardistStrategy`.

    Raises:
        ValueError: If a setting is out of range; during ``fit``, if an optimizer needs whole parameters (LBFGS, Muon,
            Adafactor), with its name.
    """

    def __init__(
        self, *, zero_stage: Literal[1, 2] = 2, bucket_size_mb: float = 25.0, overlap: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if zero_stage not in (1, 2):
            raise ValueError(f"zero_stage={zero_stage!r} is not available. Use 1 or 2; FSDPStrategy is stage 3.")
        if bucket_size_mb <= 0:
            raise ValueError(f"bucket_size_mb={bucket_size_mb} is not positive. 25 is a good start.")
        self.zero_stage = zero_stage
        self.bucket_size_mb = bucket_size_mb
        self.overlap = overlap

    @override
    def resolve_dims(self, world_size: int) -> ParallelDims:
        return ParallelDims.resolve(world_size, data_shard="auto")

    @override
    def make_data_engine(self, module: nn.Module, optimizers: list[Optimizer]) -> DataEngine:
        return ZeroEngine(
            module,
            optimizers,
            group=self.data_group,
            zero_stage=self.zero_stage,
            bucket_size_mb=self.bucket_size_mb,
            overlap=self.overlap,
        )
