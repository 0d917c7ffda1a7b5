"""Interception of unit calls during one run, and restoration of a module's state after a trial run."""

from __future__ import annotations

import contextlib
import enum
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from torch.utils.hooks import RemovableHandle

from lightning_pardist.compat.modules import own_buffers
from lightning_pardist.engines.common.containers import refill
from lightning_pardist.engines.common.devices import device_in_use, preserve_random_state
from lightning_pardist.engines.common.own_generators import set_state, state_of
from lightning_pardist.engines.common.parameter_traits import HooksOnGradients, hooks_on_gradient

#: Takes the unit's name, its original forward, args and kwargs; returns the result of the call.
Handler = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextlib.contextmanager
def intercepted(units: dict[str, nn.Module], handler: Handler) -> Iterator[None]:
    """Redirect every call of a unit's ``forward`` to a handler; calls of units inside a unit are not redirected.

    Hooks that the user has registered on units still run, around the handler.

    Args:
        units: Units by name.
        handler: Called in place of ``forward``.
    """
    saved: list[tuple[nn.Module, bool, Any]] = []
    inside = False

    def guard(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return forward(*args, **kwargs)
            inside = True
            try:
                return handler(name, forward, args, kwargs)
            finally:
                inside = False

        return call

    try:
        for name, unit in units.items():
            # Set on the instance, bypassing nn.Module.__setattr__: the class and the state dict do not change.
            saved.append((unit, "forward" in unit.__dict__, unit.__dict__.get("forward")))
            unit.__dict__["forward"] = guard(name, unit.forward)
        yield
    finally:
        for unit, had, forward in reversed(saved):
            if had:
                unit.__dict__["forward"] = forward
            else:
                unit.__dict__.pop("forward", None)


@contextlib.contextmanager
def undisturbed(root: nn.Module) -> Iterator[None]:
    """Restore buffers, metric states, other attributes and RNG states of a module after the code inside has run.

    Hooks on gradients of parameters are restored as well. If that code removes no hook of a module and registers new
    ones for good, as a model's first call may, the new hooks are kept, and so are the boolean attributes with which the
    model records that they are registered.

    Args:
        root: The module whose state a trial run may change.
    """
    restorers = [_snapshot(module) for module in root.modules()]
    on_gradients = HooksOnGradients(root.parameters())
    begin = next_hook()
    lasting = False
    try:
        with preserve_random_state(device_in_use()):
            yield
        # Not after an exception: hooks may be left that the run would have removed.
        lasting = has_hooks_since(root, begin)
    finally:
        with torch.no_grad():
            for restore in restorers:
                restore(lasting)
        on_gradients.restore()


def next_hook() -> int:
    """Return the number that the next hook gets. torch numbers hooks in the order in which they are registered."""
    return RemovableHandle.next_id


def has_hooks_since(root: nn.Module, begin: int) -> bool:
    """Return whether a module or a submodule has a hook with a number from ``begin`` on.

    Called for every micro-batch, so it looks at modules only if hooks were registered at all.
    """
    return begin < RemovableHandle.next_id and any(
        number >= begin for registry in _registries_of_hooks(root) for number in registry
    )


def remove_hooks_since(root: nn.Module, begin: int) -> None:
    """Remove the hooks of a module and its submodules with numbers from ``begin`` on."""
    if begin == RemovableHandle.next_id:
        return
    for registry in _registries_of_hooks(root):
        for number in [number for number in registry if number >= begin]:
            del registry[number]


def remove_gradient_hooks_since(root: nn.Module, begin: int) -> None:
    """Remove the hooks on gradients of a module's parameters with numbers from ``begin`` on.

    Hooks after accumulation are left: engines register some as well.
    """
    if begin == RemovableHandle.next_id:
        return
    for parameter in root.parameters():
        hooks = hooks_on_gradient(parameter)
        for number in [number for number in hooks if number >= begin]:
            del hooks[number]


def _registries_of_hooks(root: nn.Module) -> Iterator[dict[int, Any]]:
    """Yield the non-empty hook registries of a module and all its submodules."""
    for module in root.modules():
        yield from (registry for name in HOOKS if (registry := module.__dict__.get(name)))


def is_flag(name: str, value: Any) -> bool:
    """Return whether a module's attribute may be a flag for registered hooks: any bool except ``training``."""
    return type(value) is bool and name != "training"


def _snapshot(module: nn.Module) -> Callable[[bool], None]:
    """Save a module's attributes and buffers; return a function that restores them and preserves object identity."""
    attributes = {key: value for key, value in module.__dict__.items() if key not in _REGISTRIES}
    buffers = dict(own_buffers(module))
    contents = [_remember(value) for key, value in attributes.items() if key not in HOOKS]
    contents += [_remember(value) for value in buffers.values()]
    hooks = [_remember(value) for key, value in attributes.items() if key in HOOKS]

    def restore(lasting: bool) -> None:
        flags = {key: value for key, value in module.__dict__.items() if lasting and is_flag(key, value)}
        for key in [key for key in module.__dict__ if key not in (attributes | flags) and key not in _REGISTRIES]:
            del module.__dict__[key]
        module.__dict__.update(attributes | flags)
        own_buffers(module).clear()
        own_buffers(module).update(buffers)
        for restore in contents if lasting else (*contents, *hooks):
            restore()

    return restore


_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})
#: Names of the attributes in which a module keeps its hooks.
HOOKS = frozenset(name for name in nn.Module().__dict__ if name.endswith("hooks") or "hooks_" in name)


