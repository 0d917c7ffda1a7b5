"""Module replicas in one process, one per device, and the threads that run them in parallel."""

from __future__ import annotations

import contextvars
import copy
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_pardist.compat.modules import TABLES, own_buffers, own_modules, own_parameters
from lightning_pardist.engines.common.error_notes import add_note

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)


def replicate(
    module: M, device: torch.device, *, made: Callable[[nn.Module], None] | None = None, checks_functions: bool = False
) -> M:
    """Return a replica of a module on another device, whose gradients flow to the module's own parameters.

    A parameter that is on ``device`` is shared; any other becomes a differentiable copy of it. Buffers are copied.
    Other attributes are shared, but their lists, dicts and sets are copied at any depth, with methods, modules and
    parameters in them replaced by the replica's.

    Args:
        module: The module, not wrapped.
        device: Device of the replica.
        made: Called with each submodule of the replica before it is used.
        checks_functions: Whether to check for functions that would stay bound to the original module.

    Raises:
        ValueError: With ``checks_functions``, if an attribute is a function that captures the module in its closure or
            defaults; the message names the attribute.
    """
    others: dict[int, Any] = {}
    shells: list[nn.Module] = []
    for each in module.modules():
        others[id(each)] = shell = _shell(each)
        shells.append(shell)
    for each in shells:
        for tensors in (own_parameters(each), own_buffers(each)):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in others:
                    others[id(tensor)] = _copied(tensor, device, is_buffer=tensors is own_buffers(each))
                # Write to the dict itself: register_parameter() refuses a non-leaf tensor.
                tensors[name] = None if tensor is None else others[id(tensor)]
        children = own_modules(each)
        children.update({name: child and others[id(child)] for name, child in children.items()})
    of_copy = _OfCopy(others, checks_functions)
    for (name, _), each in zip(module.named_modules(), shells, strict=True):
        for key, value in each.__dict__.items():
            if key not in TABLES:
                each.__dict__[key] = of_copy(value, f"{name}.{key}".removeprefix("."))
        if made is not None:
            made(each)
    replica: M = others[id(module)]
    return replica


def _shell(module: nn.Module) -> nn.Module:
    """Return a shallow copy of a module with its own dicts of parameters, buffers and submodules."""
    try:
        # copy.copy() respects a class's own copy protocol, for attributes that are bound to the module.
        shell = copy.copy(module)
    except Exception:
        # Some modules cannot be copied, for instance parametrized ones, whose classes cannot be pickled.
        shell = type(module).__new__(type(module))
        shell.__dict__.update(module.__dict__)
    # Restore attributes that __getstate__ replaces by None.
    left_out = {key: value for key, value in module.__dict__.items() if shell.__dict__.get(key, value) is None}
    shell.__dict__.update(left_out)
    for table in TABLES:
        shell.__dict__[table] = dict(module.__dict__[table])
    return shell


def _copied(tensor: Tensor, device: torch.device, *, is_buffer: bool) -> Tensor:
    if is_buffer:
        return tensor.detach().to(device, copy=True)
    return tensor if tensor.device == device else tensor.to(device)


