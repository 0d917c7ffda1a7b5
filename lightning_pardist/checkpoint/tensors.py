"""Module and optimizer state as boxes of global tensors, for saving and loading."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pardist.checkpoint.chunks import Shards, shards_of, shards_of_slice
from lightning_pardist.checkpoint.folder import FolderReader
from lightning_pardist.compat.modules import has_load_hooks
from lightning_pardist.local_tensors import is_dense, wrap_like

_MODEL = "model."
#: Checkpoint key of this package's own data, which other programs ignore.
ABOUT = "lightning_pardist"
#: Key prefix of tensors other than those of the module and of the optimizers of one model.
DIVERGED = "diverged."
#: Key prefix of optimizer state whose own key is not a string; in strings the sign is escaped.
_LITERAL = "%="


@dataclass(frozen=True)
class TensorSlot:
    """An optimizer's state on this rank for one of its parameters.

    Attributes:
        param: The parameter, plain or a ``DTensor``; the optimizer's state is keyed by it.
        held: Start and stop in the parameter's elements in memory order, and the flat tensor that is updated in its
            place. None if the parameter itself is updated.
        here: Whether this rank updates any part of it.
        whole: Whether the state is that of the full parameter, even if this rank holds only a shard of it.
        steps_on: Device of the update, if state is on the host between steps; None if it stays on its device.
        keep: Function of a parameter and its loaded state that returns the state to store; None for no change.
    """

    param: Tensor
    held: tuple[int, int, Tensor] | None = None
    here: bool = True
    whole: bool = False
    steps_on: torch.device | None = None
    keep: Callable[[Tensor, dict[str, Any]], dict[str, Any]] | None = None

    @property
    def like(self) -> Tensor:
        """Tensor with the layout of elementwise state on this rank."""
        return self.param if self.held is None else self.held[2]

    def locate(self, values: Tensor) -> Shards:
        """Return the boxes of state with the layout of :attr:`like`."""
        if self.whole:
            return shards_of(values)
        if self.held is None:
            return shards_like(self.param, values)
        return shards_of_slice(self.param, *self.held[:2], values)


Slots = Sequence[Sequence[TensorSlot]]


def shared_state(optimizer: Optimizer) -> dict[Any, Any]:
    """Return state that an optimizer keeps for all parameters together: entries whose key is not a tensor."""
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}


def restore_shared(optimizer: Optimizer, shared: Mapping[Any, Any]) -> None:
    """Replace the state that an optimizer keeps for all parameters together."""
    for key in shared_state(optimizer):
        del optimizer.state[key]
    optimizer.state.update(shared)


def shared_entries(state: Mapping[str, Any]) -> dict[Any, Any]:
    """Return copies of the entries of a full optimizer state dict that belong to all parameters together."""
    numbers = {number for group in state["param_groups"] for number in group["params"]}
    return {key: copy.deepcopy(value) for key, value in state["state"].items() if key not in numbers}


def full_slots(optimizer: Optimizer) -> list[list[TensorSlot]]:
    """Return the slots, by group, of an optimizer that updates the user's parameters themselves."""
    return [[TensorSlot(param) for param in group["params"]] for group in optimizer.param_groups]


def shards_like(param: Tensor, values: Tensor) -> Shards:
    """Return the boxes of a full tensor or one placed as ``param``: plain, a ``DTensor``, or its local tensor."""
    whole = values.shape == param.shape != _local_shape(param)
    if isinstance(param, DTensor) and not isinstance(values, DTensor) and not whole:
        return shards_of(wrap_like(values, param))
    return shards_of(values)


# --- saving -----------------------------------------------------------------------------------------------------------


