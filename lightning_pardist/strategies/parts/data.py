"""The data axis by name, for strategies in which it is one axis among several."""

from __future__ import annotations

from typing import Any, Literal, get_args

from lightning_pardist.strategies.parts.part import DataPart
from lightning_pardist.strategies.parts.replicated import Replicated
from lightning_pardist.strategies.parts.sharded import FullyShardedData
from lightning_pardist.strategies.parts.zero import ZeroSharded
from lightning_pardist.strategies.settings import one_of

DataParallel = Literal["ddp", "zero1", "zero2", "zero3"]


def data_part(data_parallel: DataParallel, **settings: Any) -> DataPart:
    """What serves the data axis.

    Args:
        data_parallel: ``"ddp"`` replicates, ``"zero1"`` shards optimizer state, ``"zero2"`` gradients as well,
            ``"zero3"`` parameters as well.
        **settings: Those of :class:`~lightning_pardist.DDPStrategy`, :class:`~lightning_pardist.ZeroStrategy` or
            :class:`~lightning_pardist.FSDPStrategy`.

    Raises:
        ValueError: If the name is unknown or a setting is not one of the strategy it stands for.
    """
    one_of("data_parallel", data_parallel, get_args(DataParallel))
    try:
        if data_parallel == "ddp":
            return Replicated(**settings)
        if data_parallel == "zero3":
            return FullyShardedData(**settings)
        return ZeroSharded(zero_stage=1 if data_parallel == "zero1" else 2, **settings)
    except TypeError as error:
        raise ValueError(f"data_settings={settings} do not fit data_parallel={data_parallel!r}: {error}.") from None
