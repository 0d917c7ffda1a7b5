"""ZeRO: data parallelism that shards optimizer state and gradients."""

from __future__ import annotations

from typing import Any, Literal

from lightning_pardist.strategies.base import PardistStrategy
from lightning_pardist.strategies.parts import ZeroSharded


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
        data = ZeroSharded(zero_stage=zero_stage, bucket_size_mb=bucket_size_mb, overlap=overlap)
        super().__init__(data=data, **kwargs)