def module_shards(state: Mapping[str, Any]) -> tuple[dict[str, Shards], dict[str, str], dict[str, Any]]:
    """Convert a module's state dict to the form that a folder stores. Not collective.

    Args:
        state: ``module.state_dict()`` of this rank: plain tensors, ``DTensor``s, ``meta`` for absent ones.

    Returns:
        Boxes by key; key -> key of the tensor that it shares memory with; sparse tensors and other values, by name.
    """
    tensors: dict[str, Shards] = {}
    aliases: dict[str, str] = {}
    rest: dict[str, Any] = {}
    seen: dict[Any, str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor) or not is_dense(value):
            rest[name] = value
            continue
        key = _MODEL + name
        tensors[key] = shards_of(value)
        local = value.to_local() if isinstance(value, DTensor) else value
        if local.is_meta or local.numel() == 0:
            continue
        place = (local.data_ptr(), local.dtype, tuple(local.shape), local.stride())
        if place in seen:
            aliases[key] = seen[place]
        seen.setdefault(place, key)
    return tensors, aliases, rest


def merged_aliases(of_ranks: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Merge the ranks' aliases to a mapping from key to the key under which the tensor is saved."""
    merged: dict[str, str] = {}
    for aliases in of_ranks:
        merged.update(aliases)
    for key in merged:
        target = merged[key]
        while target in merged:
            target = merged[target]
        merged[key] = target
    return merged


def model_key(name: str) -> str:
    """Return the folder key of a tensor in the module's state dict."""
    return _MODEL + name


def model_name(key: str) -> str:
    """Return the name in the module's state dict of a folder key."""
    return key.removeprefix(_MODEL)


def optimizer_shards(
    index: int, optimizer: Optimizer, slots: Slots, names: Mapping[Tensor, str]
) -> tuple[dict[str, Shards], dict[str, Any]]:
    """Convert an optimizer's state to the form that a folder stores. Not collective.

    Args:
        index: Index of the optimizer in the Trainer.
        optimizer: The optimizer.
        slots: Its slots for the user's parameters.
        names: Names of its parameters in the module.

    Returns:
        Boxes by key, and the rest: ``param_groups`` with numbered parameters, their ``names``, under ``small`` values
        that are not tensors or have one element, such as step counts, by number and name, and under ``shared``, if
        there is any, the state of all parameters together.
    """
    tensors: dict[str, Shards] = {}
    small: dict[int, dict[Any, Any]] = {}
    named: dict[int, str] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for settings, members in zip(optimizer.param_groups, slots, strict=True):
        numbers = []
        for slot in members:
            named[number] = names.get(slot.param, f"#{number}")
            for key, boxes in _collected(optimizer, slot, small.setdefault(number, {})).items():
                tensors[_state_key(index, named[number], key)] = boxes
            numbers.append(number)
            number += 1
        groups.append({**{key: value for key, value in settings.items() if key != "params"}, "params": numbers})
    rest = {"param_groups": groups, "names": named, "small": {n: found for n, found in small.items() if found}}
    shared = copy.deepcopy(shared_state(optimizer))
    return tensors, rest | ({"shared": shared} if shared else {})


def _collected(optimizer: Optimizer, slot: TensorSlot, small: dict[Any, Any]) -> dict[Any, Shards]:
    found: dict[Any, Shards] = {}
    for key, value in optimizer.state.get(slot.param, {}).items() if slot.here else ():
        if not isinstance(value, Tensor):
            small[key] = value
        elif value.dim() == 0 and (slot.like.dim() > 0 or key == "step"):
            # For a 0-dim parameter a step count has the same shape as its moments.
            small[key] = value.detach().cpu().clone()
        elif value.shape in (slot.like.shape, _local_shape(slot.like)):
            found[key] = slot.locate(value)
        elif value.numel() <= 1:
            small[key] = value.detach().cpu().clone()
        else:
            found[key] = shards_of(value)
    return found


# --- loading ----------------------------------------------------------------------------------------------------------


class FolderState(MutableMapping[str, Any]):
    """A module's state dict in a checkpoint folder; tensors are read on access.

    Args:
        reader: Reader of the folder.
        rest: Values other than tensors, by name.
    """

    def __init__(self, reader: FolderReader, rest: Mapping[str, Any]) -> None:
        self.reader = reader
        manifest = reader.manifest
        stored = [key for key in (*manifest.tensors, *manifest.aliases) if key.startswith(_MODEL)]
        self._values: dict[str, Any] = dict(rest)
        self._stored = {key.removeprefix(_MODEL): key for key in stored}

    def stored_key(self, name: str) -> str | None:
        """Return the folder's key of a tensor; None if the entry was replaced."""
        return self._stored.get(name)

    def __getitem__(self, name: str) -> Any:
        return self.reader.read(self._stored[name]) if name in self._stored else self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._stored.pop(name, None)
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        if name in self._stored:
            del self._stored[name]
        else:
            del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._stored, *self._values])

    def __len__(self) -> int:
        return len(self._stored) + len(self._values)


