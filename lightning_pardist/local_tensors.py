"""Local shards of tensors that are sharded over mesh axes other than an engine's own.

Under tensor parallelism parameters are DTensors over the tensor ranks. Engines of the data axis connect ranks with the
same tensor shard, so they operate on the local shards and return DTensors to users and optimizers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_pardist.collectives import as_bytes
from lightning_pardist.compat.dtensor import StridedShard, around, local_tensor_of, make_spec, set_local_tensor, spec_of
from lightning_pardist.mesh import EXPERT_AXIS, TENSOR_AXIS


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's local shard, sharing memory; a plain tensor is returned unchanged."""
    return local_tensor_of(tensor) if isinstance(tensor, DTensor) else tensor


def whole_number(value: Any) -> Any:
    """Return what user code logs, a number that it computed from sharded tensors as a plain tensor.

    Collective over the tensor's ranks if the value is a DTensor.
    """
    return value.full_tensor() if isinstance(value, DTensor) else value


def distinct_elements(tensor: Tensor) -> Tensor:
    """Return a view of a tensor in which no element of its memory occurs twice: expanded dims have size 1."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements are one strided block of memory: whether it is not sparse."""
    return local_shard(tensor).layout is torch.strided


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that hold a sparse tensor's indices and values; the tensor itself if it is dense."""
    if is_dense(tensor):
        return [local_shard(tensor)]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.detach().coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    # Of a library (mkldnn).
    return [tensor.to_dense()]


def set_local_shard(tensor: Tensor, part: Tensor) -> None:
    """Replace this rank's local shard of ``tensor`` by ``part``, which has the same shape."""
    if isinstance(tensor, DTensor):
        set_local_tensor(tensor, part)
    else:
        tensor.data = part


def wrap_like(part: Tensor, like: Tensor) -> Tensor:
    """Return ``part`` with the placement of ``like``: wrapped without a copy if that is a DTensor. Not collective."""
    if not isinstance(like, DTensor):
        return part
    # Not from_local(), which would wrap a view of the part, or a copy on the mesh's device if the part is on the host.
    if part.dtype == like.dtype:
        return around(part, spec_of(like))
    return around(part, make_spec(like.device_mesh, like.placements, like.shape, like.stride(), part.dtype))


def tensor_axis(tensor: Tensor) -> int | None:
    """Return the index of the mesh dim over which a layer is split, found by name: tensor or expert ranks.

    None for a plain tensor and for one that is sharded over data axes only.
    """
    names = (tensor.device_mesh.mesh_dim_names if isinstance(tensor, DTensor) else None) or ()
    return next((names.index(axis) for axis in (TENSOR_AXIS, EXPERT_AXIS) if axis in names), None)


def is_over(tensor: Tensor, axis: str) -> bool:
    """Return whether a tensor is a DTensor on a mesh with an axis of this name."""
    return isinstance(tensor, DTensor) and axis in (tensor.device_mesh.mesh_dim_names or ())


def tensor_shard_shape(tensor: Tensor) -> torch.Size:
    """Return the shape of this tensor rank's shard, full along all other axes; a plain tensor's own shape."""
    axis = tensor_axis(tensor)
    shape = list(tensor.shape)
    if axis is not None and isinstance(tensor, DTensor) and not tensor.placements[axis].is_replicate():
        shape[tensor.placements[axis].dim] //= tensor.device_mesh.size(axis)  # type: ignore[attr-defined]
    return torch.Size(shape)


def tensor_shard(whole: Tensor, like: Tensor) -> Tensor:
    """Return this tensor rank's shard of a full plain tensor; a view if the shard is contiguous along the dim.

    Args:
        whole: Tensor of ``like``'s shape.
        like: Tensor with the split over tensor ranks; if it is plain, ``whole`` is returned unchanged.
    """
    axis = tensor_axis(like)
    if axis is None or not isinstance(like, DTensor) or like.placements[axis].is_replicate():
        return whole
    placement: Any = like.placements[axis]
    dim, size = int(placement.dim), like.device_mesh.size(axis)
    runs: Tensor = whole.unflatten(dim, (getattr(placement, "split_factor", 1), -1))
    step = runs.shape[dim + 1] // size
    part: Tensor = runs.narrow(dim + 1, like.device_mesh.get_local_rank(axis) * step, step).flatten(dim, dim + 1)
    return part


