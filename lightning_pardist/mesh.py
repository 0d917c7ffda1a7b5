"""Degrees of parallelism in, a validated device mesh out."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

#: Mesh axes, outermost first. Ranks of one tensor group are neighbours, so that they stay inside a node.
AXES = ("pipeline_parallel", "data_replicate", "data_shard", "tensor_parallel")
#: The last of them.
TENSOR_AXIS = AXES[-1]
#: Those of them along which ranks see different samples.
DATA_AXES = ("data_replicate", "data_shard")
#: ``data_replicate`` x ``data_shard``: the axis along which ranks see different samples.
DATA_AXIS = "data_parallel"

Degree = int | Literal["auto"]


@dataclass(frozen=True)
class ParallelDims:
    """How many ways each kind of parallelism splits the job; every rank has one coordinate on each axis.

    Attributes:
        pipeline_parallel: Pipeline stages, in ranks.
        data_replicate: Replicas whose gradients are averaged and whose states are whole.
        data_shard: Ranks over which parameters, gradients or optimizer state are sharded (ZeRO, FSDP).
        tensor_parallel: Ranks over which single layers are split.
    """

    pipeline_parallel: int = 1
    data_replicate: int = 1
    data_shard: int = 1
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{field.name}_size={size!r} is not a positive integer. Use 1 to switch the axis off.")

    @classmethod
    def resolve(
        cls,
        world_size: int,
        *,
        pipeline_parallel: Degree = 1,
        data_replicate: Degree = 1,
        data_shard: Degree = 1,
        tensor_parallel: Degree = 1,
    ) -> ParallelDims:
        """Fill in the one degree that is ``"auto"`` and check that the product is the world size.

        Args:
            world_size: Number of ranks of the job.
            pipeline_parallel: Stages, or ``"auto"``: what the other degrees leave.
            data_replicate: Replicas, or ``"auto"``.
            data_shard: Shards, or ``"auto"``.
            tensor_parallel: Tensor ranks, or ``"auto"``.

        Raises:
            ValueError: If two degrees are ``"auto"``, or the product does not equal ``world_size``.
        """
        degrees: dict[str, Degree] = {
            "pipeline_parallel": pipeline_parallel,
            "data_replicate": data_replicate,
            "data_shard": data_shard,
            "tensor_parallel": tensor_parallel,
        }
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

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of all degrees."""
        return self.pipeline_parallel * self.data_replicate * self.data_shard * self.tensor_parallel

    @property
    def data_parallel(self) -> int:
        """Number of ranks that see different samples."""
        return self.data_replicate * self.data_shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """This rank's index on every axis, and on the flattened data axis.

        Args:
            rank: Global rank, ``0 <= rank < world_size``.
        """
        found: dict[str, int] = {}
        rest = rank
        for axis in reversed(AXES):
            rest, found[axis] = divmod(rest, getattr(self, axis))
        found[DATA_AXIS] = found["data_replicate"] * self.data_shard + found["data_shard"]
        return found

    def build(self, device_type: str) -> tuple[DeviceMesh, DeviceMesh]:
        """Make the device mesh with all four axes, and the flattened data axis. Collective over the world.

        Args:
            device_type: ``"cpu"`` or ``"cuda"``.

        Returns:
            The mesh, and its one-dimensional data axis, which the mesh knows by the name ``"data_parallel"``.

        Raises:
            RuntimeError: From torch, if no default process group exists.
        """
        mesh = init_device_mesh(device_type, tuple(getattr(self, axis) for axis in AXES), mesh_dim_names=AXES)
        return mesh, mesh[DATA_AXES]._flatten(DATA_AXIS)

    def describe(self) -> str:
        """The degrees that differ from 1, as ``2 data_replicate x 4 tensor_parallel``."""
        parts = [f"{getattr(self, axis)} {axis}" for axis in AXES if getattr(self, axis) > 1]
        return " x ".join(parts) or "1 process"


def _advice(degrees: dict[str, Any], world_size: int) -> str:
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
