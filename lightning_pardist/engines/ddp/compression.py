"""Gradient compression with torch's DDP communication hooks, on CPU and GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn

from lightning_pardist.engines.ddp.bucket import Bucket
from lightning_pardist.local_tensors import local_shard

#: ``hook(state, bucket) -> Future``: torch's interface (``DistributedDataParallel.register_comm_hook``).
CommunicationHook = Callable[[Any, Any], Any]
Compression = Literal["bf16", "fp16", "powersgd"]


@dataclass(frozen=True)
class PowerSGD:
    """Low-rank gradient compression (PowerSGD, arXiv 1905.13727).

    Attributes:
        rank: Rank of the approximation; 1 to 4 are usual. Doubling it doubles the traffic.
        start_step: Number of steps with plain averaging before compression starts; early steps are the most sensitive.
            At least 2.
        min_compression_rate: A matrix is compressed only if that reduces its size at least by this factor.
    """

    rank: int = 1
    start_step: int = 100
    min_compression_rate: float = 2.0

    def __post_init__(self) -> None:
        if self.rank < 1 or self.start_step < 2 or self.min_compression_rate < 1:
            raise ValueError(
                f"PowerSGD(rank={self.rank}, start_step={self.start_step},"
                f" min_compression_rate={self.min_compression_rate}) needs rank >= 1, start_step >= 2 (error"
                " feedback needs the final buckets) and min_compression_rate >= 1."
            )


class HookBucket:
    """Bucket with the interface of torch's ``GradBucket``, which cannot be constructed in Python, for hooks."""

    def __init__(self, bucket: Bucket, *, index: int, is_last: bool) -> None:
        self._bucket = bucket
        self._buffer = bucket.gradients
        self._index = index
        self._is_last = is_last

    def buffer(self) -> Tensor:
        """Return the flat gradients, shape ``[numel]``."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the flat gradients by ``buffer`` (used by torch's hook wrappers)."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Return the gradients as views of the buffer, in the parameters' local shapes."""
        parts = [local_shard(param) for param in self._bucket.params]
        pieces = self._buffer.split([part.numel() for part in parts])
        return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters, in the order of :meth:`gradients`."""
        return list(self._bucket.params)

    def index(self) -> int:
        """Return the index of this bucket in the step."""
        return self._index

    def is_last(self) -> bool:
        """Return whether this bucket is the last of the step."""
        return self._is_last


def compression_hook(
    compression: Compression | PowerSGD, *, group: dist.ProcessGroup, from_start: bool = False
) -> tuple[CommunicationHook, Any]:
    """Return the communication hook and its state for a named compression.

    Args:
        compression: ``"bf16"`` and ``"fp16"`` halve fp32 traffic, ``"powersgd"`` (with its defaults) or a
            :class:`PowerSGD` sends low-rank factors.
        group: The data axis' process group.
        from_start: Whether compression starts with the second step, regardless of :attr:`PowerSGD.start_step`.

    Raises:
        ValueError: If the name is unknown.
    """
    if compression in ("bf16", "fp16"):
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        return getattr(default_hooks, f"{compression}_compress_hook"), group
    if compression == "powersgd":
        compression = PowerSGD()
    if isinstance(compression, PowerSGD):
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

        state = power_sgd.PowerSGDState(
            process_group=group,
            matrix_approximation_rank=compression.rank,
            start_powerSGD_iter=compression.start_step,
            min_compression_rate=compression.min_compression_rate,
        )
        if from_start:
            # Not in the first step: its buckets are rebuilt afterwards in the order of gradients.
            state.iter = compression.start_step - 1
        return power_sgd.powerSGD_hook, state
    raise ValueError(
        f"gradient_compression={compression!r} is unknown. Use 'bf16', 'fp16', 'powersgd', a PowerSGD(...) or None."
    )
