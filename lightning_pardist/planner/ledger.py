"""Record of a rank's memory, computation and messages per operator, for real and for fake tensors."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pardist.compat.autograd_graph import kind_of
from lightning_pardist.compat.fake_tensors import FakeTensor, UncompiledMode, is_wrapper, key_of, schema_of, storage_key
from lightning_pardist.compat.patches import replace_recurrent
from lightning_pardist.engines.pipeline.flops import count_flops
from lightning_pardist.planner.arguments import group_in, is_view, received_by, tensors_in, written_by

#: Kinds of memory, in display order.
KINDS = ("parameters", "gradients", "optimizer", "activations", "other")


@dataclass(eq=False, slots=True)
class Block:
    """One tensor storage.

    Attributes:
        size: Current size in bytes.
        kind: One of :data:`KINDS`.
        key: Number of the storage; unlike its address, that of no other one.
    """

    size: int
    kind: str
    key: int


@dataclass(slots=True)
class Operator:
    """One executed operator.

    Attributes:
        name: Name of the operator.
        flops: Floating point operations; a multiply-add counts as two.
        moved: Bytes read and written.
        dtype: Dtype of the computation.
        reads: Keys of the storages that it reads.
        writes: Keys of the storages that it writes.
        updates: Whether it belongs to an optimizer's update, instead of forward and backward.
        inner: Whether C++ code issues it, one of many of a recurrent layer.
    """

    name: str
    flops: int
    moved: int
    dtype: torch.dtype
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    updates: bool = False
    inner: bool = False

    @property
    def is_quick(self) -> bool:
        """Whether the host issues it without Python code between it and the operator before."""
        return self.updates or self.inner


@dataclass(slots=True)
class Message:
    """One collective or point-to-point message.

    Attributes:
        name: Name of the operator.
        ranks: Participating global ranks.
        size: Bytes of its inputs or outputs, whichever are larger: an all-gather's output, a reduce-scatter's input.
        touches: Keys of the storages that it reads and writes.
        peer: For a point-to-point message the other rank's index in the group; -1 for a collective.
    """

    name: str
    ranks: tuple[int, ...]
    size: int
    touches: tuple[int, ...]
    peer: int = -1


@dataclass(slots=True)
class HostStep:
    """Optimizer step on the host, for which the device waits.

    Attributes:
        moved: Bytes of host memory that it reads and writes.
        copied: Bytes copied between host and device in the whole step.
        operators: Number of operators that it issues.
    """

    moved: int
    copied: int
    operators: int


@dataclass(frozen=True, slots=True)
class HostWork:
    """Work of the host that issues nothing, between operators.

    Attributes:
        operators: Its duration, in operators that the host issues in this time.
    """

    operators: float


@dataclass(slots=True)
class FileTransfer:
    """Transfer of optimizer state from a file for the step and back.

    Attributes:
        moved: Bytes read and written.
    """

    moved: int


@dataclass
class Held:
    """Bytes held by kind at one moment.

    Attributes:
        by_kind: Bytes of each of :data:`KINDS`.
        peak: Sum over all kinds.
    """

    by_kind: dict[str, int]
    peak: int = field(init=False)

    def __post_init__(self) -> None:
        self.peak = sum(self.by_kind.values())


#: A change of memory is a tuple of a block and a number of bytes.
Event = Operator | Message | HostStep | HostWork | FileTransfer | tuple[Block, int]
#: An operator on a pipeline's stubs, which computes nothing. Views count, too: they run in Python like others.
STUBBED = HostWork(1.0)


class Ledger(UncompiledMode):
    """Dispatch mode that tracks all storages of this thread and records operators and messages.

    Attributes:
        now: Current bytes of all storages.
        recording: Whether events are recorded.
        updates: Whether operators belong to an optimizer's update from now on.
        events: Operators, messages, and changes of memory as ``(block, bytes)``, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.recording = False
        self.updates = False
        self.events: list[Event] = []
        self._blocks: dict[int, Block] = {}
        self._numbers = count()
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        #: Number of recurrent functions, or of their nodes in backward, that are running, and whether one of these
        #: nodes was the last to run: autograd then adds up its results.
        self._recurrent = 0
        self._left_node = False

    def __enter__(self) -> Ledger:
        if not _ledgers:
            _restores.append(replace_recurrent(_recurrent_noted))
        _ledgers.setdefault(threading.get_ident(), []).append(self)
        if torch.UntypedStorage.resize_ is not _resize_noted:
            torch.UntypedStorage.resize_ = _resize_noted  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        mine = _ledgers[threading.get_ident()]
        mine.remove(self)
        if not mine:
            del _ledgers[threading.get_ident()]
        if not _ledgers:
            torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
            _restores.pop()()

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Update the size of a resized storage; ``fully_shard`` frees and allocates storages by resizing them."""
        block = self._note_storage(storage)
        if block.kind == "activations":
            block.kind = "other"

    def run_recurrent(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function whose operators, and those of its backward, C++ code issues."""
        self._recurrent += 1
        try:
            results = function(*args)
        finally:
            self._recurrent -= 1
        given = {leaf.grad_fn for leaf in tensors_in(args)}
        waiting = [leaf.grad_fn for leaf in tensors_in(results if isinstance(results, tuple) else (results,))]
        seen = set(given)
        while waiting:
            node = waiting.pop()
            if node is None or node in seen or kind_of(node) == "AccumulateGrad":
                continue
            seen.add(node)
            node.register_prehook(self._begin_node)
            node.register_hook(self._end_node)
            waiting += [child for child, _ in node.next_functions]
        return results

    def _begin_node(self, grads: Any) -> None:
        self._recurrent += 1

    def _end_node(self, into: Any, out: Any) -> None:
        self._recurrent -= 1
        self._left_node = True

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Track tensors that were created before the mode was entered."""
        for tensor in tensors:
            self._note(tensor)

    def name(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Set the kind of tensors whose kind is still activations or other."""
        for tensor in tensors:
            block = self._note(tensor)
            if block is not None and block.kind in ("activations", "other"):
                block.kind = kind

    def name_remaining(self, kind: str) -> None:
        """Set the kind of all current storages that are still counted as activations."""
        for block in self._blocks.values():
            if block.kind == "activations":
                block.kind = kind

    def start(self) -> None:
        """Start recording events."""
        self.events = [(block, block.size) for block in self._blocks.values()]
        self.recording = True

    def stop(self) -> None:
        """Stop recording events."""
        self.recording = False

    def at_peak(self, away: Sequence[str] = (), until: int | None = None) -> tuple[Held, int]:
        """Return the bytes held at the peak, and the index of the event that caused it.

        Args:
            away: Kinds to ignore, because they are stored elsewhere.
            until: Index of the event at which the search ends; all events if None.
        """
        now = most = where = 0
        for index, event in enumerate(self.events[:until]):
            if isinstance(event, tuple) and event[0].kind not in away:
                now += event[1]
                if now > most:
                    most, where = now, index
        kinds = dict.fromkeys(KINDS, 0)
        for event in self.events[: where + 1]:
            if isinstance(event, tuple) and event[0].kind not in away:
                kinds[event[0].kind] += event[1]
        return Held(kinds), where

    def held_before(self, kinds: Sequence[str], index: int) -> dict[str, int]:
        """Return the bytes of some kinds before an event."""
        found = dict.fromkeys(kinds, 0)
        for event in self.events[:index]:
            if isinstance(event, tuple) and event[0].kind in found:
                found[event[0].kind] += event[1]
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_in(args, kwargs)
        if any(is_wrapper(leaf) for leaf in inputs):
            # A DTensor dispatches operators on its local tensor, which are recorded.
            return NotImplemented
        result = func(*args, **kwargs)
        if any(isinstance(leaf, FakeTensor) for leaf in (*inputs, result)):
            if self.recording:
                self.events.append(STUBBED)
            return result
        if is_view(func):
            # All views share one storage, and a chunk over many ranks returns many of them.
            self.note([result] if isinstance(result, Tensor) else result[:1])
            return result
        outputs = [leaf for leaf in tensors_in(result) if not is_wrapper(leaf)]
        for leaf in outputs:
            self._note(leaf)
        if self.recording:
            if func.namespace in ("c10d", "_c10d_functional"):
                self._send(func, args, inputs, outputs or received_by(func, args, kwargs, result))
            else:
                self._compute(func, args, kwargs, result, inputs, outputs)
        return result

    def _compute(
        self, func: Any, args: Any, kwargs: Any, result: Any, inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        mutable = schema_of(func).is_mutable
        if mutable:
            # A mutable operator may write tensors that it does not return.
            known = {id(leaf) for leaf in outputs}
            outputs = [*outputs, *(leaf for leaf in written_by(func, args, kwargs) if id(leaf) not in known)]
        reads = tuple({self._key(leaf): None for leaf in inputs})
        writes = tuple({self._key(leaf): None for leaf in outputs})
        if not mutable and all(key in reads for key in writes):
            return
        if func in _FREE:
            return
        moved = _moved(func, inputs, outputs)
        dtype = next((leaf.dtype for leaf in (*outputs, *inputs) if leaf.is_floating_point()), torch.int64)
        flops = count_flops(func, args, kwargs, result)
        self._left_node &= func is torch.ops.aten.add.Tensor
        inner = self._recurrent > 0 or self._left_node
        self.events.append(Operator(str(func), flops, moved, dtype, reads, writes, self.updates, inner))

    def _send(self, func: Any, args: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        name = func.overloadpacket.__name__
        if name == "wait_tensor":
            return
        group = group_in(args)
        if group is None:
            return
        written = {id(leaf) for leaf in outputs}
        size = max(_bytes(outputs), _bytes(leaf for leaf in inputs if id(leaf) not in written))
        touches = tuple({self._key(leaf): None for leaf in (*inputs, *outputs)})
        peer = next((leaf for leaf in args if isinstance(leaf, int)), -1) if name in ("send", "recv_") else -1
        ranks = tuple(dist.get_process_group_ranks(group))
        for leaf in (*inputs, *outputs) if name not in ("send", "recv_") else ():
            block = self._blocks.get(storage_key(leaf))
            if block is not None and block.kind == "activations":
                block.kind = "other"
        self.events.append(Message(name, ranks, size, touches, peer))

    def _key(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage; negative for one that was created before the mode was entered."""
        address = storage_key(tensor)
        block = self._blocks.get(address)
        return -address if block is None else block.key

    def _note(self, tensor: Tensor) -> Block | None:
        if is_wrapper(tensor) or tensor.is_meta or tensor.layout != torch.strided or isinstance(tensor, FakeTensor):
            return None
        return self._note_storage(tensor.untyped_storage())

    def _note_storage(self, storage: torch.UntypedStorage) -> Block:
        key = key_of(storage)
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = Block(0, "activations", next(self._numbers))
            self._watched[key] = weakref.ref(storage, partial(self._forget, key))
        change = storage.nbytes() - block.size
        if change:
            block.size += change
            self._changed(block, change)
        return block

    def _forget(self, key: int, gone: Any) -> None:
        if self._watched.get(key) is not gone:
            return
        del self._watched[key]
        block = self._blocks.pop(key, None)
        if block is not None and block.size:
            self._changed(block, -block.size)

    def _changed(self, block: Block, change: int) -> None:
        self.now += change
        if self.recording:
            self.events.append((block, change))


def _recurrent_noted(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any) -> Any:
        mine = _ledgers.get(threading.get_ident())
        return mine[-1].run_recurrent(function, *args) if mine else function(*args)

    return run


#: Restores what is replaced while ledgers are active.
_restores: list[Callable[[], None]] = []
_resize = torch.UntypedStorage.resize_
#: Active ledgers by thread.
_ledgers: dict[int, list[Ledger]] = {}


def _resize_noted(storage: torch.UntypedStorage, size: int) -> Any:
    result = _resize(storage, size)
    for ledger in _ledgers.get(threading.get_ident(), ()):
        ledger.resized(storage)
    return result


_FREE = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)


#: Operators that read only the rows of their first argument that they return.
_PICKING = ("embedding", "index_select", "index", "gather")
#: Operators that write to their first argument without reading it.
_OVERWRITING = ("copy_", "fill_", "zero_")


def _moved(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Return the bytes that an operator reads and writes."""
    name = func.overloadpacket.__name__
    if name in _OVERWRITING:
        inputs = inputs[1:]
    elif name in _PICKING:
        inputs = [*outputs, *inputs[1:]]
    return _bytes((*inputs, *outputs))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tensors)
