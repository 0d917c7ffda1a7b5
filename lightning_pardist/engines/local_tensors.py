"""This rank's parts of tensors that are split over other ranks than those an engine works on.

Under tensor parallelism parameters are DTensors over the tensor ranks. Engines of the data axis see ranks that hold the
same part, so they work on the parts as on any tensor, and hand back DTensors where users and optimizers look.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


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
