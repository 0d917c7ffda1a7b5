"""Lazy ``param.grad`` under ZeRO-1 and 2: gathered when its values are first read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_pardist.compat.autograd import current_backward
from lightning_pardist.compat.pytree import tree_map_only
from lightning_pardist.compat.tensors import (
    GETTERS_WITHOUT_VALUES,
    METHODS_WITHOUT_VALUES,
    below_subclasses,
    foreach_zero_,
    make_wrapper,
)

_ACCUMULATE = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)


class GradientSource(Protocol):
    """Interface to the holder of a lazy gradient's values."""

    def read_gradients(self) -> None:
        """Gather the gradients that are kept together and set their ``whole``. Collective over the data axis."""
        ...

    def zero(self, slot: int) -> None:
        """Zero gradient ``slot`` in the memory where it is kept. Not collective."""
        ...


class LazyGradient(Tensor):
    """Tensor subclass in ``param.grad`` for a gradient sliced over the data axis.

    Shape, dtype and existence are known without communication. The first use of the values gathers them, which is
    collective over the data axis: every rank has to read them, as with the gradients of ZeRO-3. From then on all
    operations, in-place ones included, use the plain tensor ``whole``; the source takes its values back before anything
    else needs them.

    Args:
        like: Tensor with the gradient's shape, strides, dtype and device.
        source: Holder of the values.
        slot: Index of this gradient in the source.

    Attributes:
        source: None once the gradient was dropped.
        whole: The values, once they were read.
        added: What a backward pass outside of the engine's ``backward`` has added on this rank, not reduced yet.
        is_replaced: Whether that pass has put its own tensor into ``param.grad`` (``create_graph=True``).
    """

    source: GradientSource | None
    slot: int
    whole: Tensor | None = None
    added: Tensor | None = None
    is_replaced: bool = False

    @staticmethod
    def __new__(cls, like: Tensor, source: GradientSource, slot: int) -> LazyGradient:
        """Create the tensor, without memory."""
        made: LazyGradient = make_wrapper(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device, storage_size=0
        )
        made.source, made.slot = source, slot
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> Any:
        """Apply an operation of Python code to the values, unless it needs none."""
        if func in _WITHOUT_VALUES:
            with below_subclasses():
                return func(*args, **(kwargs or {}))
        if func in _UNCHANGED:
            return args[0]
        if func is Tensor.zero_:
            return _zeroed(args[0])
        if func is foreach_zero_:
            others = [grad for grad in args[0] if not isinstance(grad, cls)]
            for grad in args[0]:
                if isinstance(grad, cls):
                    _zeroed(grad)
            return foreach_zero_(others) if others else None
        return _run(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> Any:
        """Apply an operation that torch itself runs to the values."""
        return _run(func, args, kwargs)


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[Any, Any] | None) -> Any:
    if func in _ACCUMULATE and current_backward() is not None and isinstance(args[0], LazyGradient):
        return _accumulated(args[0], args[1], in_place=func is _ACCUMULATE[0])
    args, kwargs = tree_map_only(LazyGradient, _values, (args, kwargs or {}))
    return func(*args, **kwargs)


def _accumulated(gradient: LazyGradient, more: Tensor, *, in_place: bool) -> Tensor:
    """Keep apart what autograd adds to a reduced gradient: it is not reduced, and nothing may be gathered here."""
    if not in_place:
        gradient.is_replaced = True
        return more.clone()
    gradient.added = more.clone() if gradient.added is None else gradient.added + more
    return gradient


def _values(gradient: LazyGradient) -> Tensor:
    if gradient.whole is None:
        if gradient.source is None:
            raise RuntimeError(
                "A gradient was read after it was dropped (zero_grad, or the end of the run). Under ZeRO-1 and 2 whole"
                " gradients are gathered when they are read: clone() it while it is in param.grad."
            )
        gradient.source.read_gradients()
    if gradient.whole is None:
        raise RuntimeError("read_gradients() sets the values")
    return gradient.whole


def _zeroed(gradient: LazyGradient) -> Tensor:
    if gradient.whole is not None:
        gradient.whole.zero_()
    if gradient.source is not None:
        gradient.source.zero(gradient.slot)
    return gradient


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


#: Handled without values: torch's compiler and ``zero_grad`` use these, and nothing is gathered for them.
_WITHOUT_VALUES = {
    *(
        _getter(name)
        for name in (
            *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes"),
            *("requires_grad", "grad", "grad_fn", "is_leaf", "retains_grad", *GETTERS_WITHOUT_VALUES),
            *("is_sparse", "is_sparse_csr", "is_nested", "is_mkldnn", "is_quantized", "is_meta", "is_cpu", "is_cuda"),
        )
    ),
    *(
        getattr(Tensor, name)
        for name in (
            *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "__len__"),
            *(
                "is_contiguous",
                "is_floating_point",
                "is_complex",
                "is_conj",
                "is_neg",
                "is_inference",
                *METHODS_WITHOUT_VALUES,
            ),
            *("get_device", "untyped_storage", "__hash__", "is_same_size"),
        )
    ),
}
#: No-ops on a gradient without autograd history.
_UNCHANGED = {Tensor.requires_grad_, Tensor.detach_}
