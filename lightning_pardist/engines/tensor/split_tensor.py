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
    """Executes torch functions on split tensors."""

    @property
    def group(self) -> TensorGroup:
        """The tensor ranks."""
        ...

    def gather(self, tensor: Any) -> Tensor:
        """A split tensor as a whole one. Collective over the ranks."""
        ...

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one function. Collective over the tensor group where its rule says so."""
        ...


class PartedTensor(Tensor):
    """An activation of global shape, of which each rank of one axis has a part.

    [Note: why not DTensor] Parameters are DTensors; activations are not. A DTensor sits below autograd, so the
    backward of every operator needs a sharding rule too, and one that is missing fails inside the autograd engine,
    where nothing can step in. A parted tensor sits above: it is taken apart at the call of a torch function, the
    autograd graph is made of plain local tensors and the collectives of
    :mod:`~lightning_pardist.engines.tensor.regions`, and backward needs nothing but them. It also sends what
    the rules say and nothing else.

    Attributes:
        local: This rank's part, an ordinary tensor with its autograd history.
        split_layout: How the parts make up the whole.
        global_shape: Shape of the whole, at hand without asking torch.
        runtime: What executes functions called on it.
    """

    local: Tensor
    split_layout: Layout
    global_shape: tuple[int, ...]
    runtime: Dispatcher

    @staticmethod
    def __new__(cls, local: Tensor, layout: Layout, runtime: Dispatcher) -> Self:
        """Wrap this rank's part."""
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
        """Hand the call to the runtime; reached where its mode is not active."""
        return _runtime_of((args, kwargs)).call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse: below autograd the parts can no longer be put together rightly.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"{func} was called on a tensor that is split over the tensor ranks by code that torch functions cannot see"
            " (a compiled or scripted function, or a custom autograd function kept under another name). Replicate the"
            ' parameters that produce its input: plan={"pattern": "replicate"}.'
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """The part, and how it is split; not collective, so that a debugger on one rank does not hang the others."""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, {self.split_layout.describe()}, local={self.local!r})"


class SplitTensor(PartedTensor):
    """An activation that is sharded over tensor ranks. Its part may be split again, over context ranks."""


class SequenceTensor(PartedTensor):
    """An activation that is sharded over context ranks, whose part is an ordinary tensor."""


def innermost(tensor: Tensor) -> Tensor:
    """The ordinary tensor in which a part, or a part of a part, has its values."""
    while isinstance(tensor, PartedTensor):
        tensor = tensor.local
    return tensor


def _runtime_of(tree: Any) -> Dispatcher:
    """That of the axis which is taken apart first."""
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
