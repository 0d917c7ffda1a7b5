"""Construction of the data axis from its name, for strategies with several axes."""

from __future__ import annotations

from typing import Any, Literal, get_args

from lightning_pardist.axes.base import DataParallelAxis
from lightning_pardist.axes.ddp import DDPAxis
from lightning_pardist.axes.fsdp import FSDPAxis
from lightning_pardist.axes.zero import ZeroAxis
from lightning_pardist.settings import one_of

DataParallel = Literal["ddp", "zero1", "zero2", "zero3"]


def data_parallel_axis(data_parallel: DataParallel, **settings: Any) -> DataParallelAxis:
    """Build the data axis of the given name.

    Args:
        data_parallel: ``"ddp"`` replicates, ``"zero1"`` shards optimizer state, ``"zero2"`` gradients as well,
            ``"zero3"`` parameters as well.
        **settings: Settings of :class:`~lightning_pardist.DDPStrategy`, :class:`~lightning_pardist.ZeroStrategy` or
            :class:`~lightning_pardist.FSDPStrategy`, depending on the name.

    Raises:
        ValueError: If the name is unknown, or the data axis has no such setting.
    """
    one_of("data_parallel", data_parallel, get_args(DataParallel))
    try:
        if data_parallel == "ddp":
            return DDPAxis(**settings)
        if data_parallel == "zero3":
            return FSDPAxis(**settings)
        return ZeroAxis(zero_stage=1 if data_parallel == "zero1" else 2, **settings)
    except TypeError as error:
        raise ValueError(f"data_settings={settings} do not fit data_parallel={data_parallel!r}: {error}.") from None
