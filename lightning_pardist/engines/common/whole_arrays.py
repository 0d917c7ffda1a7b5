"""Arrays and lists of tensors of which ranks hold parts, for code outside of steps."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_pardist.local_tensors import gather_whole

#: Methods that torch refuses for ``DTensor``.
_READING = frozenset({torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__})


class WholeArrays(TorchFunctionMode):
    """Makes ``numpy()`` and ``tolist()`` of a ``DTensor`` those of the whole tensor. Collective over its mesh."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READING and isinstance(args[0], DTensor):
            args = (gather_whole(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))