class StoredTensors(Mapping[str, Tensor]):
    """Tensors of a checkpoint folder by key, read on access.

    Args:
        reader: Reader of the folder.
        prefix: Prefix of their keys.
    """

    def __init__(self, reader: FolderReader, prefix: str) -> None:
        self.reader = reader
        self._keys = [key for key in reader.manifest.tensors if key.startswith(prefix)]

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._keys:
            raise KeyError(key)
        return self.reader.read(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def can_fill(module: nn.Module) -> bool:
    """Return whether a module can be loaded by filling the parameters and buffers in its state dict in place."""
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    plain = not any(has_load_hooks(submodule) for submodule in module.modules())
    overridden = type(module).load_state_dict is not nn.Module.load_state_dict
    state = module.state_dict(keep_vars=True).values()
    return plain and not overridden and all(id(v) in own for v in state if isinstance(v, Tensor))


@torch.no_grad()
def fill_module(module: nn.Module, state: FolderState, *, strict: bool = True) -> None:
    """Load this rank's shards of a module from a folder, tensor by tensor. Not collective.

    Args:
        module: Module whose tensors are plain, ``DTensor``s, or on ``meta`` if other ranks hold them.
        state: State of the folder; replaced entries take precedence.
        strict: Whether names must match.

    Raises:
        RuntimeError: If names do not match, or a shape differs; the module is then unchanged.
    """
    own = module.state_dict(keep_vars=True)
    common = common_names(module, own, state, strict=strict, source=f"The checkpoint {state.reader.path}")
    for name in common:
        key = state.stored_key(name)
        if key is not None and (stored := state.reader.describe(key).shape) != tuple(own[name].shape):
            raise RuntimeError(
                f"{name} has shape {tuple(own[name].shape)} in the module and {stored} in {state.reader.path}."
            )
    rest: dict[str, Any] = {}
    for name in common:
        key = state.stored_key(name)
        if key is not None:
            state.reader.read_into(key, shards_of(own[name]))
        elif isinstance(own[name], Tensor) and is_dense(own[name]):
            copy_from_full(state[name], shards_of(own[name]))
        else:
            rest[name] = state[name]
    if rest:
        module.load_state_dict(rest, strict=False)


@torch.no_grad()
def fill_optimizer(
    index: int,
    optimizer: Optimizer,
    slots: Slots,
    saved: Mapping[str, Any],
    reader: FolderReader,
) -> None:
    """Load an optimizer's state and settings from a folder. Not collective.

    Args:
        index: Index of the optimizer in the Trainer.
        optimizer: The optimizer.
        slots: Its slots for the user's parameters.
        saved: The rest that :func:`optimizer_shards` returned.
        reader: Reader of the folder.

    Raises:
        ValueError: If the parameter groups differ in number or size.
    """
    require_same_groups(optimizer, saved["param_groups"], [len(members) for members in slots])
    keys = _keys_by_name(index, saved["names"].values(), reader.manifest.tensors)
    optimizer.state.clear()
    optimizer.state.update(copy.deepcopy(saved.get("shared", {})))
    for group, settings, members in zip(optimizer.param_groups, saved["param_groups"], slots, strict=True):
        group.update({key: value for key, value in settings.items() if key != "params"})
        for slot, number in zip(members, settings["params"], strict=True):
            stored = keys[saved["names"][number]]
            small = saved["small"].get(number, {})
            if (not stored and not small) or not slot.here or (slot.like.is_meta and not slot.whole):
                continue
            device = slot.steps_on or device_of_state(slot.like, optimizer)
            rests = device if slot.steps_on is None else torch.device("cpu")
            state = {key: settled(_part_of(key, value, slot), rests) for key, value in small.items()}
            for key, full_key in stored.items():
                state[key] = _filled(full_key, slot, reader, rests)
            state = in_place(state, device, group)
            # One parameter at a time: state that is kept in files may exceed memory.
            optimizer.state[slot.param] = state if slot.keep is None else slot.keep(slot.param, state)


def require_same_groups(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]], wanted: Sequence[int]) -> None:
    """Check that saved parameter groups match those of an optimizer.

    Raises:
        ValueError: If they differ in number or size, with both sizes.
    """
    found = [len(group["params"]) for group in saved]
    if found != list(wanted):
        raise ValueError(
            f"The checkpoint's {type(optimizer).__name__} has parameter groups of {found} parameters, this one of"
            f" {list(wanted)}. Build the optimizer as it was when the checkpoint was saved."
        )


