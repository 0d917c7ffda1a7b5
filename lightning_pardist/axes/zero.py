"""ZeRO-1 and ZeRO-2 axis: whole parameters, sharded optimizer state and gradients."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pardist.axes.base import DataParallelAxis
from lightning_pardist.axes.compression_setting import CompressionSetting
from lightning_pardist.axes.offload_setting import OffloadSetting
from lightning_pardist.engines.common.block_quantization import Compression
from lightning_pardist.engines.data_engine import DataEngine
from lightning_pardist.engines.zero import ZeroEngine
from lightning_pardist.mesh import GRADIENT_AXES, Degree
from lightning_pardist.settings import positive


class ZeroAxis(DataParallelAxis):
    """Shards optimizer state (stage 1) and gradients (stage 2) over the data axis; parameters stay replicated.

    Args:
        zero_stage: 1 shards optimizer state, 2 also shards gradients.
        bucket_size_mb: Bucket size of gradient and parameter communication, in MiB.
        overlap: Whether gradients are reduced while backward runs.
        offload: Where optimizer state is kept and updates run, see
            :class:`~lightning_pardist.axes.offload_setting.OffloadSetting`.
        offload_window_mb: With files, the size of the state resident in memory at a time, in MiB.
        gather: Compressed format in which parameters are gathered, see :class:`~lightning_pardist.ZeroStrategy`.
        reduce: Compressed format in which gradients are reduced.
        error_feedback: Whether the compression error of gradients is added to the next gradients.

    Raises:
        ValueError: If a setting is out of range; when the engine is created, if an optimizer's trial step fails.
    """

    name = "zero"

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
    ) -> None:
        if zero_stage not in (1, 2):
            raise ValueError(f"zero_stage={zero_stage!r} is not available. Use 1 or 2; FSDPStrategy is stage 3.")
        self.zero_stage = zero_stage
        self.bucket_size_mb = positive("bucket_size_mb", bucket_size_mb, "25 is a good start.")
        self.overlap = overlap
        self.offload = OffloadSetting(offload, offload_window_mb)
        self.compression = CompressionSetting(gather, reduce, error_feedback)
        self._engine: ZeroEngine | None = None

    @property
    @override
    def host_work(self) -> float:
        return 140.0

    @property
    @override
    def kept_on_host(self) -> Sequence[str]:
        return () if self.offload.offload is None else ("gradients", "optimizer")

    @property
    @override
    def resident_state_bytes(self) -> int | None:
        return self.offload.resident_bytes

    @override
    def check(self, trainer: pl.Trainer) -> None:
        self.offload.check(trainer, is_plan=self.context.is_plan)
        self.compression.check(self.context)
        if self.compression.gather is not None and self.context.dims.outer_parallel > 1:
            raise ValueError(
                f"With gather={self.compression.gather!r} each rank has exact values of its own slice only, but islands"
                " average the values that it computes with. Use outer_compression, or data_parallel='zero3'."
            )

    @override
    def degrees(self, num_nodes: int, ranks_per_node: int) -> dict[str, Degree]:
        return {"data_shard": "auto"}

    @property
    @override
    def steps_on_shards(self) -> bool:
        return self.context.gradient_group.size() > 1

    @override
    def make_engine(self, module: nn.Module, optimizers: list[Optimizer]) -> DataEngine:
        self.compression.check_copies(self.context)
        self._engine = ZeroEngine(
            module,
            optimizers,
            group=self.context.gradient_group,
            zero_stage=self.zero_stage,
            bucket_size_mb=self.bucket_size_mb,
            overlap=self.overlap,
            offload=self.offload.settings,
            update_group=lambda scope: self.context.update_group(scope, *GRADIENT_AXES),
            update_scope=self.context.update_scope,
            gather=self.compression.gather,
            reduce=self.compression.reduce,
            error_feedback=self.compression.error_feedback,
            narrower=self.context.narrower_groups(module),
        )
        return self._engine

    # --- compressed parameters ----------------------------------------------------------------------------------

    @override
    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module = self.context.module
        if self._engine is not None and module is not None and module.trainer.training:
            self._engine.show_dequantized()
        return super().run_step(step, *args, **kwargs)

    @override
    def synchronize(self, *, evaluation: bool = False) -> None:
        """Gather the exact, uncompressed parameters; except before evaluation, clear the gradients' compression error.

        Checkpoints do not keep the compression error.
        """
        if self._engine is not None:
            self._engine.show_exact(for_a_look=evaluation)
            if not evaluation:
                self._engine.drop_error_feedback()

    # --- description and teardown -------------------------------------------------------------------------------

    @override
    def describe(self) -> str:
        return self.compression.describe()

    @override
    def teardown(self) -> None:
        self._engine = None
