"""This rank's parts of tensors that are split over other ranks than those an engine works on.

Under tensor parallelism parameters are DTensors over the tensor ranks. Engines of the data axis see ranks that hold the
same part, so they work on the parts as on any tensor, and hand back DTensors where users and optimizers look.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from lightning_pardist.mesh import TENSOR_AXIS


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory; an ordinary tensor is its own part."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def set_own_part(tensor: Tensor, part: Tensor) -> None:
    """Let ``part`` be this rank's memory of ``tensor``. It has the shape of the part before."""
    if isinstance(tensor, DTensor):
        tensor._local_tensor = part
    else:
        tensor.data = part


def wrapped_like(part: Tensor, like: Tensor) -> Tensor:
    """``part`` lying as ``like`` does: as a DTensor around this very tensor if that is one. Not collective."""
    # The constructor, and not from_local(), which would wrap a view of the part.
    return DTensor(part, like._spec, requires_grad=False) if isinstance(like, DTensor) else part


def tensor_axis(tensor: Tensor) -> int | None:
    """The mesh axis of the tensor ranks, by its name; None for an ordinary tensor and one that is sharded alone."""
    names = tensor.device_mesh.mesh_dim_names if isinstance(tensor, DTensor) else None
    return names.index(TENSOR_AXIS) if names is not None and TENSOR_AXIS in names else None


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
    mesh = like.device_mesh if like.device_mesh.ndim == 1 else like.device_mesh[TENSOR_AXIS]
    meta = TensorMeta(like.shape, like.stride(), part.dtype)
    return DTensor(part, DTensorSpec(mesh, (like.placements[axis],), tensor_meta=meta), requires_grad=False)
