"""Hooks of user code on the gradients of parameters that are sharded over tensor ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_pardist.compat.tensors import gradient_hooks_of
from lightning_pardist.engines.tensor.split_tensor import PartedTensor


class _Sharded:
    """A hook that may compute with whole tensors, such as a mask: its result is sharded as the gradient was.

    Args:
        hook: The user's hook.
        close: Returns a split tensor as a DTensor.
    """

    def __init__(self, hook: Callable[[Tensor], Any], close: Callable[[PartedTensor], DTensor]) -> None:
        self._hook, self._close = hook, close

    def __call__(self, grad: Tensor) -> Any:
        result = self._hook(grad)
        if not isinstance(grad, DTensor) or not isinstance(result, Tensor):
            return result
        if isinstance(result, PartedTensor):
            result = self._close(result)
        if not isinstance(result, DTensor):
            return distribute_tensor(result, grad.device_mesh, grad.placements, src_data_rank=None)
        return result if result.placements == grad.placements else result.redistribute(placements=grad.placements)


def shard_results_of_hooks(parameter: DTensor, close: Callable[[PartedTensor], DTensor]) -> None:
    """Let the hooks of a parameter return whole or split tensors. Not collective; hooks may be if they gather."""
    hooks = gradient_hooks_of(parameter)
    for handle, hook in hooks.items():
        if not isinstance(hook, _Sharded):
            hooks[handle] = _Sharded(hook, close)
