"""Detects parameters used outside their module's call, and keeps their units gathered from then on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_pardist.compat.fsdp2 import ShardedParameter
from lightning_pardist.engines.common.parameter_write_guard import memory_of, writes
from lightning_pardist.engines.fsdp.backward import ShardedUnit
from lightning_pardist.engines.fsdp.tiling import TiledLinear
from lightning_pardist.local_tensors import gather_whole, local_shard


class DirectUse(TorchFunctionMode):
    """Gathers a sharded parameter's unit when an operation uses it directly.

    ``F.linear(x, self.emb.weight)``, or a penalty over ``self.parameters()`` in ``training_step``, reads parameters
    whose unit is not gathered at that moment. In-place operations run directly on the shards; so do, in training,
    operations without gradient whose arguments are all sharded (such as clamping weights). An in-place operation on
    both sharded and whole tensors (``torch._foreach_add_`` over a partly gathered sub-module) runs on gathered
    parameters, whose changes are written back to the shards.

    Args:
        units: All units.
        keep: Called with a unit that is used directly; it gathers the unit and keeps it through backward.
        tiled: Layers that are never gathered whole; using their weights directly raises an error.
    """

    def __init__(
        self, units: list[ShardedUnit], keep: Callable[[ShardedUnit], None], tiled: Sequence[TiledLinear] = ()
    ) -> None:
        super().__init__()
        self.keep = keep
        self._units = units
        #: Whether the whole step runs without gradients: an operation that reads a parameter is then no update.
        self._evaluates = False
        self.tiled = {id(layer.layer.weight): layer.name for layer in tiled}
        self.owners: dict[int, tuple[ShardedUnit, ShardedParameter]] = {}
        #: Units whose shards one operation has changed together: later runs gather all or none of them.
        self.together: list[set[ShardedUnit]] = []
        self._by_memory: dict[int, tuple[ShardedUnit, ShardedParameter]] = {}
        for unit in units:
            for group in unit.groups:
                for parameter in group.parameters:
                    self.owners[id(parameter.sharded)] = (unit, parameter)
                    if parameter.sharded.to_local().numel():
                        self._by_memory[_memory(parameter.sharded)] = (unit, parameter)

    def __enter__(self) -> DirectUse:
        # Where the parameters are also split over tensor ranks, those handle operations first and gather by this.
        for unit, parameter in self.owners.values():
            parameter.sharded._pardist_gather = functools.partial(self._gather, unit, parameter)
        self._evaluates = not torch.is_grad_enabled()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for _, parameter in self.owners.values():
            parameter.sharded.__dict__.pop("_pardist_gather", None)

    def _gather(self, unit: ShardedUnit, parameter: ShardedParameter) -> Any:
        self.keep(unit)
        return parameter.unsharded

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if writes(func, kwargs):
            self._note_written(args, kwargs)
        if name in ("__get__", "__set__") or name in _METADATA:
            return func(*args, **kwargs)
        if name.endswith("_") and not name.endswith("__"):
            if self._mixes_shards_and_plain(args, kwargs):
                args, kwargs = (
                    self._gather_operands(args),
                    {key: self._gather_operands(value) for key, value in kwargs.items()},
                )
            return func(*args, **kwargs)
        if any(self._is_sharded(value) for value in _tensors(args, kwargs)) and self._needs_unsharded(args, kwargs):
            args = tuple(self._unsharded(value) for value in args)
            kwargs = {key: self._unsharded(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)

    def _note_written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record writes to gathered parameters through views of ``.data``, which leave no other trace."""
        written = {memory_of(local_shard(value)) for value in _tensors(args, kwargs)} - {0}
        for unit in self._units:
            if unit.gathered:
                for gathered in unit.whole.values():
                    gathered.touched = gathered.touched or memory_of(gathered.home) in written

    def _mixes_shards_and_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether an in-place operation takes both shards of these units and plain tensors."""
        found = [value for value in _tensors(args, kwargs) if value.dim()]
        owners = [owner for value in found if (owner := self._owner(value)) is not None]
        if not owners:
            return False
        units = {unit for unit, _ in owners}
        if len(units) > 1:
            self.together.append(units)
        return any(not isinstance(value, DTensor) for value in found)

    def _owner(self, value: Any) -> tuple[ShardedUnit, ShardedParameter] | None:
        """Return the unit and parameter of a sharded parameter, or of the result of its ``.data`` or ``.detach()``."""
        if id(value) in self.owners:
            return self.owners[id(value)]
        if not isinstance(value, DTensor):
            return None
        owner = self._by_memory.get(_memory(value))
        return owner if owner is not None and value.shape == owner[1].sharded.shape else None

    def _gather_operands(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(self._gather_operands(item) for item in value)
        owner = self._owner(value) if isinstance(value, torch.Tensor) else None
        if owner is None:
            return value
        whole = self._gather(*owner)
        return whole if id(value) in self.owners else whole.detach()

    def _is_sharded(self, value: Any) -> bool:
        return isinstance(value, nn.Parameter) and (id(value) in self.owners or id(value) in self.tiled)

    def _needs_unsharded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return (
            self._evaluates
            or torch.is_grad_enabled()
            or any(not self._is_sharded(value) and value.dim() > 0 for value in _tensors(args, kwargs))
        )

    def _unsharded(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(self._unsharded(item) for item in value)
        if not self._is_sharded(value):
            return value
        if id(value) in self.tiled:
            raise RuntimeError(
                f"{self.tiled[id(value)]}.weight is used outside of its layer's call, but the layer runs in tiles and"
                " no rank has it whole. Set tile_linear_above_mb above its size, or None."
            )
        unit, parameter = self.owners[id(value)]
        return self._gather(unit, parameter)


class UseInHooks(DirectUse):
    """Gathers units for code outside of steps that computes with sharded parameters and plain tensors together.

    torch refuses such operations: a part of the module is called by itself (``self.decoder(z)`` at the end of an
    epoch), or a parameter is used directly. Operations on sharded parameters alone run on the shards, as without this
    mode. Units stay gathered. Collective over the mesh if an operation gathers a unit.

    Args:
        units: All units.
        tiled: Layers that are never gathered whole.
        is_idle: Returns whether no step or call of the module is running: those gather by themselves.
        may_be_alone: Returns whether other ranks may not run this code, as in an evaluation's hooks.
    """

    def __init__(
        self,
        units: list[ShardedUnit],
        tiled: Sequence[TiledLinear],
        *,
        is_idle: Callable[[], bool],
        may_be_alone: Callable[[], bool],
    ) -> None:
        super().__init__(units, lambda unit: None if unit.gathered else unit.gather(), tiled)
        self._is_idle = is_idle
        self._may_be_alone = may_be_alone
        self._has_tensor_ranks = any(parameter.sharded.device_mesh.ndim > 1 for _, parameter in self.owners.values())

    def __enter__(self) -> UseInHooks:
        if self._has_tensor_ranks:
            super().__enter__()
        else:
            TorchFunctionMode.__enter__(self)
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._is_idle():
            return func(*args, **(kwargs or {}))
        if func in (torch.Tensor.numpy, torch.Tensor.__array__) and self._is_gathered(args[0]):
            # The array would keep the memory, which is freed after the hook.
            args = (args[0].clone(), *args[1:])
        return super().__torch_function__(func, types, args, kwargs)

    def _is_gathered(self, value: torch.Tensor) -> bool:
        homes = (gathered.home for unit in self._units if unit.gathered for gathered in unit.whole.values())
        return not isinstance(value, DTensor) and memory_of(value) in {memory_of(home) for home in homes} - {0}

    def _is_sharded(self, value: Any) -> bool:
        return isinstance(value, DTensor)

    def _unsharded(self, value: Any) -> Any:
        if isinstance(value, DTensor) and id(value) not in self.owners and id(value) not in self.tiled:
            # Computed from shards: there is no unit to gather.
            if self._may_be_alone():
                raise RuntimeError(
                    "A hook of an evaluation computes with a result of sharded parameters and plain tensors together."
                    " Other ranks, which would have to take part, may not run this code. Start from whole values, on"
                    " all ranks: parameter.full_tensor()."
                )
            return gather_whole(value)
        whole = super()._unsharded(value)
        # Gathered over the data ranks, it may still be split over tensor ranks.
        return whole.full_tensor() if isinstance(whole, DTensor) else whole

    def _needs_unsharded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return any(not isinstance(value, DTensor) and value.dim() for value in _tensors(args, kwargs))


class InBackward:
    """Keeps a mode active while the autograd engine runs, which torch calls with the mode disabled.

    May be entered repeatedly.

    Args:
        mode: The mode, which is active around the backward.
    """

    def __init__(self, mode: TorchFunctionMode) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        TorchFunctionMode.__enter__(self._mode)

    def __exit__(self, *exception: Any) -> None:
        TorchFunctionMode.__exit__(self._mode, *exception)


#: Methods that read a tensor's metadata, not its values.
_METADATA = frozenset(
    {
        *(
            "size",
            "dim",
            "ndimension",
            "numel",
            "nelement",
            "stride",
            "element_size",
            "is_floating_point",
            "is_complex",
        ),
        *("is_contiguous", "is_set_to", "type", "get_device", "storage_offset", "register_hook", "__hash__", "__len__"),
        *("register_post_accumulate_grad_hook", "requires_grad_", "__repr__", "__format__", "is_shared", "backward"),
        *("data_ptr", "untyped_storage", "is_same_size", "is_inference", "is_signed", "has_names", "__reduce_ex__"),
        *("zeros_like", "empty_like", "ones_like", "full_like", "rand_like", "randn_like", "to_local", "full_tensor"),
    }
)


def _memory(value: DTensor) -> int:
    return value.to_local().untyped_storage().data_ptr()


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, torch.Tensor)]
    return found
