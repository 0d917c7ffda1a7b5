"""ZeRO-1 and ZeRO-2 strategy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from lightning_pardist.axes.zero import ZeroAxis
from lightning_pardist.engines.common.block_codes import Compression
from lightning_pardist.strategies.ddp import DDPStrategy
from lightning_pardist.strategies.fsdp import FSDPStrategy
from lightning_pardist.strategies.strategy import PardistStrategy
from lightning_pardist.trainer.deepspeed_config import DeepSpeedConfig


class ZeroStrategy(PardistStrategy):
    """ZeRO-1 and ZeRO-2: shards optimizer state, in stage 2 gradients as well; parameters stay whole.

    Parameters stay ordinary, whole tensors on every rank. Sends ``2 Psi (N-1)/N`` per rank and step, as data
    parallelism does. In fp32 with Adam, stage 1 holds ``2 Psi + 2 Psi/N`` and stage 2, which keeps slices of gradients
    too, ``Psi + 3 Psi/N`` (Psi parameters, N ranks; ZeRO, arXiv 1910.02054). Under gradient accumulation stage 1 sends
    gradients once an optimizer step, stage 2 with every backward.

    Parameters in bf16 or fp16 (``precision="bf16-true"``) are updated in fp32, kept for the slice only.

    Args:
        zero_stage: 1 shards optimizer state, 2 gradients as well.
        bucket_size_mb: Gradients and parameters travel in buckets of this many MiB.
        overlap: Whether gradients are sent while backward runs.
        offload: Where optimizer state lives and steps are taken. ``"cpu"``: in host memory. The path of a folder on a
            local disk: in files there, of which ``offload_window_mb`` are resident at a time. ``"disk"``: in files in
            the Trainer's ``default_root_dir``. Adam and AdamW take torch's fused kernel then, unless told otherwise.
            The files have no names, and are gone with the process, however it ends.
        offload_window_mb: With files, state that is resident at a time, in MiB.
        gather: How parameters travel: as ``"int8"``, ``"int4"`` or ``"bf16"``, blocks of 64 elements with a scale of
            their own, or as they are if None (ZeRO++, arXiv 2306.10209). Owners update exact values, which validation,
            checkpoints and the trained module have; training steps compute with what was received, on all ranks.
        reduce: How gradients travel, once each, to the rank that sums them in full precision. A checkpoint starts
            what error feedback has kept anew.
        error_feedback: Whether what ``reduce`` leaves behind on a rank is added to the next gradients, for a byte a
            parameter; it is if None.
        **kwargs: See :class:`~lightning_pardist.strategies.strategy.PardistStrategy`.

    Raises:
        ValueError: If a setting is out of range; during ``fit``, if an optimizer cannot be tried, with its name, or
            the folder for offloaded state cannot be written to.
        RuntimeError: During ``fit``, if the disk has no room for offloaded state.
    """

    def __init__(
        self,
        *,
        zero_stage: Literal[1, 2] = 2,
        bucket_size_mb: float = 25.0,
        overlap: bool = True,
        offload: str | os.PathLike[str] | None = None,
        offload_window_mb: float = 64.0,
        gather: Compression | None = None,
        reduce: Compression | None = None,
        error_feedback: bool | None = None,
        **kwargs: Any,
    ) -> None:
        data = ZeroAxis(
            zero_stage=zero_stage,
            bucket_size_mb=bucket_size_mb,
            overlap=overlap,
            offload=offload,
            offload_window_mb=offload_window_mb,
            gather=gather,
            reduce=reduce,
            error_feedback=error_feedback,
        )
        super().__init__(axes=[data], **kwargs)

    @staticmethod
    def from_deepspeed_config(
        config: str | os.PathLike[str] | Mapping[str, Any], **kwargs: Any
    ) -> DDPStrategy | ZeroStrategy | FSDPStrategy:
        """The strategy that a DeepSpeed configuration asks for.

        Its stage, bucket size, offload and precision are the strategy's; accumulation, clipping and batch sizes are
        given to the Trainer, or compared with it, when training is set up. ``fp16`` becomes ``16-mixed`` with the
        file's loss scale, ``bf16`` becomes ``bf16-true`` with fp32 masters in the shards. What has no counterpart is
        left out, and listed in one warning. ``"auto"`` stands for what the Trainer and the strategy have by themselves.

        Args:
            config: Path of a JSON file, or what it holds.
            **kwargs: Further arguments of the strategy.

        Returns:
            Stage 0: :class:`~lightning_pardist.DDPStrategy`. 1 and 2: this class. 3:
            :class:`~lightning_pardist.FSDPStrategy`.

        Raises:
            ValueError: If the file cannot be read, or settings are out of range or contradict each other; during
                ``fit``, if they contradict the Trainer.
        """
        settings = DeepSpeedConfig.read(config)
        settings.warn()
        if twice := sorted(settings.strategy.keys() & kwargs.keys()):
            raise ValueError(f"The DeepSpeed config sets {', '.join(twice)} already. Leave it out of one of them.")
        makers = (DDPStrategy, ZeroStrategy, FSDPStrategy)
        make = next(maker for maker in makers if maker.__name__ == settings.strategy_class)
        if settings.precision is not None:
            kwargs = {"precision_plugin": settings.precision_plugin, **kwargs}
        strategy = make(**settings.strategy, **kwargs)
        strategy.deepspeed = settings
        return strategy
