"""ZeRO-1 and ZeRO-2 strategy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from lightning_pardist.axes.zero import ZeroAxis
from lightning_pardist.engines.common.block_quantization import Compression
from lightning_pardist.strategies.ddp import DDPStrategy
from lightning_pardist.strategies.fsdp import FSDPStrategy
from lightning_pardist.strategies.strategy import PardistStrategy
from lightning_pardist.trainer.deepspeed_config import DeepSpeedConfig


class ZeroStrategy(PardistStrategy):
    """ZeRO-1 and ZeRO-2: shard optimizer state, and gradients in stage 2; parameters are replicated.

    Parameters stay plain, full tensors on every rank. Sends ``2 Psi (N-1)/N`` per rank and step, the same as DDP. In
    fp32 with Adam, stage 1 holds ``2 Psi + 2 Psi/N`` and stage 2, which shards gradients too, ``Psi + 3 Psi/N`` (Psi
    parameters, N ranks; ZeRO, arXiv 1910.02054). Under gradient accumulation stage 1 sends gradients once per optimizer
    step, stage 2 in every backward.

    Parameters in bf16 or fp16 (``precision="bf16-true"``) have fp32 master weights, which are sharded.

    Args:
        zero_stage: 1 shards optimizer state; 2 shards gradients as well.
        bucket_size_mb: Size of gradient and parameter buckets in MiB.
        overlap: Whether gradients are sent while backward runs.
        offload: Where optimizer state is stored and the update runs. ``"cpu"``: in host memory. The path of a folder on
            a local disk: in files there, with ``offload_window_mb`` resident at a time. ``"disk"``: in files in the
            Trainer's ``default_root_dir``. Adam and AdamW then use torch's fused kernel unless set otherwise.
            The files are unlinked, so they are freed with the process, however it ends.
        offload_window_mb: With files, size of the state that is resident in memory at a time, in MiB.
        gather: Compression of all-gathered parameters (ZeRO++, arXiv 2306.10209): ``"int8"``, ``"int4"`` or ``"bf16"``,
            in blocks of 64 elements with one scale each; None for no compression. Owners update exact values, which
            validation, checkpoints and the trained module use; training steps use the compressed values on all ranks.
        reduce: Compression of gradients, which are sent once each to the rank that sums them in full precision. Saving
            a checkpoint resets the residuals of error feedback.
        error_feedback: Whether the compression error of ``reduce`` is kept on the rank, at one byte per parameter, and
            added to the next gradients. None means True.
        **kwargs: See :class:`~lightning_pardist.strategies.strategy.PardistStrategy`.

    Raises:
        ValueError: If a setting is out of range; during ``fit``, if the trial of an optimizer fails, with its name,
            or the folder for offloaded state is not writable.
        RuntimeError: During ``fit``, if the disk is too small for offloaded state.
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
        """Return the strategy for a DeepSpeed configuration.

        Stage, bucket size, offload and precision become settings of the strategy; accumulation, clipping and batch
        sizes are set on the Trainer, or compared with its own, when training is set up. ``fp16`` becomes ``16-mixed``
        with the file's loss scale, ``bf16`` becomes ``bf16-true`` with sharded fp32 master weights. Settings without a
        counterpart are ignored and listed in one warning. ``"auto"`` means the default of the Trainer or the strategy.

        Args:
            config: Path of a JSON file, or its content as a mapping.
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
            raise ValueError(
                f"The DeepSpeed config and the arguments both set {', '.join(twice)}. Leave it out of one of them."
            )
        makers = (DDPStrategy, ZeroStrategy, FSDPStrategy)
        make = next(maker for maker in makers if maker.__name__ == settings.strategy_class)
        if settings.precision is not None:
            kwargs = {"precision_plugin": settings.precision_plugin, **kwargs}
        strategy = make(**settings.strategy, **kwargs)
        strategy.deepspeed = settings
        return strategy
