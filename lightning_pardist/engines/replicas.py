"""Replicas of a module in one process, one a device, and threads that run them side by side."""

from __future__ import annotations

import contextvars
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_pardist.compat.modules import TABLES, own_buffers, own_modules, own_parameters

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)


def replicate(module: M, device: torch.device, *, made: Callable[[nn.Module], None] | None = None) -> M:
    """A copy of a module for one more device, whose gradients reach the module's own parameters.

    On the device of a parameter the copy has the parameter itself; elsewhere a tensor copied from it, through which
    autograd goes back. Buffers are copies. Of other attributes the copy has the same objects, in lists, dicts and sets
    of its own; methods, modules and parameters among them are the copy's.

    Args:
        module: Plain.
        device: Where the copy computes.
        made: Called with each submodule of the copy, before anything else sees it.
    """
    others: dict[int, Any] = {}
    shells: list[nn.Module] = []
    for each in module.modules():
        # By the protocol of copies, since modules may hold what is bound to themselves.
        shell = copy.copy(each)
        # What a class leaves out of its pickles by None.
        left_out = {key: value for key, value in each.__dict__.items() if shell.__dict__.get(key, value) is None}
        shell.__dict__.update(left_out)
        for table in TABLES:
            shell.__dict__[table] = dict(each.__dict__[table])
        others[id(each)] = shell
        shells.append(shell)
    for each in shells:
        for tensors in (own_parameters(each), own_buffers(each)):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in others:
                    others[id(tensor)] = _copied(tensor, device, is_buffer=tensors is own_buffers(each))
                # Into the table itself: a tensor with a graph is no parameter, and takes its place all the same.
                tensors[name] = None if tensor is None else others[id(tensor)]
        children = own_modules(each)
        children.update({name: child and others[id(child)] for name, child in children.items()})
    for each in shells:
        for key, value in each.__dict__.items():
            if key not in TABLES:
                each.__dict__[key] = _of_copy(value, others)
        if made is not None:
            made(each)
    replica: M = others[id(module)]
    return replica


def _copied(tensor: Tensor, device: torch.device, *, is_buffer: bool) -> Tensor:
    if is_buffer:
        return tensor.detach().to(device, copy=True)
    return tensor if tensor.device == device else tensor.to(device)


def _of_copy(value: Any, others: dict[int, Any]) -> Any:
    """An attribute of the module as the copy has it."""
    if id(value) in others:
        return others[id(value)]
    if isinstance(value, MethodType) and id(value.__self__) in others:
        return MethodType(value.__func__, others[id(value.__self__)])
    if type(value) in (list, tuple, set):
        return type(value)([others.get(id(item), item) for item in value])
    if isinstance(value, dict):
        own = copy.copy(value)
        own.update({key: others[id(item)] for key, item in value.items() if id(item) in others})
        return own
    return value


class ReplicaThreads:
    """Threads that run functions side by side, under the modes of the thread that asks: gradients, autocast, context.

    Args:
        devices: One a thread.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = list(devices)
        self._pool = ThreadPoolExecutor(len(self.devices), thread_name_prefix="replica")

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Call functions, one a device, and wait for all of them.

        Raises:
            Exception: Of the first function that raised, with a note of the replica.
        """
        modes = [_Modes(device) for device in self.devices[: len(functions)]]
        futures: list[Future[T]] = [
            self._pool.submit(contextvars.copy_context().run, mode.run, function)
            for mode, function in zip(modes, functions, strict=True)
        ]
        failures = [future.exception() for future in futures]
        for index, failure in enumerate(failures):
            if failure is not None:
                # From Python 3.11 on.
                getattr(failure, "add_note", str)(f"On replica {index} of {len(functions)} ({self.devices[index]}).")
                raise failure
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


class _Modes:
    """What torch keeps for each thread, as it is in the thread that makes this."""

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
        here = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        with here, torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad), self._autocast:
            return function()


class WeighedLoss(torch.autograd.Function):
    """One loss out of the replicas': its value is given, and its gradient goes to each times a factor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factors: tuple[Tensor, ...], *losses: Tensor) -> Tensor:
        """The value; factors are on their losses' devices."""
        ctx.factors = factors
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """To each loss its share."""
        return None, None, *(grad.to(factor.device, factor.dtype) * factor for factor in ctx.factors)