def optimizer_keys(index: int, saved: Mapping[str, Any], keys: Iterable[str]) -> dict[int, dict[Any, str]]:
    """Return the keys of an optimizer's tensors, by parameter number and name of the state.

    Args:
        index: Index of the optimizer in the Trainer.
        saved: The rest that :func:`optimizer_shards` returned.
        keys: Keys to search, for example those of a folder.
    """
    by_name = _keys_by_name(index, saved["names"].values(), keys)
    return {number: by_name[name] for number, name in saved["names"].items()}


def numbered_optimizer_shards(index: int, state: Mapping[str, Any]) -> tuple[dict[str, Shards], dict[str, Any]]:
    """Convert a full optimizer state dict as :func:`optimizer_shards` does; parameters are named by their number."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    named = {number: f"#{number}" for number in numbers}
    tensors: dict[str, Shards] = {}
    small: dict[int, dict[Any, Any]] = {}
    for number, values in state["state"].items():
        if number not in named:
            continue
        for key, value in values.items():
            if isinstance(value, Tensor) and value.dim():
                tensors[_state_key(index, named[number], key)] = shards_of(value)
            else:
                small.setdefault(number, {})[key] = value.clone() if isinstance(value, Tensor) else value
    shared = shared_entries(state)
    rest = {"param_groups": state["param_groups"], "names": named, "small": small}
    return tensors, rest | ({"shared": shared} if shared else {})


def device_of_state(param: Tensor, optimizer: Optimizer) -> torch.device:
    """Return the device of a parameter's state: its own, or that of another of the optimizer if it is on ``meta``."""
    params = (param, *(other for group in optimizer.param_groups for other in group["params"]))
    return next((each.device for each in params if not each.is_meta), torch.device("cpu"))


