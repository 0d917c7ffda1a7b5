"""Strategy for any product of data, tensor, context and pipeline parallelism, with experts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from lightning_pardist.axes.base import ParallelAxis
from lightning_pardist.axes.by_name import DataParallel, data_parallel_axis
from lightning_pardist.axes.context import ContextAxis
from lightning_pardist.axes.expert import ExpertAxis
from lightning_pardist.axes.local_sgd import LocalSGDAxis, OuterSize, SyncEvery
from lightning_pardist.axes.pipeline import PipelineAxis, PipelineSettings
from lightning_pardist.axes.tensor import TensorAxis
from lightning_pardist.foreign_settings import refuse_unknown_inside
from lightning_pardist.strategies.strategy import PardistStrategy

Size = int | Literal["auto", "machine"]


class HybridStrategy(PardistStrategy):
    """Hybrid (3D): any product of pipeline, tensor, context and data parallelism, with experts.

    Equivalent to a single-axis strategy if all other degrees are 1. Axes, outermost first: pipeline, data, tensor.
    Tensor groups communicate most and therefore consist of neighbouring ranks inside a node.

    Args:
        pipeline_parallel_size: Number of ranks that the layers are distributed over; ``"auto"`` for the ranks that the
            other degrees leave, ``"machine"`` to choose by nodes and devices (see
            :func:`~lightning_pardist.mesh.degrees_of_machine`).
        tensor_parallel_size: Number of ranks that each layer is split over, ``"auto"`` or ``"machine"``.
        context_parallel_size: Number of ranks that the sequence of each batch is split over, or ``"auto"``.
        expert_parallel_size: Number of ranks that the experts of each layer are distributed over, or ``"auto"``. They
            are context ranks, whose number divides it, and data ranks.
        data_parallel: Kind of data parallelism over the remaining ranks, which get different samples: ``"ddp"``
            replicates, ``"zero1"``, ``"zero2"`` and ``"zero3"`` shard.
        data_shard_size: With ``"zero3"``, number of ranks that parameters are sharded over; the shards are replicated
            over the rest of the data axis. None for the whole data axis.
        tensor_settings: Further settings of :class:`~lightning_pardist.TensorParallelStrategy`, such as ``plan``.
        context_settings: Further settings of :class:`~lightning_pardist.ContextParallelStrategy`: ``sequence_dim``.
        expert_settings: Further settings of :class:`~lightning_pardist.ExpertParallelStrategy`: ``experts``,
            ``expert_dispatch`` and ``log_expert_load``.
        pipeline_settings: Further settings of :class:`~lightning_pardist.PipelineStrategy`, such as ``schedule``.
        data_settings: Settings of the data-parallel strategy, such as ``bucket_size_mb``.
        outer_parallel_size: Number of islands (groups of ranks), each of which trains independently with the settings
            above and averages its parameters with the others every ``sync_every`` steps: a number, or ``"node"`` for
            one per host; see :class:`~lightning_pardist.LocalSGDStrategy`.
        sync_every: Optimizer steps between two averages; ``"epoch"`` averages at the end of each epoch. 32 if None.
        outer_settings: Further settings of :class:`~lightning_pardist.LocalSGDStrategy`, such as ``outer_momentum``.
        outer: Outermost axis to use in place of one that is created from the outer settings.
        **kwargs: See :class:`~lightning_pardist.strategies.strategy.PardistStrategy`.

    Raises:
        ValueError: If a setting is out of range, or the degrees do not fit each other or the number of ranks.
    """

    settings_inside: ClassVar[Mapping[str, Callable[..., Any]]] = {
        "tensor_settings": TensorAxis,
        "context_settings": ContextAxis,
        "expert_settings": ExpertAxis,
        "pipeline_settings": PipelineSettings,
        "outer_settings": LocalSGDAxis,
    }

    def __init__(
        self,
        *,
        pipeline_parallel_size: Size = 1,
        tensor_parallel_size: Size = 1,
        context_parallel_size: int | Literal["auto"] = 1,
        expert_parallel_size: int | Literal["auto"] = 1,
        data_parallel: DataParallel = "ddp",
        data_shard_size: int | None = None,
        tensor_settings: Mapping[str, Any] | None = None,
        context_settings: Mapping[str, Any] | None = None,
        expert_settings: Mapping[str, Any] | None = None,
        pipeline_settings: Mapping[str, Any] | None = None,
        data_settings: Mapping[str, Any] | None = None,
        outer_parallel_size: OuterSize = 1,
        sync_every: SyncEvery | None = None,
        outer_settings: Mapping[str, Any] | None = None,
        outer: ParallelAxis | None = None,
        **kwargs: Any,
    ) -> None:
        given = {
            "tensor_settings": tensor_settings,
            "context_settings": context_settings,
            "expert_settings": expert_settings,
            "pipeline_settings": pipeline_settings,
        }
        for place, values in given.items():
            refuse_unknown_inside(place, values or {}, self.settings_inside[place], beside=HybridStrategy.__init__)
        settings = dict(data_settings or {})
        if data_shard_size is not None:
            if data_parallel != "zero3":
                raise ValueError(
                    f"data_shard_size={data_shard_size} is for data_parallel='zero3', but {data_parallel!r} uses the"
                    " whole data axis. Leave it out, or set data_parallel='zero3'."
                )
            settings["data_shard_size"] = data_shard_size
        if outer is None:
            outer = _outer_axis(outer_parallel_size, sync_every, outer_settings)
        elif outer_settings:
            raise ValueError(
                f"outer_settings={dict(outer_settings)} can be passed to HybridStrategy only. Pass them to"
                f" {type(self).__name__} as separate arguments."
            )
        pipeline = PipelineSettings(pipeline_parallel_size=pipeline_parallel_size, **(pipeline_settings or {}))
        pipeline.check_data(data_parallel, settings)
        super().__init__(
            axes=[
                TensorAxis(tensor_parallel_size=tensor_parallel_size, **(tensor_settings or {})),
                PipelineAxis(pipeline),
                ContextAxis(context_parallel_size=context_parallel_size, **(context_settings or {})),
                ExpertAxis(expert_parallel_size=expert_parallel_size, **(expert_settings or {})),
                data_parallel_axis(data_parallel, **settings),
                *([] if outer is None else [outer]),
            ],
            **kwargs,
        )


def _outer_axis(
    size: OuterSize, sync_every: SyncEvery | None, settings: Mapping[str, Any] | None
) -> LocalSGDAxis | None:
    """Return the local-SGD axis for a number of islands; None for one island.

    Raises:
        ValueError: If there are settings for islands but only one island, or a setting is unknown.
    """
    if size == 1:
        if settings or sync_every is not None:
            what = f"outer_settings={dict(settings)} are" if settings else f"sync_every={sync_every!r} is"
            raise ValueError(
                f"{what} for islands, but outer_parallel_size=1. Set outer_parallel_size to the number of islands."
            )
        return None
    known = set(inspect.signature(LocalSGDAxis.__init__).parameters) - {"self", "outer_parallel_size", "sync_every"}
    unknown = sorted(set(settings or {}) - known)
    if unknown:
        raise ValueError(
            f"outer_settings={dict(settings or {})}: {', '.join(unknown)} is unknown. Use"
            f" {', '.join(sorted(known))}. HybridStrategy takes the number of islands and the steps between averages"
            " as outer_parallel_size and sync_every."
        )
    return LocalSGDAxis(
        outer_parallel_size=size, sync_every=32 if sync_every is None else sync_every, **(settings or {})
    )