def wrap_tensor_shard(part: Tensor, like: Tensor) -> Tensor:
    """Wrap this tensor rank's shard, full along all other axes, as a DTensor over the tensor ranks only.

    Args:
        part: Tensor of shape :func:`tensor_shard_shape`.
        like: Tensor with the split over tensor ranks, and possibly others; if it is plain, ``part`` is returned
            unchanged.
    """
    axis = tensor_axis(like)
    if axis is None or not isinstance(like, DTensor):
        return part
    names = like.device_mesh.mesh_dim_names or ()
    mesh = like.device_mesh if like.device_mesh.ndim == 1 else like.device_mesh[names[axis]]
    return around(part, make_spec(mesh, (like.placements[axis],), like.shape, like.stride(), part.dtype))


def sharded_axes(value: DTensor) -> list[int]:
    """Return the mesh dims, other than the tensor axis, over which a tensor is sharded."""
    axes = enumerate(value.placements)
    return [axis for axis, placement in axes if not placement.is_replicate() and axis != tensor_axis(value)]


def shard_like(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return this rank's local shard of a full tensor under ``like``'s placements, reading only that part of it.

    Args:
        whole: Tensor of the global shape, or this tensor rank's shard of it; may be memory-mapped.
        like: DTensor with the mesh and placements.
    """
    if not isinstance(whole, DTensor) and whole.shape != tensor_shard_shape(like):
        whole = tensor_shard(whole, like)
    sharded = sharded_axes(like)
    if len(sharded) == 1 and isinstance(like.placements[sharded[0]], Shard | StridedShard):
        whole = local_shard(whole)
        dim = like.placements[sharded[0]].dim  # type: ignore[attr-defined]
        piece = -(-whole.size(dim) // like.device_mesh.size(sharded[0]))
        start = min(piece * like.device_mesh.get_local_rank(sharded[0]), whole.size(dim))
        return whole.narrow(dim, start, min(piece, whole.size(dim) - start))
    if not sharded and tensor_axis(like) is not None:
        return local_shard(whole)
    placed = distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return placed.to_local()


def gather_over_data(value: DTensor) -> Tensor:
    """Gather a tensor over its data axes, to a plain tensor or a DTensor over the tensor ranks. Collective over them.

    Avoids ``full_tensor()`` if possible: gloo does not support its collective on GPU tensors and ends the process.
    """
    sharded = sharded_axes(value)
    if len(sharded) != 1 or not isinstance(value.placements[sharded[0]], Shard | StridedShard):
        whole: Tensor = value.full_tensor()
        return whole.detach()
    dim = value.placements[sharded[0]].dim  # type: ignore[attr-defined]
    group = value.device_mesh.get_group(sharded[0])
    local = padded_shard(value, dim, group.size())
    pieces = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather([as_bytes(piece) for piece in pieces], as_bytes(local), group=group)
    return wrap_tensor_shard(
        torch.cat(pieces, dim=dim).narrow(dim, 0, tensor_shard_shape(value)[dim]).contiguous(), value
    )


def gather_whole(value: DTensor) -> Tensor:
    """Gather a tensor over all its axes, without gradients. Collective over its mesh."""
    gathered = gather_over_data(value)
    return gathered.full_tensor() if isinstance(gathered, DTensor) else gathered


def padded_shard(value: DTensor, dim: int, size: int) -> Tensor:
    """Return this rank's shard over ``size`` ranks along ``dim``, contiguous and padded to the first rank's size."""
    local = local_shard(value).detach()
    shape = list(tensor_shard_shape(value))
    shape[dim] = -(-shape[dim] // size)
    if local.size(dim) == shape[dim] and local.is_contiguous():
        return local
    padded = local.new_zeros(shape)
    padded.narrow(dim, 0, local.size(dim)).copy_(local)
    return padded