#: Depth to which objects in objects are remembered.
_DEPTH = 8
#: Packages whose objects lead to the Trainer, to files and to the interpreter itself.
_FOREIGN = {"torch", "lightning", "pytorch_lightning", "lightning_pardist", "numpy", *sys.stdlib_module_names}
_FOREIGN -= {"types", "argparse"}


def entries_of(value: Any) -> dict[Any, Any] | None:
    """Return a dict itself, or the attributes of an object that a step may change; None for other values.

    Objects of torch, Lightning and Python's library, modules, datasets, enums and iterators are other values.
    """
    if isinstance(value, dict):
        return value
    kind: Any = type(value)
    if _is_unchanging(kind) or isinstance(value, _UNCHANGING):
        return None
    attributes = getattr(value, "__dict__", None)
    return attributes if isinstance(attributes, dict) else None


_UNCHANGING = (nn.Module, torch.Tensor, Dataset, enum.Enum, Iterator, type)


@functools.lru_cache(maxsize=4096)
def _is_unchanging(kind: type) -> bool:
    """Return whether objects of a class have no entries. Cached: called for each attribute in each micro-batch."""
    return issubclass(kind, _UNCHANGING) or kind.__module__.split(".")[0] in _FOREIGN


def _remember(value: Any, above: tuple[int, ...] = ()) -> Callable[[], None]:
    if isinstance(value, torch.Tensor):
        return _remember_tensor(value)
    if (state := state_of(value)) is not None:
        return partial(set_state, value, state)
    if id(value) in above:
        return _nothing
    if not isinstance(value, (dict, list, set, deque)):
        # What a step keeps in an object of its own, such as a meter.
        entries = entries_of(value)
        return _nothing if entries is None or len(above) > _DEPTH else _remember(entries, (*above, id(value)))
    kept = dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)
    inner = [_remember(item, (*above, id(value))) for item in (kept.values() if isinstance(kept, dict) else kept)]

    def restore() -> None:
        refill(value, kept)
        for restore in inner:
            restore()

    return restore


def _remember_tensor(tensor: torch.Tensor) -> Callable[[], None]:
    if tensor.is_meta:
        return _nothing
    kept = tensor.detach().clone()

    def restore() -> None:
        # Compare values, not version counters: batch norm's kernel updates running statistics without bumping them.
        if not torch.equal(tensor, kept):
            tensor.detach().copy_(kept)

    return restore


def _nothing() -> None:
    return None