class _OfCopy:
    """Mapping from a module's attribute values to those of its replica.

    Args:
        others: Replacements of modules and tensors, by ``id`` of the original.
        checks_functions: Whether to refuse functions that capture one of the originals.
    """

    def __init__(self, others: dict[int, Any], checks_functions: bool) -> None:
        self._others, self._checks_functions = others, checks_functions
        #: Copied lists and dicts by ``id`` of the original, for shared and cyclic references.
        self._made: dict[int, Any] = {}

    def __call__(self, value: Any, name: str) -> Any:
        """Return the replica's value of an attribute.

        Args:
            value: The original's value.
            name: Name of the attribute, for the error message.

        Raises:
            ValueError: If functions are checked and the value is one that captures a module or tensor to be replaced.
        """
        for known in (self._others, self._made):
            if id(value) in known:
                return known[id(value)]
        if isinstance(value, MethodType):
            owner = self(value.__self__, name)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if isinstance(value, FunctionType):
            if self._checks_functions and self._is_held(value, set()):
                raise ValueError(
                    f"{name} has {value.__qualname__}, a function whose closure or defaults hold the module, one of its"
                    " submodules or buffers, so that every replica would use the first one's. Make it a method of the"
                    " module, or pass what it needs as an argument"
                )
            return value
        if isinstance(value, partial):
            parts = [self(part, name) for part in (value.func, *value.args, *value.keywords.values())]
            args, keywords = parts[1 : 1 + len(value.args)], parts[1 + len(value.args) :]
            return partial(parts[0], *args, **dict(zip(value.keywords, keywords, strict=True)))
        return self._container(value, name)

    def _container(self, value: Any, name: str) -> Any:
        if isinstance(value, (tuple, frozenset)):
            items = [self(item, name) for item in value]
            if all(mine is theirs for mine, theirs in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, (list, deque)):
            row: list[Any] | deque[Any] = copy.copy(value)
            self._made[id(value)] = row
            for index, item in enumerate(value):
                row[index] = self(item, name)
            return row
        if isinstance(value, set):
            return {self(item, name) for item in value}
        if not isinstance(value, dict):
            return value
        own: dict[Any, Any] = copy.copy(value)
        self._made[id(value)] = own
        for key, item in value.items():
            if (other := self(item, name)) is not item:
                own[key] = other
        keys = {key: self._others[id(key)] for key in value if id(key) in self._others}
        if keys:
            entries = [(keys.get(key, key), item) for key, item in own.items()]
            own.clear()
            own.update(entries)
        return own

    def _is_held(self, value: Any, seen: set[int]) -> bool:
        """Return whether a value is, or refers to, an object that the replica replaces."""
        if id(value) in self._others:
            return self._others[id(value)] is not value
        if id(value) in seen:
            return False
        seen.add(id(value))
        inside: list[Any] = []
        if isinstance(value, MethodType):
            inside = [value.__self__]
        elif isinstance(value, FunctionType):
            # Skip cells that are still empty.
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
            inside = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        elif isinstance(value, partial):
            inside = [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, dict):
            inside = [*value, *value.values()]
        elif isinstance(value, (list, tuple, deque, set, frozenset)):
            inside = list(value)
        return any(self._is_held(item, seen) for item in inside)


class ReplicaThreads:
    """Thread pool, one thread per device, that runs functions under the caller's grad mode, autocast and contextvars.

    Args:
        devices: Device of each thread.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = list(devices)
        self._pool = ThreadPoolExecutor(len(self.devices), thread_name_prefix="replica")

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Call functions in parallel, one per device, and wait for all of them.

        Raises:
            Exception: The exception of the first function that failed, with a note that names the replica.
        """
        modes = [_Modes(device) for device in self.devices[: len(functions)]]
        futures: list[Future[T]] = [
            self._pool.submit(contextvars.copy_context().run, mode.run, function)
            for mode, function in zip(modes, functions, strict=True)
        ]
        failures = [future.exception() for future in futures]
        for index, failure in enumerate(failures):
            if failure is not None:
                add_note(failure, f"On replica {index} of {len(functions)} ({self.devices[index]}).")
                raise failure
        return [future.result() for future in futures]

    def close(self) -> None:
        """Shut the threads down."""
        self._pool.shutdown()


class _Modes:
    """Snapshot of torch's thread-local modes in the thread that constructs it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._autocast = torch.autocast(
            device.type,
            enabled=torch.is_autocast_enabled(device.type),
            dtype=torch.get_autocast_dtype(device.type),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )

    def run(self, function: Callable[[], T]) -> T:
        """Call a function under these modes."""
        here = (
            nullcontext() if self._device.type == "cpu" else torch.get_device_module(self._device).device(self._device)
        )
        with here, torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad), self._autocast:
            return function()


class WeightedLoss(torch.autograd.Function):
    """Joint loss of the replicas with a given value; its gradient is passed to each loss times a factor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factors: tuple[Tensor, ...], *losses: Tensor) -> Tensor:
        """Return ``value``; each factor is on its loss's device."""
        ctx.factors = factors
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return each loss's gradient: the joint gradient times the loss's factor."""
        return None, None, *(grad.to(factor.device, factor.dtype) * factor for factor in ctx.factors)
