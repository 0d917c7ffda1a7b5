"""``DTensor``: its local tensor without a view, its layout as an object, and a layout of torch's own."""

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
    """This rank's own tensor, not a view of it."""
    return tensor._local_tensor


def set_local_tensor(tensor: DTensor, local: Tensor) -> None:
    """Let a tensor of the same shape and dtype be this rank's own."""
    tensor._local_tensor = local


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Mesh, placements, shape and strides in one."""
    return tensor._spec


def around(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A ``DTensor`` around this very tensor. Not collective, nothing is checked."""
    return DTensor(local, spec, requires_grad=False)


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    """A layout.

    Args:
        mesh: Over which ranks.
        placements: One an axis.
        shape: Of the whole.
        stride: Of the whole.
        dtype: Of the whole.
    """
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, dtype))


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes of a mesh as one. Collective over the world the first time.

    Args:
        mesh: Of several axes.
        name: Of the new axis.
    """
    return mesh._flatten(name)
