"""Sharded parameters that accept ``p.data = ...``."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_pardist.compat.dtensor import local_tensor_of
from lightning_pardist.compat.tensors import disabled_torch_function, version_of
from lightning_pardist.engines.common.meta_init import sync_from_first_rank
from lightning_pardist.local_tensors import local_part, sharded_axes, tensor_axis, whole_over_data

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
        part = local_part(whole_over_data(value) if isinstance(value, DTensor) else value, parameter)
    local_tensor_of(parameter).copy_(part)


class ShardTensor(DTensor):
    """A sharded tensor whose ``data`` may be assigned to, and that is drawn as one process draws it.

    A ``DTensor`` takes ``p.data = value``, and keeps the values that it had: what is assigned is the memory of a
    wrapper that has none. Weight clipping, averaging and ``vector_to_parameters`` would be lost without a word. And on
    CPU each rank draws its own part: all of them the same numbers (``nn.init`` in a hook).
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

    def new_empty(self, *args: Any, **kwargs: Any) -> Tensor:
        """As torch's; what it returns is drawn as one process draws it, too (orthogonal initialization)."""
        made: Tensor = super().new_empty(*args, **kwargs)
        if type(made) is DTensor:
            made.__class__ = ShardTensor
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files know of nothing but torch."""
        return self.detach().__reduce_ex__(protocol)


class ShardParameter(ShardTensor):
    """A sharded parameter.

    Attributes:
        gradient_hooks: Run on the gradient of whoever takes the parameter's place in steps. Where it is None, nobody
            does.
    """

    __slots__ = ()

    gradient_hooks: OrderedDict[int, Callable[[Tensor], Tensor | None]] | None

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """As torch's; under ZeRO-3 the hook gets the gradient of the whole parameter, before ranks average it."""
        hooks = getattr(self, "gradient_hooks", None)
        if hooks is None:
            handle: RemovableHandle = super().register_hook(hook)
            return handle
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A sharded parameter as torch makes it; in the copy of a module a whole one. Collective then.

        Nobody would gather a copy's parameters around its calls.
        """
        if id(self) not in memo:
            in_module = any(isinstance(copied, nn.Module) for copied in memo.values())
            values = _whole(self) if in_module and sharded_axes(self) else self.detach().clone()
            memo[id(self)] = nn.Parameter(values, requires_grad=self.requires_grad)
        copied: Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files know of nothing but torch."""
        return nn.Parameter(self.detach(), requires_grad=self.requires_grad).__reduce_ex__(protocol)


def _whole(parameter: Any) -> Tensor:
    if tensor_axis(parameter) is not None:
        raise RuntimeError(
            f"A module is copied whose parameter of shape {tuple(parameter.shape)} is split over data and tensor ranks"
            " by now, and the copy could not be called. Make the copy in __init__ or configure_model."
        )
    whole = whole_over_data(parameter)
    return whole.clone()


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


def _drawn_whole(name: str) -> Callable[..., Tensor]:
    """A draw in place: each rank draws the whole, as one process does, and keeps its part of the first rank's.

    Collective over the tensor's mesh.
    """
    draw: Callable[..., Tensor] = getattr(DTensor, name)

    @functools.wraps(draw)
    def drawn(self: DTensor, *args: Any, **kwargs: Any) -> Tensor:
        with_graph = torch.is_grad_enabled() and self.requires_grad
        if with_graph or tensor_axis(self) is not None or not sharded_axes(self):
            return draw(self, *args, **kwargs)
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        getattr(whole, name)(*args, **kwargs)
        mesh = self.device_mesh
        sync_from_first_rank([whole], [mesh.get_group(axis) for axis in range(mesh.ndim)])
        assign(self, whole)
        return self

    return drawn


for _name in ("normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_"):
    setattr(ShardTensor, _name, _drawn_whole(_name))

for _name in ("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "contiguous"):
    setattr(ShardTensor, _name, _not_itself(_name))


def make_gradient_settable(gradient: Tensor | None) -> None:
    """Make ``gradient.data = value`` work for a sharded gradient. Ordinary tensors stay as they are."""
    if type(gradient) is DTensor:
        gradient.__class__ = ShardTensor


def make_settable(parameter: Tensor) -> None:
    """Make ``parameter.data = value`` work for a sharded parameter. Ordinary tensors stay as they are.

    Args:
        parameter: Of a module that was sharded, or split over tensor ranks.
    """
    if type(parameter) is DTensor:
        parameter.__class__ = ShardParameter
