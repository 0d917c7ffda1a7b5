"""Dependency tracking for one recorded run: the sources (calls and parameters) of every tensor and every call.

Dependencies are tracked per operator, not in the autograd graph: a ``TorchDispatchMode`` intercepts every operator and
propagates the sources of its inputs to its outputs, per storage. Integer outputs, detached values and runs under
``no_grad`` are therefore included, and a unit depends on what its operators read, however the tensor reaches it: as an
argument, through a closure, or from an attribute that another unit has set.
"""

from __future__ import annotations

import os
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_pardist.compat.fake_tensors import TorchDispatchMode, pack_padded_sequence, schema_of, to_copy
from lightning_pardist.compat.tensors import storage_key
from lightning_pardist.engines.pipeline.flops import count_flops
from lightning_pardist.engines.pipeline.records import Escape, Read, Source, Value
from lightning_pardist.engines.pipeline.stubs import deciding_tensors, tensors_of

_NOTHING: frozenset[Source] = frozenset()
_LIBRARY_FRAMES = tuple(
    os.path.join(os.path.dirname(torch.__file__), part)
    for part in ("distributions", "nn", "linalg", "optim", "functional.py")
)
_SKIPPED_FRAMES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.abspath(__file__)) + os.sep)


class SourceTracker(TorchDispatchMode):
    """Tracks the sources of every storage, and the sources read by the current unit call.

    Args:
        root: The module; its parameters are sources, while a buffer written inside a unit carries no dependency.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.call: int | None = None
        self.num_calls = 0
        self.needs: set[Source] = set()
        self.flops = 0
        self.reads: list[Read] = []
        self.mutated: set[Value] = set()
        self.dynamic = False
        self.asked = False
        #: Whether backward is running inside the step; its operators are not tracked.
        self.in_backward = False
        self.free_parameters: set[str] = set()
        self.differentiated: set[str] = set()
        self.buffers_written: set[int] = set()
        self.written_in_units: set[int] = set()
        self._from_batch: set[int] = set()
        self._taint: dict[int, frozenset[Source]] = {}
        # Keeps all storages alive: the address of a freed one could be reused for another tensor.
        self._keep: dict[int, Any] = {}
        self._values_in: dict[int, set[Value]] = defaultdict(set)
        self._parameter_keys: set[int] = set()
        for name, parameter in root.named_parameters():
            key = self.storage_of(parameter)
            self._parameter_keys.add(key)
            self._taint[key] = self._taint.get(key, _NOTHING) | {name}
        self.buffer_keys = {self.storage_of(buffer) for buffer in root.buffers()}

    def note_batch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Mark tensors as part of the batch; values computed from them depend on samples."""
        self._from_batch |= {self.storage_of(tensor) for tensor in tensors}

    def is_from_batch(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor was computed from the batch."""
        return self.storage_of(tensor) in self._from_batch

    def is_written(self, buffer: torch.Tensor) -> bool:
        """Return whether a unit, one of its hooks or free code has written to a buffer."""
        return self.storage_of(buffer) in self.written_in_units | self.buffers_written

    def sources(self, tensor: torch.Tensor) -> frozenset[Source]:
        """Return the sources of a tensor."""
        return self._taint.get(self.storage_of(tensor), _NOTHING)

    def set_value(self, tensor: torch.Tensor, value: Value) -> None:
        """Register a tensor as an output of the call that has just ended."""
        key = self.storage_of(tensor)
        self._values_in[key].add(value)
        self._taint[key] = (self._taint.get(key, _NOTHING) - {Escape(value.call)}) | {value}

    def derive(self, made: Iterable[torch.Tensor], read: Iterable[torch.Tensor]) -> None:
        """Set the sources of tensors to those of others; inside a call, to that call's escape."""
        found = _NOTHING.union(*(self.sources(tensor) for tensor in read))
        inside = _NOTHING if self.call is None else frozenset({Escape(self.call)})
        for tensor in made:
            self._taint[self.storage_of(tensor)] = found if self.call is None else inside

    def note_differentiated(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record the parameters among the inputs that the step passes to ``torch.autograd.grad``."""
        own = (self.storage_of(tensor) for tensor in tensors)
        found = _NOTHING.union(*(self._taint[key] for key in own if key in self._parameter_keys))
        self.differentiated |= {source for source in found if isinstance(source, str)}

    def begin_call(self) -> int:
        """Begin a call of a unit, and return its index."""
        self.call = self.num_calls
        self.num_calls += 1
        self.needs = set()
        self.flops = 0
        return self.call

    def end_call(self) -> tuple[frozenset[Source], int]:
        """End the call, and return the sources that it read and its FLOPs."""
        needs, flops = frozenset(self.needs), self.flops
        self.call, self.flops = None, 0
        return needs, flops

    def note_read(self, tensors: Iterable[torch.Tensor], *, explicit: bool) -> None:
        """Record a read of tensor values, which stubs do not have."""
        found = _NOTHING.union(*(self.sources(tensor) for tensor in tensors))
        if self.call is not None:
            self.needs |= found - {Escape(self.call)}
        elif any(not isinstance(source, str) for source in found):
            line, is_user = _users_line()
            self.reads.append(Read(self.num_calls, found, line, explicit and is_user))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and propagate sources from its inputs to its outputs."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.in_backward:
            return result
        self.flops += count_flops(func, args, kwargs, result)
        deciding = deciding_tensors(func, args, kwargs)
        if deciding:
            self.dynamic = self.dynamic or torch.Tag.dynamic_output_shape in func.tags
            if self.call is None:
                self.note_read(deciding, explicit=self.asked and torch.Tag.data_dependent_output in func.tags)
        self._follow(func, list(tensors_of((args, kwargs))), list(tensors_of(result)), _written(func, args, kwargs))
        if func is pack_padded_sequence and self.call is None:
            self._taint[self.storage_of(result[1])] = self.sources(args[1])  # Batch sizes come from the lengths alone.
        return result

    def _follow(
        self, func: Any, read: list[torch.Tensor], made: list[torch.Tensor], overwritten: list[torch.Tensor]
    ) -> None:
        if not read:
            return
        self._follow_batch(read, (*made, *overwritten))
        before = {self.storage_of(tensor) for tensor in read}
        found = _NOTHING.union(*(self._taint.get(key, _NOTHING) for key in before))
        written = {self.storage_of(tensor) for tensor in overwritten}
        viewed = {key for key in (self.storage_of(tensor) for tensor in made) if key in before and key not in written}
        if made and len(viewed) == len({self.storage_of(tensor) for tensor in made}):
            return
        passed = self._forward_signal(func, before, found)
        for tensor in made:
            key = self.storage_of(tensor)
            if key not in before:
                self._taint[key] = passed
        for key in written:
            self._write(key, passed)

    def _follow_batch(self, read: Iterable[torch.Tensor], changed: Iterable[torch.Tensor]) -> None:
        if any(self.storage_of(tensor) in self._from_batch for tensor in read):
            self._from_batch |= {self.storage_of(tensor) for tensor in changed}

    def _forward_signal(self, func: Any, before: set[int], found: frozenset[Source]) -> frozenset[Source]:
        if self.call is None:
            self.free_parameters |= {source for source in found if isinstance(source, str)}
            return found
        inside = Escape(self.call)
        self.needs |= found - {inside}
        # Autocast caches its casts of parameters, which a later call of a tied or shared unit may use.
        if func is to_copy and before <= self._parameter_keys:
            return found
        return frozenset({inside})

    def _write(self, key: int, passed: frozenset[Source]) -> None:
        if key in self.buffer_keys:
            if self.call is None:
                self.buffers_written.add(key)
            else:
                self.written_in_units.add(key)
                return
        if self.call is None or Escape(self.call) not in self._taint.get(key, _NOTHING):
            self.mutated |= self._values_in[key]
        self._taint[key] = self._taint.get(key, _NOTHING) | passed

    def storage_of(self, tensor: torch.Tensor) -> int:
        """Return a key that is equal for tensors with the same storage, during the lifetime of this tracker."""
        try:
            storage: Any = tensor.untyped_storage()
            key = storage_key(storage)
        except (NotImplementedError, RuntimeError):
            storage, key = tensor, -id(tensor)  # Sparse and similar tensors have no storage.
        self._keep.setdefault(key, storage)
        return key


class ReadWatcher(TorchFunctionMode):
    """Reports to a tracker the function calls that read values or run backward without a visible operator."""

    def __init__(self, tracker: SourceTracker) -> None:
        super().__init__()
        self.tracker = tracker

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function, and report it if it copies values out of a tensor or computes gradients."""
        if func in _WAYS_OUT:
            self.tracker.note_read(tensors_of(args), explicit=True)
        before = self.tracker.asked, self.tracker.in_backward
        self.tracker.asked, self.tracker.in_backward = func in _QUESTIONS, before[1] or func in _BACKWARD
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            self.tracker.asked, self.tracker.in_backward = before
        if func is torch.autograd.grad:
            inputs = (kwargs or {}).get("inputs", args[1] if len(args) > 1 else ())
            self.tracker.note_differentiated(tensors_of(inputs))
            self.tracker.derive(tensors_of(result), tensors_of((args, kwargs or {})))
        return result


_QUESTIONS: frozenset[Any] = frozenset(
    {
        torch.Tensor.item,
        torch.Tensor.__bool__,
        torch.Tensor.__int__,
        torch.Tensor.__float__,
        torch.Tensor.__index__,
        torch.Tensor.__contains__,
        torch.Tensor.is_nonzero,
        torch.is_nonzero,
        torch.equal,
        torch.Tensor.equal,
        torch.allclose,
        torch.Tensor.allclose,
    }
)
_BACKWARD: frozenset[Any] = frozenset({torch.Tensor.backward, torch.autograd.grad})
_WAYS_OUT: frozenset[Any] = frozenset(
    {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.data_ptr}
)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the arguments that an operator writes to, by its schema."""
    schema = schema_of(func)
    if not schema.is_mutable:
        return []
    written: list[torch.Tensor] = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            written.extend(tensors_of(given))
    return written


def _users_line() -> tuple[str, bool]:
    """Return the innermost line of user code on the stack, and whether no library code of torch lies in between."""
    is_direct = True
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_SKIPPED_FRAMES):
            return f"{os.path.basename(frame.filename)}:{frame.lineno} ({(frame.line or '').strip()})", is_direct
        if frame.filename.startswith(_LIBRARY_FRAMES):
            is_direct = False
    return "unknown line", True
