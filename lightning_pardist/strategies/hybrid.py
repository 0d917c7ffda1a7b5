"""Data, tensor and pipeline parallelism together, in one mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from typing_extensions import override

from lightning_pardist.mesh import ParallelDims
from lightning_pardist.strategies.base import PardistStrategy
from lightning_pardist.strategies.parts import TensorParallel, data_part
from lightning_pardist.strategies.parts.data import DataParallel
from lightning_pardist.strategies.parts.pipeline import PipelinePart, PipelineSettings

#: Tensor groups talk several times a layer; past this many ranks the parts of a layer get too thin for it.
_LARGEST_TENSOR_GROUP = 8

Size = int | Literal["auto", "machine"]


class HybridStrategy(PardistStrategy):
    """Any product of degrees: layers over pipeline ranks, their insides over tensor ranks, samples over the rest.

    The single-axis strategies are this one with the other degrees at 1. Axes, outermost first: pipeline, data, tensor,
    so that tensor groups, which talk most, are neighbours inside a node.

    Args:
        pipeline_parallel_size: Ranks that the layers are distributed over; ``"auto"`` for what the other degrees leave,
            ``"machine"`` to choose by nodes and devices (see :func:`degrees_of_machine`).
        tensor_parallel_size: Ranks that each layer is split over, or one of the same words.
        data_parallel: What the remaining ranks do, which see different samples: ``"ddp"`` replicates, ``"zero1"``,
            ``"zero2"`` and ``"zero3"`` shard.
        data_shard_size: With ``"zero3"``, ranks over which parameters are sharded; their shards are replicated over the
            rest of the data axis. All of it if None.
        tensor_settings: Further settings of :class:`~lightning_pardist.TensorParallelStrategy`, such as ``plan``.
        pipeline_settings: Further settings of :class:`~lightning_pardist.PipelineStrategy`, such as ``schedule``.
        data_settings: Settings of the data axis' own strategy, such as ``bucket_size_mb``.
        **kwargs: See :class:`~lightning_pardist.strategies.base.PardistStrategy`.

    Raises:
        ValueError: If a setting is out of range, or the degrees do not fit each other or the number of ranks.
    """

    def __init__(
        self,
        *,
        pipeline_parallel_size: Size = 1,
        tensor_parallel_size: Size = 1,
        data_parallel: DataParallel = "ddp",
        data_shard_size: int | None = None,
        tensor_settings: Mapping[str, Any] | None = None,
        pipeline_settings: Mapping[str, Any] | None = None,
        data_settings: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        settings = dict(data_settings or {})
        if data_shard_size is not None:
            if data_parallel != "zero3":
                raise ValueError(
                    f"data_shard_size={data_shard_size} is for data_parallel='zero3', not {data_parallel!r}, which"
                    " uses the whole data axis. Leave it out, or use data_parallel='zero3'."
                )
            settings["data_shard_size"] = data_shard_size
        pipeline = PipelineSettings(pipeline_parallel_size=_open(pipeline_parallel_size), **(pipeline_settings or {}))
        pipeline.check_data(data_parallel, settings)
        self._sizes = {"pipeline_parallel": pipeline_parallel_size, "tensor_parallel": tensor_parallel_size}
        super().__init__(
            data=data_part(data_parallel, **settings),
            tensor=TensorParallel(tensor_parallel_size=_open(tensor_parallel_size), **(tensor_settings or {})),
            pipeline=PipelinePart(pipeline),
            **kwargs,
        )

    @override
    def resolve_dims(self, world_size: int) -> ParallelDims:
        if "machine" not in self._sizes.values():
            return super().resolve_dims(world_size)
        chosen = degrees_of_machine(self.num_nodes, world_size // self.num_nodes)
        sizes = {axis: chosen[axis] if size == "machine" else size for axis, size in self._sizes.items()}
        return ParallelDims.resolve(world_size, **{**self.data.degrees(self.num_processes), **sizes})


def degrees_of_machine(num_nodes: int, ranks_per_node: int) -> dict[str, int]:
    """Tensor groups inside a node, a pipeline across nodes, the rest for the data axis.

    On several nodes a tensor group is a node, up to 8 ranks, and a pipeline has as many stages as the smallest prime
    that divides the number of nodes: 2 where that is even. On one node tensor and pipeline take a factor of 2 each,
    as far as there are factors.

    Args:
        num_nodes: Number of hosts.
        ranks_per_node: Ranks on each of them.

    Returns:
        Sizes of ``tensor_parallel`` and ``pipeline_parallel``.
    """
    if num_nodes > 1:
        fitting = [size for size in range(1, _LARGEST_TENSOR_GROUP + 1) if ranks_per_node % size == 0]
        stages = next(size for size in range(2, num_nodes + 1) if num_nodes % size == 0)
        return {"tensor_parallel": max(fitting), "pipeline_parallel": stages}
    tensor = 2 if ranks_per_node % 2 == 0 else 1
    pipeline = 2 if ranks_per_node % 4 == 0 else 1
    return {"tensor_parallel": tensor, "pipeline_parallel": pipeline}


def _open(size: Size) -> int | Literal["auto"]:
    return "auto" if size == "machine" else size
