"""Activation tensor subclass with a global shape and a local shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor
from typing_extensions import Self

from lightning_pardist.compat.tensors import make_wrapper
from lightning_pardist.engines.tensor.layout import Layout
from lightning_pardist.engines.tensor.regions import TensorGroup


class Dispatcher(Protocol):
    """Interface that executes torch functions on split tensors."""

    @property
    def group(self) -> TensorGroup:
        """The tensor ranks."""
        ...

    def gather(self, tensor: Any) -> Tensor:
        """Gather a split tensor into a full one. Collective over the ranks."""
        ...

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one function. Collective over the tensor group if its sharding rule requires it."""
        ...


class PartedTensor(Tensor):
    """An activation of global shape, sharded over the ranks of one mesh axis.

    [Note: why not DTensor] Parameters are DTensors; activations are not. A DTensor sits below autograd, so the backward
    of every operator needs a sharding rule too, and a missing rule fails inside the autograd engine, where no fallback
    is possible. A parted tensor sits above autograd: it is unwrapped at the call of a torch function, the autograd
    graph consists of plain local tensors and the collectives of :mod:`~lightning_pardist.engines.tensor.regions`, and
    backward needs nothing else. It also issues exactly the collectives of the rules.

    Attributes:
        local: This rank's shard, a tensor with its autograd history.
        split_layout: Layout of the shards.
        global_shape: Shape of the full tensor, available without a call into torch.
        runtime: Runtime that executes functions called on it.
    """

    local: Tensor
    split_layout: Layout
    global_shape: tuple[int, ...]
    runtime: Dispatcher

    @staticmethod
    def __new__(cls, local: Tensor, layout: Layout, runtime: Dispatcher) -> Self:
        """Wrap this rank's shard."""
        shape = layout.global_shape(local.shape, runtime.group.size)
        self: Self = make_wrapper(cls, shape, dtype=local.dtype, device=local.device)
        self.local = local
        self.global_shape = shape
        self.split_layout = layout
        self.runtime = runtime
        return self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Pass the call to the runtime; reached only if the runtime's mode is not active."""
        return _runtime_of((args, kwargs)).call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Reject the call: below autograd the shards can no longer be combined correctly.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"{func} was called on a tensor that is split over the tensor ranks by code that torch functions cannot see"
            " (a compiled or scripted function, or a custom autograd function kept under another name). Replicate the"
            ' parameters that produce its input: plan={"pattern": "replicate"}.'
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Show the local shard and its layout. Not collective: a debugger on one rank does not hang the others."""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, {self.split_layout.describe()}, local={self.local!r})"


class SplitTensor(PartedTensor):
    """An activation sharded over tensor ranks. Its local shard may be sharded again, over context ranks."""


class SequenceTensor(PartedTensor):
    """An activation sharded over context ranks, whose local shard is a plain tensor."""


def innermost(tensor: Tensor) -> Tensor:
    """Return the plain tensor that stores a (possibly nested) split tensor's values."""
    while isinstance(tensor, PartedTensor):
        tensor = tensor.local
    return tensor


def _runtime_of(tree: Any) -> Dispatcher:
    """Return the runtime of the outermost sharded axis among the arguments."""
    found = list(_runtimes(tree))
    if not found:
        raise LookupError("no split tensor among the arguments")
    return next((runtime for kind, runtime in found if kind is SplitTensor), found[0][1])


def _runtimes(tree: Any) -> Iterator[tuple[type, Dispatcher]]:
    if isinstance(tree, PartedTensor):
        yield type(tree), tree.runtime
        return
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    for item in items:
        yield from _runtimes(item)
