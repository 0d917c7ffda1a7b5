"""Parameters that are used outside their module's call: found when it happens, and kept gathered from then on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_pardist.engines.fully_sharded import _fsdp2
from lightning_pardist.engines.fully_sharded.backward import ShardedUnit
from lightning_pardist.engines.fully_sharded.tiling import TiledLinear


class DirectUse(TorchFunctionMode):
    """While active, an operation on a sharded parameter gathers its unit and gets the whole parameter.

    ``F.linear(x, self.emb.weight)``, or a penalty over ``self.parameters()`` in ``training_step``, reads parameters
    whose unit is not gathered at that moment. In-place operations and operations without gradient whose arguments
    are all sharded (clamping weights, say) run on the shards as they are.

    Args:
        units: All units.
        keep: Called with a unit that is used directly; it gathers the unit and keeps it through backward.
        tiled: Layers that no rank ever has whole: using their weights directly is refused.
    """

    def __init__(
        self, units: list[ShardedUnit], keep: Callable[[ShardedUnit], None], tiled: Sequence[TiledLinear] = ()
    ) -> None:
        super().__init__()
        self.keep = keep
        self.tiled = {id(layer.layer.weight): layer.name for layer in tiled}
        self.owners: dict[int, tuple[ShardedUnit, Any]] = {}
        for unit in units:
            for group in unit.groups:
                for parameter in group.fsdp_params:
                    self.owners[id(parameter.sharded_param)] = (unit, parameter)

    def __enter__(self) -> DirectUse:
        # Where the parameters are split over tensor ranks as well, those see them first, and ask here.
        for unit, parameter in self.owners.values():
            parameter.sharded_param._pardist_gather = functools.partial(self._gather, unit, parameter)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for _, parameter in self.owners.values():
            parameter.sharded_param.__dict__.pop("_pardist_gather", None)

    def _gather(self, unit: ShardedUnit, parameter: Any) -> Any:
        self.keep(unit)
        return _fsdp2.gathered_parameter(parameter)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__") or name in _METADATA or (name.endswith("_") and not name.endswith("__")):
            return func(*args, **kwargs)
        if any(self._sharded(value) for value in _tensors(args, kwargs)) and self._needs_whole(args, kwargs):
            args = tuple(self._whole(value) for value in args)
            kwargs = {key: self._whole(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)

    def _sharded(self, value: Any) -> bool:
        return isinstance(value, nn.Parameter) and (id(value) in self.owners or id(value) in self.tiled)

    def _needs_whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return torch.is_grad_enabled() or any(
            not self._sharded(value) and value.dim() > 0 for value in _tensors(args, kwargs)
        )

    def _whole(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(self._whole(item) for item in value)
        if not self._sharded(value):
            return value
        if id(value) in self.tiled:
            raise RuntimeError(
                f"{self.tiled[id(value)]}.weight is used outside of its layer's call, but the layer runs in tiles and"
                " no rank has it whole. Set tile_linear_above_mb above its size, or None."
            )
        unit, parameter = self.owners[id(value)]
        return self._gather(unit, parameter)


#: Methods that look at a tensor's form, not at its values.
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


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, torch.Tensor)]
    return found
