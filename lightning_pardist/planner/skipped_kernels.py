"""Training steps whose operators return tensors of the right shape and compute nothing.

Every tensor is a real CPU tensor, indistinguishable to engines, autograd and user code. Kernels do not run, and memory
that is never written is address space only: the system maps a page on its first write. Shapes of results come from
torch's fake tensors, once for each combination of shapes.

Code that reads values (``lengths.tolist()``, ``mask.any()``) mostly reads the batch, or numbers set just before.
Operators are therefore computed as long as all of their inputs are known and small. Results that depend on parameters
are unknown, and reading them returns a value with which a step continues: 1 for numbers, False for conditions, True for
"are they equal" and "are they all". Such reads by user code are recorded.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pardist.compat.fake_tensors import (
    FakeTensor,
    FakeTensorMode,
    UncompiledMode,
    index_put_impl,
    is_wrapper,
    local_scalar,
    no_modes,
    rnn_layer,
    schema_of,
    storage_key,
    to_copy,
)
from lightning_pardist.planner.arguments import group_in, is_view, map_leaves, received_by, tensors_in, written_by
from lightning_pardist.planner.exchange import Exchange
from lightning_pardist.planner.value_counts import ValueCounts

_aten = torch.ops.aten
#: Operators on known values are computed up to this number of elements.
_LARGEST = 1 << 20
#: Unknown tensors of up to this number of elements are filled with a constant, for code that bypasses the dispatcher.
_FILLED = 1024
#: The same for views of larger tensors.
_PART = 64
_QUESTIONS = {_aten.equal.default: True, _aten.allclose.default: True, _aten.is_nonzero.default: False}
_ALL = (_aten.all.default, _aten.all.dim, _aten.isclose.default, _aten.isfinite.default)
_OVERWRITING = (_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default, _aten.copy_.default)
#: Operators that run on small unknown tensors, so that their results keep the constants.
_CARRYING = (_aten.cat.default, _aten.stack.default, to_copy, _aten.clone.default)
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, index_put_impl)
_EMPTY = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
#: Sizes and strides of operators' results, by operator and arguments.
Forms = dict[Any, Any]
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
#: Collectives that torch's fake group executes on this rank's memory.
_COPYING = (
    *("_allgather_base_", "allgather_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "gather_"),
    *("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_", "scatter_"),
    *("alltoall_", "alltoall_base_"),
)
#: Functional collectives, which return new tensors.
_CLONING = (
    *("all_gather_into_tensor", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor"),
    *("reduce_scatter_tensor_coalesced", "all_to_all_single", "all_reduce", "all_reduce_coalesced", "broadcast"),
)
_OWN_CODE = ("torch", "lightning", "lightning_pardist", "torchmetrics", "contextlib", "functools", "threading")


class SkippedKernels(UncompiledMode):
    """Mode in which operators return tensors of the right shape, and compute only small tensors with known values.

    Args:
        forms: Cache of the shapes of operators' results by arguments, shared with other traces.
        exchange: Message interface that delivers messages between ranks that are traced together.

    Attributes:
        looked_at: Places at which user code read unknown values: file and line.
    """

    def __init__(self, forms: Forms | None = None, exchange: Exchange | None = None) -> None:
        super().__init__()
        self.looked_at: dict[str, None] = {}
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        # Results are cached in `forms` instead, which is shared by all traces.
        self._fake_mode.cache_enabled = False
        self._unknown: dict[int, bool] = {}
        self._counts = ValueCounts(self._made)
        self._exchange = exchange
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._results: Forms = {} if forms is None else forms

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Mark tensors as having unknown values."""
        for tensor in tensors:
            self._is_unknown(tensor, True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_in(args, kwargs)
        if any(isinstance(leaf, FakeTensor) for leaf in inputs):
            return func(*args, **kwargs)
        if any(is_wrapper(leaf) for leaf in inputs):
            # A DTensor dispatches operators on its local tensor, which reach this mode.
            return NotImplemented
        if func.namespace in _COLLECTIVES:
            return self._communicate(func, args, kwargs, inputs)
        known = not any(storage_key(leaf) in self._unknown for leaf in inputs)
        if func is local_scalar:
            return func(*args, **kwargs) if known else self._answer(inputs[0])
        if func in _QUESTIONS and not known:
            self._note_value_read()
            return _QUESTIONS[func]
        if is_view(func):
            result = func(*args, **kwargs)
            if not known:
                self._fill_parts(result, inputs)
            return result
        small = sum(leaf.numel() for leaf in inputs) <= _LARGEST
        if any(leaf.is_meta for leaf in inputs) or kwargs.get("device") == _META:
            return func(*args, **kwargs)
        if known and small and (inputs or self._makes_little(func, args, kwargs)):
            result = func(*args, **kwargs)
            if func.overloadpacket.__name__ in _EMPTY:
                self.forget([result])
            return result
        overwritten = func in _OVERWRITING and small and self._covers(inputs[0])
        if overwritten and not any(storage_key(leaf) in self._unknown for leaf in inputs[1:]):
            self._unknown.pop(storage_key(inputs[0]), None)
            return func(*args, **kwargs)
        if func in _CARRYING and sum(leaf.numel() for leaf in inputs) <= _FILLED:
            result = func(*args, **kwargs)
            self.forget([result])
            return result
        return self._skip(func, args, kwargs, inputs)

    @staticmethod
    def _fill_parts(result: Any, inputs: list[Tensor]) -> None:
        """Write values into small parts of large tensors, because ``tolist()`` bypasses the dispatcher."""
        if inputs and inputs[0].numel() <= _FILLED:
            return
        if isinstance(result, (list, tuple)) and len(result) > _PART:
            parts = inputs[:1] if result[0].numel() <= _PART and inputs[0].numel() <= _LARGEST else []
        else:
            parts = [leaf for leaf in tensors_in(result) if leaf.numel() <= _PART]
        for leaf in parts:
            with no_modes():
                # Bypasses autograd's version counter.
                leaf.data.fill_(leaf.dtype != torch.bool)

    # --- operators that do not run ------------------------------------------------------------------------------

    def _skip(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        counted = self._counts.counted(func, args)
        if counted is not None:
            return counted
        if func in _INDEXING and any(isinstance(each, Tensor) and each.dtype == torch.bool for each in args[1]):
            args = self._counts.positions(args, lambda each: storage_key(each) in self._unknown)
            inputs = tensors_in(args, kwargs)
        key = (func, _key(args), _key(kwargs))
        form = self._results.get(key)
        if form is None:
            form = self._results[key] = self._form(func, args, kwargs)
        if schema_of(func).is_mutable:
            self.forget(written_by(func, args, kwargs))
        yes = func in _ALL

        def make(leaf: Any) -> Any:
            if isinstance(leaf, _Input):
                return inputs[leaf.index]
            if isinstance(leaf, _Output):
                made = _unwritten(leaf)
                self._is_unknown(made, yes)
                if made.numel() <= _FILLED:
                    made.fill_(1 if yes or made.dtype != torch.bool else 0)
                return made
            return leaf

        result = map_leaves(make, form)
        self._counts.note(func, args, kwargs, result)
        return result

    def _made(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = torch.empty(shape, dtype=dtype)
        self.forget([made])
        return made

    def _form(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return sizes and strides of an operator's results, from torch's fake tensors."""
        if func.overloadpacket.__name__.startswith("_foreach_"):
            firsts, alike = _rows(args)
            if len(firsts) < len(alike):
                few = tuple([each[row] for row in firsts] if _is_list(each) else each for each in args)
                form = self._form(func, few, kwargs)
                return [form[row] for row in alike] if form else form
        fakes: list[Any] = []
        asked = func is rnn_layer

        def fake(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                made = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=leaf.device)
                made = torch.zeros_like(made) if asked else made
                fakes.append(made)
                return made
            return leaf

        # An RNN layer runs once on zeros, because fake tensors omit the workspace that it keeps for backward. Operators
        # that fake tensors refuse run once as well: a kernel may accept more dtypes than its shape function does.
        try:
            with no_modes(), nullcontext() if asked else self._fake_mode:
                result = func(*map_leaves(fake, args), **map_leaves(fake, kwargs))
        except (RuntimeError, NotImplementedError):
            if asked:
                raise
            asked = True
            fakes.clear()
            with no_modes():
                result = func(*map_leaves(fake, args), **map_leaves(fake, kwargs))
        places = {id(made): index for index, made in enumerate(fakes)}

        def described(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) in places:
                return _Input(places[id(leaf)])
            return _Output(tuple(leaf.size()), tuple(leaf.stride()), leaf.dtype)

        return map_leaves(described, result)

    # --- unknown values -----------------------------------------------------------------------------------------

    def _is_unknown(self, tensor: Tensor, yes: bool) -> None:
        key = storage_key(tensor)
        if key not in self._unknown:
            self._watched[key] = weakref.ref(tensor.untyped_storage(), partial(self._gone, key))
        self._unknown[key] = yes

    def _gone(self, key: int, storage: Any) -> None:
        if self._watched.get(key) is storage:
            del self._watched[key]
            self._unknown.pop(key, None)
            self._counts.forget(key)

    def _makes_little(self, func: Any, args: Any, kwargs: Any) -> bool:
        key = (func, _key(args), _key(kwargs))
        form = self._results.get(key)
        if form is None:
            form = self._results[key] = self._form(func, args, kwargs)
        sizes: list[int] = []
        map_leaves(lambda leaf: sizes.append(_numel(leaf.size) if isinstance(leaf, _Output) else 0), form)
        return max(sizes, default=0) <= _LARGEST

    @staticmethod
    def _covers(tensor: Tensor) -> bool:
        return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()

    def _answer(self, tensor: Tensor) -> Any:
        self._note_value_read()
        if tensor.dtype == torch.bool:
            return self._unknown[storage_key(tensor)]
        return 1.0 if tensor.is_floating_point() else 1

    def _note_value_read(self) -> None:
        frame: Any = sys._getframe(2)
        while frame is not None:
            name = frame.f_globals.get("__name__", "")
            package = name.partition(".")[0]
            own = package == "lightning_pardist" and name != __name__ and not name.endswith((".ledger", ".arguments"))
            if own:
                # Read by an engine or the planner, not by user code.
                return
            if package not in _OWN_CODE:
                self.looked_at[f"{frame.f_code.co_filename}:{frame.f_lineno}"] = None
                return
            frame = frame.f_back

    def _communicate(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        """Simulate a collective: untraced ranks are assumed to hold the same tensors as this rank."""
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and name in _COPYING:
            result = self._as_if_sent(func, args)
        elif name in _CLONING and any(storage_key(leaf) in self._unknown for leaf in inputs):
            return self._skip(func, args, kwargs, inputs)
        else:
            result = func(*args, **kwargs)
        if self._exchange is not None and name in ("send", "recv_"):
            self._deliver(name, args)
            return result
        if name in ("allreduce_", "broadcast_", "barrier", "wait_tensor", "all_reduce", "all_reduce_", "broadcast"):
            return result
        outputs = received_by(func, args, kwargs, result)
        sources = [leaf for leaf in inputs if not any(leaf is other for other in outputs)]
        one = sources[0] if len(sources) == 1 else None
        if one is not None and (storage_key(one) in self._unknown or not one.numel()):
            one = None
        for leaf in outputs:
            small = leaf.numel() <= _LARGEST and leaf.is_contiguous()
            if one is not None and small and leaf.numel() % one.numel() == 0:
                with no_modes(), torch.no_grad():
                    leaf.view(-1, one.numel()).copy_(one.reshape(1, -1))
                self._unknown.pop(storage_key(leaf), None)
            else:
                self.forget([leaf])
        return result

    @staticmethod
    def _as_if_sent(func: Any, args: Any) -> Any:
        """Return a collective's result without the copies between ranks that torch's fake group would make."""
        group = next(leaf for leaf in args if isinstance(leaf, torch.ScriptObject) and group_in([leaf]) is not None)
        with no_modes():
            work = torch.ops.c10d.send([torch.empty(0)], group, 0, 0)
        return work if len(schema_of(func).returns) == 1 else (args[0], work)

    def _deliver(self, name: str, args: Any) -> None:
        (tensors, group, peer, tag), exchange = args[:4], self._exchange
        other = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))[peer]
        for tensor in tensors:
            if exchange is None or not exchange.is_traced(other):
                self.forget([tensor] if name == "recv_" else [])
            elif name == "send":
                known = storage_key(tensor) not in self._unknown and tensor.numel() <= _LARGEST
                with no_modes(), torch.no_grad():
                    exchange.put(other, tag, tensor.clone() if known else None)
            elif (content := exchange.take(other, tag)) is None:
                self.forget([tensor])
            else:
                with no_modes(), torch.no_grad():
                    tensor.copy_(content)
                self._unknown.pop(storage_key(tensor), None)


class _Input:
    """Form of a result that is one of the arguments."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Output:
    """Form of a new tensor that an operator returns."""

    def __init__(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
        self.size, self.stride, self.dtype = size, stride, dtype


_META = torch.device("meta")
#: Linux flag for memory that is not reserved before it is written.
_MAP_NORESERVE = 0x4000


def _unwritten(output: _Output) -> Tensor:
    """Return an uninitialised tensor; one that exceeds the machine's memory is mapped without reserving it."""
    try:
        return torch.empty_strided(output.size, output.stride, dtype=output.dtype)
    except RuntimeError:
        if sys.platform != "linux":
            raise
        last = sum((size - 1) * step for size, step in zip(output.size, output.stride, strict=True))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        space = mmap.mmap(-1, (last + 1) * output.dtype.itemsize, flags=flags)
        return torch.frombuffer(space, dtype=output.dtype).as_strided(output.size, output.stride)


def _key(value: Any) -> Any:
    """Return a hashable key of an argument, equal for equal calls; 1, 1.0 and True differ."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(each)) for name, each in value.items())
    # Sizes do not depend on the value of a float argument.
    return type(value) if type(value) is float else (type(value), value)


def _rows(args: Any) -> tuple[list[int], list[int]]:
    """For a foreach operator, return the index of the first tensor of each kind, and the kind of each tensor."""
    kinds: dict[Any, int] = {}
    firsts: list[int] = []
    alike: list[int] = []
    for index, kind in enumerate(zip(*(map(_key, each) for each in args if _is_list(each)), strict=True)):
        if kind not in kinds:
            kinds[kind] = len(firsts)
            firsts.append(index)
        alike.append(kinds[kind])
    return firsts, alike


def _is_list(argument: Any) -> bool:
    return isinstance(argument, (list, tuple))


def _numel(size: tuple[int, ...]) -> int:
    total = 1
    for each in size:
        total *= each
    return total
