"""Local parts of tensors that are sharded over mesh axes other than an engine's own.

Under tensor parallelism parameters are DTensors over the tensor ranks. Engines of the data axis see ranks that hold the
same part, so they work on the parts as on any tensor, and hand back DTensors where users and optimizers look.
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


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory; an ordinary tensor is its own part."""
    return local_tensor_of(tensor) if isinstance(tensor, DTensor) else tensor


def set_own_part(tensor: Tensor, part: Tensor) -> None:
    """Let ``part`` be this rank's memory of ``tensor``. It has the shape of the part before."""
    if isinstance(tensor, DTensor):
        set_local_tensor(tensor, part)
    else:
        tensor.data = part


def wrapped_like(part: Tensor, like: Tensor) -> Tensor:
    """``part`` lying as ``like`` does: as a DTensor around this very tensor if that is one. Not collective."""
    if not isinstance(like, DTensor):
        return part
    # Not from_local(), which would wrap a view of the part, or a copy on the mesh's device if the part is on the host.
    if part.dtype == like.dtype:
        return around(part, spec_of(like))
    return around(part, make_spec(like.device_mesh, like.placements, like.shape, like.stride(), part.dtype))


def tensor_axis(tensor: Tensor) -> int | None:
    """The mesh axis of ranks that hold parts of a layer, by its name: tensor ranks, or expert ranks.

    None for an ordinary tensor and one that is sharded alone.
    """
    names = (tensor.device_mesh.mesh_dim_names if isinstance(tensor, DTensor) else None) or ()
    return next((names.index(axis) for axis in (TENSOR_AXIS, EXPERT_AXIS) if axis in names), None)


def is_over(tensor: Tensor, axis: str) -> bool:
    """Whether a tensor lies on a mesh that has an axis of this name."""
    return isinstance(tensor, DTensor) and axis in (tensor.device_mesh.mesh_dim_names or ())


def own_shape(tensor: Tensor) -> torch.Size:
    """Shape of this tensor rank's part, were it whole along all other axes; of an ordinary tensor its shape."""
    axis = tensor_axis(tensor)
    shape = list(tensor.shape)
    if axis is not None and isinstance(tensor, DTensor) and not tensor.placements[axis].is_replicate():
        shape[tensor.placements[axis].dim] //= tensor.device_mesh.size(axis)  # type: ignore[attr-defined]
    return torch.Size(shape)


def tensor_part(whole: Tensor, like: Tensor) -> Tensor:
    """This tensor rank's part of an ordinary whole tensor; a view where it is one piece.

    Args:
        whole: Of ``like``'s shape.
        like: How it is split over the tensor ranks; an ordinary tensor leaves ``whole`` as it is.
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


def over_tensor_ranks(part: Tensor, like: Tensor) -> Tensor:
    """This tensor rank's part, whole along all other axes, as a DTensor over the tensor ranks alone.

    Args:
        part: Of shape :func:`own_shape`.
        like: How the whole is split over the tensor ranks, and maybe over others; an ordinary tensor leaves ``part``
            as it is.
    """
    axis = tensor_axis(like)
    if axis is None or not isinstance(like, DTensor):
        return part
    names = like.device_mesh.mesh_dim_names or ()
    mesh = like.device_mesh if like.device_mesh.ndim == 1 else like.device_mesh[names[axis]]
    return around(part, make_spec(mesh, (like.placements[axis],), like.shape, like.stride(), part.dtype))


def sharded_axes(value: DTensor) -> list[int]:
    """Data axes over which a tensor is sharded."""
    axes = enumerate(value.placements)
    return [axis for axis, placement in axes if not placement.is_replicate() and axis != tensor_axis(value)]


def local_part(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """The part of a whole tensor that this rank holds of ``like``; reads no more of ``whole`` than that.

    Args:
        whole: Global shape, or this tensor rank's part of it; may be memory-mapped.
        like: Whose mesh and placements count.
    """
    if not isinstance(whole, DTensor) and whole.shape != own_shape(like):
        whole = tensor_part(whole, like)
    sharded = sharded_axes(like)
    if len(sharded) == 1 and isinstance(like.placements[sharded[0]], Shard | StridedShard):
        whole = own_part(whole)
        dim = like.placements[sharded[0]].dim  # type: ignore[attr-defined]
        piece = -(-whole.size(dim) // like.device_mesh.size(sharded[0]))
        start = min(piece * like.device_mesh.get_local_rank(sharded[0]), whole.size(dim))
        return whole.narrow(dim, start, min(piece, whole.size(dim) - start))
    if not sharded and tensor_axis(like) is not None:
        return own_part(whole)
    placed = distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return placed.to_local()


def whole_over_data(value: DTensor) -> Tensor:
    """The whole tensor on every rank, or this tensor rank's part of it as a DTensor. Collective over its data axes.

    Not ``full_tensor()`` where that can be: gloo has no such collective of a GPU's tensors, and ends the process.
    """
    sharded = sharded_axes(value)
    if len(sharded) != 1 or not isinstance(value.placements[sharded[0]], Shard | StridedShard):
        whole: Tensor = value.full_tensor()
        return whole.detach()
    dim = value.placements[sharded[0]].dim  # type: ignore[attr-defined]
    group = value.device_mesh.get_group(sharded[0])
    local = padded_part(value, dim, group.size())
    pieces = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather([as_bytes(piece) for piece in pieces], as_bytes(local), group=group)
    return over_tensor_ranks(torch.cat(pieces, dim=dim).narrow(dim, 0, own_shape(value)[dim]).contiguous(), value)


def padded_part(value: DTensor, dim: int, size: int) -> Tensor:
    """This rank's shard over ``size`` ranks along ``dim``, contiguous and as long as that of the first rank."""
    local = own_part(value).detach()
    shape = list(own_shape(value))
    shape[dim] = -(-shape[dim] // size)
    if local.size(dim) == shape[dim] and local.is_contiguous():
        return local
    padded = local.new_zeros(shape)
    padded.narrow(dim, 0, local.size(dim)).copy_(local)
    return padded
