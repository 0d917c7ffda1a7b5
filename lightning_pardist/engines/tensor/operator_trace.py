"""Operator trace of the user's step: torch function calls in order, with tensor metadata but no data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_pardist.compat import patches, pytree
from lightning_pardist.compat.tensors import below_torch_functions, in_transform
from lightning_pardist.engines.common.devices import device_in_use, preserve_random_state
from lightning_pardist.engines.common.parameter_write_guard import ParameterWriteGuard
from lightning_pardist.engines.tensor.calls import GLOBAL_PROPERTIES, LOCAL_PROPERTIES, plain_name

_NO_DATA = frozenset([
    "backward", "grad", "register_hook", "retain_grad", "format", "repr", "data_ptr", "deepcopy", "reduce_ex"
])  # fmt: skip


@dataclass(frozen=True)
class TraceSlot:
    """A tensor of the run; an overwritten tensor gets a new slot.

    Attributes:
        index: Its index in the trace.
        shape: Global shape.
        dtype: Element type.
        requires_grad: Whether a gradient flows back through it.
        name: Name if it is a parameter or buffer, else "".
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    name: str = ""


@dataclass(frozen=True, eq=False)
class Node:
    """One call of a torch function, with tensors replaced by :class:`TraceSlot`."""

    func: Callable[..., Any]
    name: str
    inplace: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    module: str


@dataclass
class OperatorTrace:
    """The calls of one step.

    Attributes:
        nodes: Calls in order.
        parameters: Parameters by name; tied ones once, under their first name.
        buffers: Buffers by name, likewise.
        aliases: Other names of tied parameters, by first name.
    """

    nodes: list[Node] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, list[str]] = field(default_factory=dict)


def trace_operators(module: nn.Module, step: Callable[[], Any]) -> OperatorTrace:
    """Run ``step`` once on a single process and record it.

    Parameters, buffers, gradients and random state are restored.

    Args:
        module: Plain module, not yet sharded.
        step: Calls the module as training does, up to the loss; may call backward.
    """
    found = OperatorTrace()
    for group, named in ((found.parameters, module.named_parameters), (found.buffers, module.named_buffers)):
        first: dict[int, str] = {}
        for name, tensor in named(remove_duplicate=False):
            if id(tensor) in first:
                found.aliases.setdefault(first[id(tensor)], []).append(name)
            else:
                first[id(tensor)] = name
                group[name] = tensor
    recorder = _Recorder(found)
    kept = ParameterWriteGuard(module)
    with _put_back(module), kept, _opaque_functions(recorder), recorder, _module_names(module, recorder):
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            step()
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
    return found


class _Recorder(TorchFunctionMode):
    def __init__(self, found: OperatorTrace) -> None:
        super().__init__()
        self.found = found
        self.slots: Any = WeakIdKeyDictionary()
        self.count = 0
        self.modules: list[str] = [""]
        for group in (found.parameters, found.buffers):
            for name, tensor in group.items():
                self._new(tensor, name)
        self.producers: dict[Any, TraceSlot] = {}

    def leave(self) -> None:
        """Record that a submodule has returned."""
        self.modules.pop()

    def _new(self, tensor: Tensor, name: str = "") -> TraceSlot:
        slot = TraceSlot(self.count, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, name)
        self.slots[tensor] = slot
        self.count += 1
        return slot

    def slot(self, tensor: Tensor) -> TraceSlot:
        found: TraceSlot | None = self.slots.get(tensor)
        if found is not None:
            return found
        slot = self._new(tensor)
        sources = self._untraced_sources(tensor)
        if sources:
            # Computed from known tensors by code that is not a torch function, such as a scripted function.
            self._append(_untraced, "(not a torch function)", False, tuple(sources), {}, slot)
        return slot

    def _untraced_sources(self, tensor: Tensor) -> list[TraceSlot]:
        queue, seen, found = [tensor.grad_fn], set(), []
        while queue:
            function = queue.pop()
            if function is None or function in seen:
                continue
            seen.add(function)
            if function in self.producers:
                found.append(self.producers[function])
            else:
                queue.extend(parent for parent, _ in function.next_functions)
        return found

    def _append(self, func: Any, name: str, inplace: bool, args: Any, kwargs: Any, out: Any) -> None:
        self.found.nodes.append(Node(func, name, inplace, args, kwargs, out, self.modules[-1]))

    def record(self, func: Any, name: str, inplace: bool, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        slots = pytree.tree_map_only(Tensor, self.slot, (args, kwargs))
        result = run()
        if inplace and args and isinstance(args[0], Tensor):
            out: Any = self._new(args[0], self.slots[args[0]].name)
        else:
            out = pytree.tree_map_only(Tensor, self._result, result)
        self._append(func, name, inplace, slots[0], slots[1], out)
        for tensor in pytree.tree_leaves(args[0] if inplace and args else result):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                self.producers[tensor.grad_fn] = self.slots[tensor]
        return result

    def _result(self, tensor: Tensor) -> TraceSlot:
        # A function may return its own argument, as contiguous() does.
        found: TraceSlot | None = self.slots.get(tensor)
        return found if found is not None else self._new(tensor)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, inplace = plain_name(func)
        looked_at = name.startswith(("get:", "set:", "delete:")) and name not in ("get:T", "get:mT", "get:data")
        if looked_at or name in GLOBAL_PROPERTIES or name in LOCAL_PROPERTIES or name in _NO_DATA:
            return func(*args, **kwargs)
        if in_transform():
            raise RuntimeError(
                "The step computes inside of a transform of torch.func (vmap, grad, jacrev), where tensors cannot be"
                " split over ranks. Use pardist_ddp or pardist_zero3."
            )
        return self.record(func, name, inplace, args, kwargs, lambda: func(*args, **kwargs))


def _untraced(*args: Any) -> None:
    """Represent code in a trace that torch functions cannot intercept."""


def _opaque_functions(recorder: _Recorder) -> AbstractContextManager[None]:
    """Record custom autograd functions as one call; torch's own, as for activation checkpointing, are transparent."""

    def call(cls: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if cls.__module__.startswith("torch."):
            return apply(*args, **kwargs)

        def run() -> Any:
            with below_torch_functions():
                return apply(*args, **kwargs)

        return recorder.record(cls.apply, cls.__name__, False, args, kwargs, run)

    return patches.custom_functions(call)


@contextmanager
def _module_names(module: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Keep the name of the running submodule in the recorder."""
    handles = []
    for name, child in module.named_modules():
        handles.append(child.register_forward_pre_hook(lambda *_, name=name: recorder.modules.append(name)))
        handles.append(child.register_forward_hook(lambda *_: recorder.leave(), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _put_back(module: nn.Module) -> Iterator[None]:
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    grads = [(parameter, parameter.grad) for parameter in module.parameters()]
    kept = [None if grad is None else grad.clone() for _, grad in grads]
    with preserve_random_state(device_in_use()):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, buffer in module.named_buffers():
                    # A forward may replace a buffer by one for its batch's size.
                    if name in buffers and buffer.shape == buffers[name].shape:
                        buffer.copy_(buffers[name])
                for (parameter, _), grad in zip(grads, kept, strict=True):
                    parameter.grad = grad
