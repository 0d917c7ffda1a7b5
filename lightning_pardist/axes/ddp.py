"""DDP axis: replicated parameters, all-reduced gradients."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pardist.axes.base import DataParallelAxis
from lightning_pardist.engines.data_engine import DataEngine
from lightning_pardist.engines.ddp import (
    AllReduce,
    GradientReducer,
    HookedAllReduce,
    PowerSGD,
    compression_hook,
)
from lightning_pardist.engines.ddp.compression import Compression
from lightning_pardist.engines.ddp.transport import Transport
from lightning_pardist.mesh import Degree
from lightning_pardist.settings import positive


class DDPAxis(DataParallelAxis):
    """Averages gradients in buckets, overlapped with backward.

    Args:
        bucket_size_mb: Size of a gradient bucket in MiB.
        gradient_compression: ``"bf16"``, ``"fp16"``, ``"powersgd"`` or a :class:`~lightning_pardist.PowerSGD`.
        overlap: Whether gradients are reduced while backward runs.

    Raises:
        ValueError: If a setting is out of range.
    """

    name = "ddp"

    def __init__(
        self,
        *,
        bucket_size_mb: float = 25.0,
        gradient_compression: Compression | PowerSGD | None = None,
        overlap: bool = True,
    ) -> None:
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
        self.bucket_size_mb = positive("bucket_size_mb", bucket_size_mb, "25 is a good start.")
        self.gradient_compression = gradient_compression
        self.overlap = overlap

    @override
    def degrees(self, num_nodes: int, ranks_per_node: int) -> dict[str, Degree]:
        return {"data_replicate": "auto"}

    @override
    def make_engine(self, module: nn.Module, optimizers: list[Optimizer]) -> DataEngine:
        group = self.context.gradient_group
        narrower = self.context.narrower_groups(module)
        transport: Transport = AllReduce(group, narrower)
        if self.gradient_compression is not None:
            # A plan simulates two steps only, which represent all later ones: compression must not start later.
            hook = compression_hook(self.gradient_compression, group=group, from_start=self.context.is_plan)
            transport = HookedAllReduce(group, *hook)
        bucket_groups = {
            param: index
            for index, optimizer in enumerate(optimizers)
            for settings in optimizer.param_groups
            for param in settings["params"]
        }
        return GradientReducer(
            module,
            transport=transport,
            bucket_groups=bucket_groups,
            bucket_size_mb=self.bucket_size_mb,
            first_bucket_size_mb=min(1.0, self.bucket_size_mb),
            overlap=self.overlap,
            # The bucket order is synchronized within one group only, but expert buckets span tensor ranks, which
            # belong to several groups.
            reorder=not narrower or self.context.dims.tensor_parallel == 1,
        )