def settled(value: Any, device: torch.device) -> Any:
    """Return a copy of loaded state with tensors of one or more dims on ``device``, also inside containers."""
    if isinstance(value, Tensor):
        return value.to(device if value.dim() else value.device, copy=True)
    if isinstance(value, Mapping):
        return {key: settled(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(settled(item, device) for item in value)
    return value


def in_place(state: dict[str, Any], device: torch.device, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Move 0-dim tensors of a state to the device where kernels expect them, as ``Optimizer.load_state_dict`` does.

    That is the parameter's device; the step count stays on the host unless the optimizer is fused or capturable.

    Args:
        state: State of one parameter.
        device: Device of the parameter.
        settings: Settings of its parameter group.
    """
    counts_there = settings.get("fused") or settings.get("capturable")
    for key, value in state.items():
        if isinstance(value, Tensor) and not value.dim() and (key != "step" or counts_there):
            state[key] = value.to(device, torch.float32 if key == "step" else value.dtype)
    return state


def _filled(full_key: str, slot: TensorSlot, reader: FolderReader, device: torch.device) -> Tensor:
    stored = reader.describe(full_key)
    if stored.shape != tuple(slot.param.shape) or slot.whole:
        values: Tensor = settled(reader.read(full_key), device)
        return values
    values = _empty_part(getattr(torch, stored.dtype), slot)
    reader.read_into(full_key, slot.locate(values))
    return values


def _part_of(key: Any, value: Any, slot: TensorSlot) -> Any:
    """Return this rank's part of a small value, which may be the elementwise state of a parameter with one element."""
    elementwise = isinstance(value, Tensor) and value.shape == slot.param.shape and (value.dim() or key != "step")
    if slot.whole or not elementwise:
        return value
    part = _empty_part(value.dtype, slot)
    copy_from_full(value, slot.locate(part))
    return part


def _empty_part(dtype: torch.dtype, slot: TensorSlot) -> Tensor:
    """Return memory for this rank's part of elementwise state, in the parameter's dtype if both are floating-point."""
    local = slot.like.to_local() if isinstance(slot.like, DTensor) else slot.like
    floating = dtype.is_floating_point and local.is_floating_point()
    return torch.empty_like(local, dtype=local.dtype if floating else dtype, requires_grad=False)


def common_names(
    module: nn.Module, own: Mapping[str, Any], state: Mapping[str, Any], *, strict: bool, source: str = "The checkpoint"
) -> list[str]:
    """Return the names that a module's state dict and a loaded one have in common, in the module's order.

    Args:
        module: The module.
        own: Its state dict.
        state: State dict to load.
        strict: Whether names must match.
        source: Description of ``state``'s origin, the start of the error message.

    Raises:
        RuntimeError: If names do not match, as in torch's ``load_state_dict``.
    """
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own]
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"{source} does not fit {type(module).__name__}: missing {missing[:8]}, unexpected {unexpected[:8]}."
            " Set strict_loading = False on the module if this is intended."
        )
    return [name for name in own if name in state]


def copy_from_full(whole: Tensor, shards: Shards) -> None:
    """Fill local shards of a tensor in place from the full one, reading only these parts. Not collective."""
    for part in shards.parts:
        part.values.copy_(whole[tuple(slice(a, a + n) for a, n in zip(part.offsets, part.sizes, strict=True))])


def _keys_by_name(index: int, names: Iterable[str], keys: Iterable[str]) -> dict[str, dict[Any, str]]:
    found: dict[str, dict[Any, str]] = {name: {} for name in names}
    pattern = re.compile(rf"^optimizer_{index}\.state\.(?P<name>.+)\.(?P<key>[^.]*)$")
    for full_key in keys:
        if (match := pattern.match(full_key)) and match["name"] in found:
            found[match["name"]][_unquoted(match["key"])] = full_key
    return found


def _state_key(index: int, name: str, key: Any) -> str:
    return f"optimizer_{index}.state.{name}.{_quoted(key)}"


def _quoted(key: Any) -> str:
    """Return a state's key as text without dots: names hold dots, and the last one ends the parameter's.

    Raises:
        TypeError: If the key is neither a string nor another literal.
    """
    if isinstance(key, str):
        return _escaped(key)
    with suppress(ValueError, SyntaxError):
        if ast.literal_eval(repr(key)) == key:
            return _LITERAL + _escaped(repr(key))
    raise TypeError(
        f"The optimizer keeps state under the key {key!r}, a {type(key).__name__}, which a checkpoint cannot name."
        " Use a string or a number."
    )


def _unquoted(text: str) -> Any:
    if text.startswith(_LITERAL):
        return ast.literal_eval(unquote(text.removeprefix(_LITERAL)))
    return unquote(text)


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace(".", "%2E")


def _local_shape(tensor: Tensor) -> torch.Size:
    return tensor.to_local().shape if isinstance(tensor, DTensor) else tensor.shape
