"""``DTensor``: its local tensor without a view, its layout as an object, and a private placement of torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_pardist.compat.contract import Private

NAMES = (
    Private("torch.distributed.tensor.DTensor._local_tensor", "engines that work on this rank's own tensor",
            "to_local(), which returns a view where gradients are on"),
    Private("torch.distributed.tensor.DTensor._spec", "wrapping a tensor as another one is, without a view",
            "DTensor.from_local(), which wraps a view"),
    Private("torch.distributed.tensor._dtensor_spec.DTensorSpec", "parameters over tensor ranks alone",
            "DTensor.from_local()"),
    Private("torch.distributed.tensor._dtensor_spec.TensorMeta", "parameters over tensor ranks alone",
            "DTensor.from_local()"),
    Private("torch.distributed.tensor.placement_types._StridedShard", "shards of what is split over tensor ranks",
            "take the layout that fully_shard gives such parameters"),
    Private("torch.distributed.device_mesh.DeviceMesh._flatten", "one group over the replicate and shard axes",
            "dist.new_group over the same ranks"),
)  # fmt: skip

StridedShard = _StridedShard


def local_tensor_of(tensor: DTensor) -> Tensor:
    """Return this rank's local tensor itself, not a view of it."""
    return tensor._local_tensor


def set_local_tensor(tensor: DTensor, local: Tensor) -> None:
    """Replace this rank's local tensor by one of the same shape and dtype."""
    tensor._local_tensor = local


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Return the spec of a ``DTensor``: mesh, placements, shape and strides."""
    return tensor._spec


def around(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Return a ``DTensor`` around exactly this local tensor. Not collective; nothing is checked."""
    return DTensor(local, spec, requires_grad=False)


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    """Return a ``DTensor`` spec.

    Args:
        mesh: Device mesh.
        placements: One per mesh axis.
        shape: Global shape.
        stride: Global strides.
        dtype: Dtype of the tensor.
    """
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, dtype))


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return all axes of a mesh flattened into one. Collective over the world the first time.

    Args:
        mesh: A mesh of several axes.
        name: Name of the flattened axis.
    """
    return mesh._flatten(name)
