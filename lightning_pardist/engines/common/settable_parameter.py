"""Sharded parameters that support ``p.data = ...``."""

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
from lightning_pardist.local_tensors import gather_over_data, shard_like, sharded_axes, tensor_axis

#: Number of accesses to ``.data`` of any sharded tensor: writes through it leave no other trace.
_looks = 0


def changes_of(parameters: Iterable[Tensor]) -> tuple[int, ...]:
    """Return a key that changes whenever the values of parameters may have been changed; the same on all ranks.

    Args:
        parameters: Sharded parameters.
    """
    return (_looks, *(version_of(parameter) for parameter in parameters))


@torch.no_grad()
def assign(parameter: DTensor, value: Tensor) -> None:
    """Copy new values into a sharded parameter. Collective if ``value`` is sharded with other placements.

    Args:
        parameter: The parameter; it keeps its memory.
        value: A plain tensor or a DTensor of the parameter's global shape.
    """
    if isinstance(value, DTensor) and value.placements == parameter.placements:
        part = value.to_local()
    else:
        part = shard_like(gather_over_data(value) if isinstance(value, DTensor) else value, parameter)
    local_tensor_of(parameter).copy_(part)


class ShardTensor(DTensor):
    """A sharded tensor that supports ``t.data = ...``, and random initialization equal to that of a single process.

    A ``DTensor`` accepts ``p.data = value`` but keeps its values: the assignment sets the memory of the wrapper, which
    has none. Weight clipping, averaging and ``vector_to_parameters`` would silently have no effect. On CPU, each rank
    of a ``DTensor`` would also draw the same numbers for its shard (``nn.init`` in a hook).
    """

    __slots__ = ()

    @property
    def data(self) -> Tensor:
        """The tensor without its autograd history, as a ``DTensor``."""
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
                f" {tuple(self.shape)}. The shape of a sharded parameter cannot change during a run."
            )
        if type(value).__torch_function__ not in (
            torch.Tensor.__torch_function__,
            disabled_torch_function,
        ):
            # A tensor subclass of another engine implements the assignment itself.
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
            return
        assign(self, value)

    def new_empty(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return an empty tensor as torch does, but as a ``ShardTensor``, for its random methods (orthogonal init)."""
        made: Tensor = super().new_empty(*args, **kwargs)
        if type(made) is DTensor:
            made.__class__ = ShardTensor
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain ``DTensor``, so that files depend on torch only."""
        return self.detach().__reduce_ex__(protocol)


class ShardParameter(ShardTensor):
    """A sharded parameter.

    Attributes:
        gradient_hooks: Hooks on the gradient of the unsharded parameter that replaces this one in steps; None if this
            parameter is not replaced.
    """

    __slots__ = ()

    gradient_hooks: OrderedDict[int, Callable[[Tensor], Tensor | None]] | None

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """Register a gradient hook; under ZeRO-3 it gets the unsharded gradient, before the average over ranks."""
        hooks = getattr(self, "gradient_hooks", None)
        if hooks is None:
            handle: RemovableHandle = super().register_hook(hook)
            return handle
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy the parameter: sharded, or unsharded in the copy of a module. Collective in the second case.

        The parameters of a module's copy are unsharded because no engine gathers them around its calls.
        """
        if id(self) not in memo:
            in_module = any(isinstance(copied, nn.Module) for copied in memo.values())
            values = _whole(self) if in_module and sharded_axes(self) else self.detach().clone()
            memo[id(self)] = nn.Parameter(values, requires_grad=self.requires_grad)
        copied: Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ``nn.Parameter`` of a plain ``DTensor``, so that files depend on torch only."""
        return nn.Parameter(self.detach(), requires_grad=self.requires_grad).__reduce_ex__(protocol)


def _whole(parameter: Any) -> Tensor:
    if tensor_axis(parameter) is not None:
        raise RuntimeError(
            f"A module was copied after its parameter of shape {tuple(parameter.shape)} was sharded over data and"
            " tensor ranks, so the copy could not be called. Make the copy in __init__ or configure_model."
        )
    whole = gather_over_data(parameter)
    return whole.clone()


def _not_itself(name: str) -> Callable[..., Tensor]:
    """Return a conversion method that, if there is nothing to convert, returns a plain ``DTensor`` under no-grad.

    ``Module.cpu()`` and similar methods create parameters from the result, which torch refuses for this class.
    """
    convert: Callable[..., Tensor] = getattr(DTensor, name)

    @functools.wraps(convert)
    def converted(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = convert(self, *args, **kwargs)
        return self.detach() if result is self and not torch.is_grad_enabled() else result

    return converted


def _full_random(name: str) -> Callable[..., Tensor]:
    """Return an in-place random method that gives the values of a single process. Collective over the tensor's mesh.

    Each rank draws the unsharded tensor; the first rank's values are broadcast, and each rank keeps its shard.
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
    setattr(ShardTensor, _name, _full_random(_name))

for _name in ("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "contiguous"):
    setattr(ShardTensor, _name, _not_itself(_name))


def make_gradient_settable(gradient: Tensor | None) -> None:
    """Make ``gradient.data = value`` work for a sharded gradient. Plain tensors are unchanged."""
    if type(gradient) is DTensor:
        gradient.__class__ = ShardTensor


def make_settable(parameter: Tensor) -> None:
    """Make ``parameter.data = value`` work for a sharded parameter. Plain tensors are unchanged.

    Args:
        parameter: Parameter of a module that was sharded, or split over tensor ranks.
    """
    if type(parameter) is DTensor:
        parameter.__class__ = ShardParameter
