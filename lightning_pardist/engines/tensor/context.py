"""Context parallelism: activations sharded along the sequence, parameters replicated.

User code runs on replicated tensors until an operator whose input has one entry per token (an embedding, a linear layer
or a norm). There the input is sharded along the sequence and becomes a
:class:`~lightning_pardist.engines.tensor.split_tensor.SequenceTensor` of global shape. Token ids, masks and positions
stay replicated because they are small.

The choice of the sharded dim affects cost only: the sharding rules preserve the single-process result for any dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_pardist.compat import pytree
from lightning_pardist.compat.fake_tensors import FakeTensor
from lightning_pardist.compat.tensors import gradient_hooks_of
from lightning_pardist.engines.tensor.calls import NoRule, plain_name
from lightning_pardist.engines.tensor.dispatch import TensorRuntime, opened_parameter
from lightning_pardist.engines.tensor.layout import Layout, uneven_layout
from lightning_pardist.engines.tensor.rows import Arguments, Rows, TakenRows
from lightning_pardist.engines.tensor.rules_shape import viewed
from lightning_pardist.engines.tensor.split_tensor import SequenceTensor

_LOOK_UPS = frozenset([F.embedding])
_LAYERS = frozenset([F.linear, F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm])


@dataclass(frozen=True)
class Entry:
    """A place at which replicated tensors are sharded.

    Attributes:
        operator: Plain name of the torch function.
        dims: Number of dims of its input.
        dim: The dim that is sharded.
    """

    operator: str
    dims: int
    dim: int


class ContextRuntime(TensorRuntime):
    """Runs the user's step on activations that are sharded over the ranks of a context group.

    Args:
        mesh: One-dimensional mesh of the context ranks.
        sequence_dim: The sequence dim of token ids and of layer inputs (whose last dim holds the features); the longest
            dim if None.

    Attributes:
        entries: Places at which replicated tensors were sharded since the start, with the latest extent.
        taken_over: Extent of tensors received already sharded from another pipeline stage, by number of dims and
            sharded dim.
    """

    kind = SequenceTensor
    kinds: tuple[type, ...] = (SequenceTensor, DTensor)
    context = True
    remedy = "Write into a new tensor (x = x * y, not x *= y), or use pardist_tp, pardist_ddp or pardist_zero3."
    split_over = "context"

    def __init__(self, mesh: DeviceMesh, *, sequence_dim: int | None = None) -> None:
        super().__init__(mesh)
        self.sequence_dim = sequence_dim
        #: Whether the tensors are sharded over tensor ranks first (context parallelism nested in tensor parallelism).
        self.is_inside = False
        self.entries: dict[Entry, int] = {}
        self.taken_over: dict[tuple[int, int], int] = {}
        self._extents: frozenset[int] = frozenset()
        self._first: tuple[tuple[int, ...], int] | None = None
        #: Number of active regions that run on full tensors: custom autograd functions (either pass), expert layers.
        self._in_custom = 0

    def nest(self) -> None:
        """Shard the local parts of tensor-parallel tensors, and leave parameters to the tensor runtime."""
        self.is_inside = True
        self.kinds = (SequenceTensor,)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Context manager for code that runs on full tensors: nothing is sharded inside."""
        self._in_custom += 1
        try:
            yield
        finally:
            self._in_custom -= 1

    def expect(self, batch: Any) -> None:
        """Record the possible sequence lengths of the coming step from the tensors of ``batch``. Not collective."""
        shapes = [leaf.shape for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
        behind = {extent for shape in shapes for extent in shape[1:]}
        extents = behind or {shape[0] for shape in shapes}
        # Inputs may be one shorter than the batch: a language model's inputs and targets are shifted by one.
        self._extents = frozenset([*extents, *(extent - 1 for extent in extents)])

    def _forget(self) -> None:
        super()._forget()
        self._first = None
        self._in_custom = 0

    @override
    def custom_function(self, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a custom autograd function without sharding anything in its forward or its backward.

        Tensors that it saves for its backward, or recomputes there, are leaves of a separate autograd graph.
        """
        with self.suspended():
            result = apply(*args, **kwargs)
        for leaf in pytree.tree_leaves(result):
            node: Any = leaf.grad_fn if isinstance(leaf, Tensor) else None
            if isinstance(node, BackwardCFunction):
                node.register_prehook(lambda grads: self._count_custom(1))
                node.register_hook(lambda inputs, outputs: self._count_custom(-1))
                break
        return result

    def _count_custom(self, change: int) -> None:
        self._in_custom += change

    def _enter(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return self.group.parameter(tensor)
        if self.is_inside and (parameter := opened_parameter(tensor)) is not None:
            return self.group.parameter(tensor, hooked=bool(gradient_hooks_of(parameter)))
        return self.group.copy(tensor)

    def _open(self, parameter: DTensor) -> Tensor:
        raise RuntimeError(
            "A parameter that is sharded over data ranks was used outside its module's call, which it was not in the"
            " first run of this step. Set data_settings={'detect_direct_param_use': 'always'} to look for such uses in"
            " every step."
        )

    @override
    def of_part(self, part: Tensor, layout: Layout) -> Tensor:
        split = super().of_part(part, layout)
        if self._first is None:
            self._first = tuple(split.shape), layout.dim
        self.taken_over[len(split.shape), layout.dim] = split.shape[layout.dim]
        return split

    def take_rows(self, given: Arguments, rows: Rows) -> TakenRows | None:
        """Return this rank's rows of a call's arguments, with all other arguments in full.

        Collective if arguments have different layouts, or if sharded arguments do not hold rows.

        Returns:
            None if no argument is sharded along its rows.
        """
        leaves = dict(enumerate(pytree.tree_leaves(given)))
        split = [leaf for i in rows.arguments if isinstance(leaf := leaves.get(i), SequenceTensor)]
        first = next((leaf for leaf in split if leaf.split_layout.dim in rows.dims), None)
        if first is None:
            return None
        layout, shape = first.split_layout, first.global_shape[: rows.places]
        if any(getattr(leaves.get(i), "shape", ())[: rows.places] != shape for i in rows.arguments):
            return None
        flat = layout
        if rows.places > 1 and any(rows.flat):
            try:
                flat = viewed(shape, layout, (math.prod(shape),), self.group.size)
            except NoRule:
                return None
        taken = {i: self.group.extract_rows(self._laid_out(leaves[i], layout)) for i in rows.arguments}
        numbers, layouts = iter(range(len(leaves))), iter([flat if is_flat else layout for is_flat in rows.flat])

        def own(leaf: Any) -> Any:
            number = next(numbers)
            return taken[number] if number in taken else self.plain(leaf)

        def put_back(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            found = next(layouts, None)
            if found is None:
                raise RuntimeError("A part of a step returned more tensors than when it was tried.")
            return self.kind(self.group.insert_rows(leaf), found, self)

        return TakenRows(
            pytree.tree_map(own, given), lambda result: pytree.tree_map(put_back, result), self.group.inside
        )

    def _laid_out(self, tensor: Tensor, layout: Layout) -> Tensor:
        """Return this rank's shard by ``layout`` of a tensor that is replicated or sharded in any way."""
        if isinstance(tensor, SequenceTensor):
            if tensor.split_layout == layout:
                return tensor.local
            tensor = self.gather(tensor)
        return self.group.scatter(tensor, layout)

    def outside(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function on replicated tensors, or shard its input first if it is an entry."""
        looks_up = func in _LOOK_UPS
        if self._in_custom or (not looks_up and func not in _LAYERS):
            return func(*args, **kwargs)
        source = args[0] if args else kwargs.get("input")
        if not isinstance(source, Tensor) or isinstance(source, (DTensor, FakeTensor)):
            # A fake tensor stands for the output of another pipeline stage and has no values to shard here.
            return func(*args, **kwargs)
        if source.layout is not torch.strided:
            return func(*args, **kwargs)
        shape = tuple(source.shape)
        dim = self._sequence_of_ids(shape) if looks_up else self._sequence_of_features(shape)
        if dim is None or (looks_up and _uses_all_rows(args, kwargs)):
            return func(*args, **kwargs)
        if self._first is None:
            self._first = shape, dim
        self.entries[Entry(plain_name(func)[0], len(shape), dim)] = shape[dim]
        split = self._wrap_part(source, dim)
        if args:
            return self.call(func, (split, *args[1:]), kwargs)
        return self.call(func, args, {**kwargs, "input": split})

    def summary(self) -> str:
        """Return lines on tensors sharded, collectives and fallbacks since the counts were reset; empty without any.

        Not collective.
        """
        size = self.group.size
        entries = [
            f"dim {dim} of {dims} of the previous stage's output, {extent:,} long"
            for (dims, dim), extent in self.taken_over.items()
        ]
        entries += [
            f"dim {entry.dim} of the {entry.dims} of {entry.operator}'s input, {extent:,} long"
            for entry, extent in self.entries.items()
        ]
        if not entries:
            return ""
        sent = ", ".join(
            f"{count} {kind} of {self.group.bytes[kind] / 1e6:.2f} MB in all"
            for kind, count in sorted(self.group.calls.items())
        )
        lines = [f"Sequences over {size} context ranks: {'; '.join(entries)}. Per forward: {sent or 'nothing sent'}."]
        lines += [
            f"On whole tensors: {name}, {item.calls} times, {item.bytes_gathered / 1e6:.2f} MB gathered"
            f" ({item.reason})."
            for name, item in self.fallbacks.items()
        ]
        return "\n".join(lines)

    def _wrap_part(self, whole: Tensor, dim: int) -> Tensor:
        layout = uneven_layout(dim, whole.shape[dim], self.group.size)
        found: Tensor = self._wrap(self.group.scatter(whole, layout), layout)
        return found

    def _sequence_of_ids(self, shape: tuple[int, ...]) -> int | None:
        """Return the sequence dim of an embedding's index tensor, or None."""
        if not shape:
            return None
        length = self._first[0][self._first[1]] if self._first else None
        if len(shape) == 1:
            known = {length} if length is not None else self._extents
            dim: int | None = 0 if shape[0] in known else None
        elif self._first and shape == self._first[0]:
            dim = self._first[1]
        else:
            dim = self._among(shape, range(len(shape)), length)
        return dim if dim is not None and shape[dim] >= self.group.size else None

    def _sequence_of_features(self, shape: tuple[int, ...]) -> int | None:
        """Return the sequence dim of a layer's input, or None: neither the features (last) nor the samples (first)."""
        if len(shape) < 3:
            return None
        length = self._first[0][self._first[1]] if self._first else None
        dim = self._among(shape, range(1, len(shape) - 1), length)
        return dim if shape[dim] >= self.group.size and shape[dim] > 1 else None

    def _among(self, shape: tuple[int, ...], dims: range, length: int | None) -> int:
        if self.sequence_dim is not None and -len(shape) <= self.sequence_dim < len(shape):
            return self.sequence_dim % len(shape)
        first = self._first
        if first and len(shape) == len(first[0]) and first[1] in dims and shape[first[1]] == length:
            # An input recomputed in backward is sharded along the same dim as in forward.
            return first[1]
        if length is not None and length in (shape[dim] for dim in dims):
            return next(dim for dim in dims if shape[dim] == length)
        longest = max(shape[dim] for dim in dims)
        return next(dim for dim in reversed(dims) if shape[dim] == longest)


def _uses_all_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an embedding does more than look up: renormalizes weights or scales gradients by frequency."""
    max_norm = args[3] if len(args) > 3 else kwargs.get("max_norm")
    return max_norm is not None or bool(args[5] if len(args) > 5 else kwargs.get("scale_grad_by_freq"))
