"""Degrees of parallelism and the device meshes derived from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any, Literal

from torch.distributed import ProcessGroup, new_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_pardist.compat.dtensor import flatten_mesh

#: Mesh axes, outermost first. The tensor axis is innermost: ranks of a tensor group are adjacent, inside a node.
AXES = (
    "outer_parallel",
    "pipeline_parallel",
    "data_replicate",
    "data_shard",
    "expert_parallel",
    "context_parallel",
    "tensor_parallel",
)
PIPELINE_AXIS, TENSOR_AXIS = AXES[1], AXES[-1]
CONTEXT_AXIS = "context_parallel"
#: Axes over which experts are distributed: ranks with different samples, and with different parts of a sequence.
EXPERT_AXES = ("expert_parallel", CONTEXT_AXIS)
#: Name of the flattened expert axes in :attr:`JobMeshes.experts`.
EXPERT_AXIS = "experts"
#: Axes along which ranks get different samples.
BATCH_AXES = ("outer_parallel", "data_replicate", "data_shard", "expert_parallel")
#: Axes over which gradients are averaged in every step.
GRADIENT_AXES = ("data_replicate", "data_shard", "expert_parallel", "context_parallel")
#: Axes over which expert gradients are averaged: their ranks hold the same experts. Tensor ranks hold replicas of
#: experts whose gradients no tensor-parallel layer reduces.
EXPERT_GRADIENT_AXES = ("data_replicate", "data_shard", "tensor_parallel")
#: Axes over which parameters, gradients or optimizer state are sharded.
SHARD_AXES = ("data_shard", "expert_parallel", "context_parallel")
#: Axes that get the ranks that the other axes leave.
REST_AXES = ("data_replicate", "data_shard")
#: Axes along which ranks get different samples of one model, and the name of their flattened mesh, which modules
#: written for Lightning's ``ModelParallelStrategy`` use.
DATA_AXES = ("data_replicate", "data_shard", "expert_parallel")
DATA_AXIS = "data_parallel"
#: Axes that every device mesh has, even of size 1; the others exist only if their size is above 1.
_ALWAYS = ("pipeline_parallel", "data_replicate", "data_shard", "tensor_parallel")
#: Order of axis sizes in checkpoints written before version 0.1.0.
_UNNAMED = _ALWAYS
#: Tensor groups communicate several times per layer; with more ranks the shards of a layer become too small for it.
_LARGEST_TENSOR_GROUP = 8

Degree = int | Literal["auto"]


@dataclass(frozen=True)
class JobMeshes:
    """Device mesh of a job, and its submeshes by purpose.

    Attributes:
        all: Mesh with every axis by name.
        batch: Ranks that get different samples.
        gradients: Ranks whose gradients are averaged in every step. The same mesh as ``batch`` if neither an outer nor
            a context axis is in use.
        data: Ranks that get different samples and average their gradients in every step.
        shard: Ranks over which states are sharded; two-dimensional with ``data_replicate`` first if that is in use.
    """

    all: DeviceMesh
    batch: DeviceMesh
    gradients: DeviceMesh
    data: DeviceMesh
    shard: DeviceMesh
    _over: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict)
    _messages: list[ProcessGroup] = field(default_factory=list)

    def over(self, axes: Sequence[str]) -> ProcessGroup:
        """Return this rank's process group over some axes together. Collective over the world on the first call.

        Args:
            axes: Names of axes; axes that the mesh does not have count as of size 1.
        """
        names = self.all.mesh_dim_names or ()
        there = tuple(name for name in names if name in axes)
        wide = tuple(name for name in there if self.all[name].size() > 1) or there[:1]
        if len(wide) == 1:
            return self.all[wide[0]].get_group()
        if wide not in self._over:
            self._over[wide] = flatten_mesh(self.all[wide], "_".join(wide))
        return self._over[wide].get_group()

    @property
    def experts(self) -> DeviceMesh:
        """Mesh of this rank and those that hold other experts. Collective over the world on the first access."""
        if EXPERT_AXES not in self._over:
            there = tuple(name for name in self.all.mesh_dim_names or () if name in EXPERT_AXES)
            self._over[EXPERT_AXES] = flatten_mesh(self.all[there], EXPERT_AXIS)
        return self._over[EXPERT_AXES]

    def sharded_experts(self, axes: Sequence[str]) -> DeviceMesh:
        """Return the mesh of ``axes``, whose ranks hold the same experts, and :attr:`experts`. Collective as that."""
        experts = self.experts
        names = (*axes, EXPERT_AXIS)
        return self.all[names] if axes else experts

    def messages(self, timeout: timedelta) -> ProcessGroup:
        """Return a gloo group of all ranks for messages between threads. Collective over the world on the first call.

        A separate group keeps these messages apart from other collectives; tags distinguish them from each other.

        Args:
            timeout: Timeout of messages for which no other one applies.
        """
        if not self._messages:
            self._messages.append(new_group(backend="gloo", timeout=timeout))
        return self._messages[0]


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of parallelism of a job; every rank has one coordinate on each axis.

    Attributes:
        outer_parallel: Islands, which average their parameters every few steps.
        pipeline_parallel: Ranks of a pipeline.
        data_replicate: Replicas whose gradients are averaged and whose states are not sharded.
        data_shard: Ranks over which parameters, gradients or optimizer state are sharded (ZeRO, FSDP).
        expert_parallel: Ranks that each hold some of the experts of every layer, and get different samples. If experts
            are in use, they are distributed over the context ranks as well.
        context_parallel: Ranks that split the sequence of one batch.
        tensor_parallel: Ranks over which single layers are split.
    """

    outer_parallel: int = 1
    pipeline_parallel: int = 1
    data_replicate: int = 1
    data_shard: int = 1
    expert_parallel: int = 1
    context_parallel: int = 1
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        for axis in fields(self):
            size = getattr(self, axis.name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{axis.name}_size={size!r} is not a positive integer. Use 1 to switch the axis off.")

    @classmethod
    def resolve(cls, world_size: int, **degrees: Degree) -> ParallelDims:
        """Fill in the one degree that is ``"auto"`` and check that the product is the world size.

        Args:
            world_size: Number of ranks of the job.
            **degrees: Sizes of axes by name, 1 for those left out; one may be ``"auto"`` for the remaining ranks.

        Raises:
            TypeError: If an axis name is unknown.
            ValueError: If two degrees are ``"auto"``, or the product does not equal ``world_size``.
        """
        degrees = {axis: degrees[axis] for axis in AXES if axis in degrees} | degrees
        open_axes = [axis for axis, size in degrees.items() if size == "auto"]
        fixed = cls(**{axis: 1 if size == "auto" else size for axis, size in degrees.items()})
        if len(open_axes) > 1:
            raise ValueError(
                f"{' and '.join(f'{axis}_size' for axis in open_axes)} are both 'auto'. Set all but one of them."
            )
        set_degrees = ", ".join(f"{axis}_size={size}" for axis, size in degrees.items() if size not in (1, "auto"))
        if open_axes:
            if world_size % fixed.world_size:
                raise ValueError(
                    f"{set_degrees} does not divide world_size={world_size}. {_advice(degrees, world_size)}"
                )
            return replace(fixed, **{open_axes[0]: world_size // fixed.world_size})
        if fixed.world_size != world_size:
            raise ValueError(
                f"{set_degrees or 'All degrees 1'} makes {fixed.world_size} ranks, but world_size={world_size}."
                f" Start {fixed.world_size} processes (devices x num_nodes) or set one degree to 'auto'."
            )
        return fixed

    @classmethod
    def from_layout(cls, layout: Mapping[str, int] | list[int]) -> ParallelDims:
        """Return the degrees of a checkpoint's :attr:`layout`; versions before 0.1.0 stored a list.

        Raises:
            ValueError: If the checkpoint names an axis that this version does not have.
        """
        named = dict(zip(_UNNAMED, layout, strict=True)) if isinstance(layout, list) else dict(layout)
        if unknown := sorted(set(named) - set(AXES)):
            raise ValueError(
                f"The checkpoint was saved with the axes {', '.join(unknown)}, which this version of"
                " lightning_pardist does not have. Update lightning_pardist."
            )
        return cls(**named)

    @property
    def layout(self) -> dict[str, int]:
        """Sizes by axis as stored in checkpoints, without axes of size 1."""
        return {axis: size for axis in AXES if (size := self.size(axis)) > 1}

    def size(self, *axes: str) -> int:
        """Return the number of ranks along some axes together."""
        total = 1
        for axis in axes:
            total *= int(getattr(self, axis))
        return total

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of all degrees."""
        return self.size(*AXES)

    @property
    def batch_size(self) -> int:
        """Number of ranks that get different samples."""
        return self.size(*BATCH_AXES)

    @property
    def data_parallel(self) -> int:
        """Number of ranks that get different samples and average their gradients in every step."""
        return self.size(*DATA_AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate on every axis.

        Args:
            rank: Global rank, ``0 <= rank < world_size``.
        """
        found: dict[str, int] = {}
        rest = rank
        for axis in reversed(AXES):
            rest, found[axis] = divmod(rest, self.size(axis))
        return found

    def first_ranks_along(self, *axes: str) -> tuple[int, ...]:
        """Return the ranks along some axes whose coordinate on every other axis is 0."""
        others = [axis for axis in AXES if axis not in axes]
        places = ((rank, self.coordinates(rank)) for rank in range(self.world_size))
        return tuple(rank for rank, place in places if not any(place[axis] for axis in others))

    def batch_rank(self, rank: int) -> int:
        """Return a rank's index among those that get different samples, ``0 <= index < batch_size``."""
        return self._index(self.coordinates(rank), BATCH_AXES)

    def first_rank_of(self, batch_rank: int) -> int:
        """Return the first of the ranks that get the samples of one batch rank."""
        at: dict[str, int] = {}
        for axis in reversed(BATCH_AXES):
            batch_rank, at[axis] = divmod(batch_rank, self.size(axis))
        return self._index(at, AXES)

    def _index(self, at: Mapping[str, int], axes: tuple[str, ...]) -> int:
        index = 0
        for axis in axes:
            index = index * self.size(axis) + at.get(axis, 0)
        return index

    def build(self, device_type: str) -> JobMeshes:
        """Build the device mesh and its submeshes by purpose. Collective over the world.

        Args:
            device_type: Type of a :class:`torch.device`, for example ``"cuda"``.

        Raises:
            RuntimeError: From torch, if no default process group exists.
        """
        names = tuple(axis for axis in AXES if axis in _ALWAYS or self.size(axis) > 1)
        mesh = init_device_mesh(device_type, tuple(self.size(axis) for axis in names), mesh_dim_names=names)
        data_axes = tuple(axis for axis in DATA_AXES if axis in names)
        data = flatten_mesh(mesh[data_axes], DATA_AXIS)

        def view(axes: tuple[str, ...], name: str) -> DeviceMesh:
            there = tuple(axis for axis in axes if axis in names)
            return data if there == data_axes else flatten_mesh(mesh[there], name)

        shard_axes = tuple(axis for axis in SHARD_AXES if axis in names)
        shards = flatten_mesh(mesh[shard_axes], "shard") if len(shard_axes) > 1 else mesh["data_shard"]
        if self.data_replicate > 1:
            shards = mesh["data_replicate", "shard" if len(shard_axes) > 1 else "data_shard"]
        return JobMeshes(mesh, view(BATCH_AXES, "batch"), view(GRADIENT_AXES, "gradients"), data, shards)

    def describe(self) -> str:
        """Return the degrees above 1, formatted as ``2 data_replicate x 4 tensor_parallel``."""
        return " x ".join(f"{size} {axis}" for axis, size in self.layout.items()) or "1 process"


def experts_beside_context(degrees: Mapping[str, Degree]) -> dict[str, Degree]:
    """Convert an ``expert_parallel`` degree that includes the context ranks to the size of the mesh axis, without them.

    Raises:
        ValueError: If the degree is not divisible by the number of context ranks.
    """
    experts, context = degrees.get("expert_parallel", 1), degrees.get(CONTEXT_AXIS, 1)
    if isinstance(experts, str) or experts == 1 or context == 1:
        return dict(degrees)
    if isinstance(context, str) or experts % context:
        if isinstance(context, str):
            fix = f"context_parallel_size to a divisor of {experts}"
        else:
            fix = f"expert_parallel_size to {context}, {2 * context} or 'auto'"
        raise ValueError(
            f"expert_parallel_size={experts} with context_parallel_size={context!r}: experts are divided over the"
            " context ranks as well, so expert_parallel_size must be a multiple of context_parallel_size. Set"
            f" {fix}."
        )
    return {**degrees, "expert_parallel": experts // context}


def degrees_of_machine(num_nodes: int, ranks_per_node: int) -> dict[str, int]:
    """Choose degrees by machine: tensor groups inside a node, a pipeline across nodes, data parallelism over the rest.

    On several nodes a tensor group spans the largest divisor of a node's ranks up to 8, and the pipeline degree is the
    smallest prime factor of the number of nodes: 2 if that is even. On one node, tensor and then pipeline parallelism
    get a factor of 2 each if the number of ranks has it.

    Args:
        num_nodes: Number of hosts.
        ranks_per_node: Ranks on each host.

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


def _advice(degrees: Mapping[str, Any], world_size: int) -> str:
    fixed = [axis for axis, size in degrees.items() if size not in (1, "auto")]
    if len(fixed) > 1:
        return f"Make the product of {', '.join(fixed)} one of {_either(_divisors(world_size))}."
    return f"Use {_either(_divisors(world_size))}."


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _either(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
