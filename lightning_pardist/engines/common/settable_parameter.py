"""Sharded parameters that accept ``p.data = ...``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pardist.compat.dtensor import local_tensor_of
from lightning_pardist.compat.tensors import disabled_torch_function, version_of
from lightning_pardist.local_tensors import local_part

#: How often ``.data`` of any sharded parameter was asked for: what is done to it leaves no other trace.
_looks = 0


def changes_of(parameters: Iterable[Tensor]) -> tuple[int, ...]:
    """Differs from what it was before if somebody may have changed the values meanwhile; the same on all ranks.

    Args:
        parameters: Sharded ones.
    """
    return (_looks, *(version_of(parameter) for parameter in parameters))


@torch.no_grad()
def assign(parameter: DTensor, value: Tensor) -> None:
    """Assign new values to a sharded parameter. Collective if ``value`` is sharded in another way.

    Args:
        parameter: Keeps its memory.
        value: Whole, or split itself; of the parameter's shape.
    """
    if isinstance(value, DTensor) and value.placements == parameter.placements:
        part = value.to_local()
    else:
        part = local_part(value.full_tensor() if isinstance(value, DTensor) else value, parameter)
    local_tensor_of(parameter).copy_(part)


class ShardParameter(DTensor):
    """A sharded parameter whose ``data`` may be assigned to.

    A ``DTensor`` takes ``p.data = value``, and keeps the values that it had: what is assigned is the memory of a
    wrapper that has none. Weight clipping, averaging and ``vector_to_parameters`` would be lost without a word.
    """

    __slots__ = ()

    @property
    def data(self) -> Tensor:
        """The parameter without its history, as a ``DTensor``."""
        global _looks
        _looks += 1
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        global _looks
        _looks += 1
        if value.shape != self.shape:
            raise ValueError(
                f"A tensor of shape {tuple(value.shape)} was assigned to .data of a sharded parameter of shape"
                f" {tuple(self.shape)}. Parameters of which ranks hold parts keep their shapes during a run."
            )
        if type(value).__torch_function__ not in (
            torch.Tensor.__torch_function__,
            disabled_torch_function,
        ):
            # A tensor of another engine's knows itself what to do.
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
            return
        assign(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A sharded parameter as torch makes it."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        copied: Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files know of nothing but torch."""
        return nn.Parameter(self.detach(), requires_grad=self.requires_grad).__reduce_ex__(protocol)


def _not_itself(name: str) -> Callable[..., Tensor]:
    """A conversion of torch that, where there is nothing to convert, returns an ordinary ``DTensor``.

    ``Module.cpu()`` and its like make parameters of what comes back, which torch does not allow with a class like this.
    """
    convert: Callable[..., Tensor] = getattr(DTensor, name)

    @functools.wraps(convert)
    def converted(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = convert(self, *args, **kwargs)
        return self.detach() if result is self and not torch.is_grad_enabled() else result

    return converted


for _name in ("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "contiguous"):
    setattr(ShardParameter, _name, _not_itself(_name))


def make_settable(parameter: Tensor) -> None:
    """Make ``parameter.data = value`` work for a sharded parameter. Ordinary tensors stay as they are.

    Args:
        parameter: Of a module that was sharded, or split over tensor ranks.
    """
    if type(parameter) is DTensor:
        parameter.__class__ = ShardParameter
