"""Private properties of tensors: version counters, views, storages, reference counts; and tensor subclasses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lightning_pardist.compat.contract import Private

NAMES = (
    Private("torch.Tensor._version", "noticing that a tensor was overwritten", "compare copies of the values"),
    Private("torch.Tensor._base", "hooks on what a view was taken from", "refuse views as outputs of units"),
    Private("torch.Tensor._is_view", "reducing in place where nobody sees it", "always copy before a reduction"),
    Private("torch.Tensor._backward_hooks", "stand-ins that answer without values", "leave it out of the list"),
    Private("torch.Tensor._make_subclass", "parameters that another rank holds", "as_subclass and set requires_grad"),
    Private("torch.Tensor._make_wrapper_subclass", "tensors without memory of their own", "use meta tensors"),
    Private("torch.Tensor._use_count", "reducing gradients in place", "always copy before a reduction"),
    Private("torch.UntypedStorage._cdata", "telling whether two tensors share memory", "compare data_ptr()"),
    Private("torch._C._storage_Use_Count", "reducing gradients in place", "always copy before a reduction"),
    Private("torch._C.DisableTorchFunction", "running a function below all modes", "look for it in torch.overrides"),
    Private("torch._C.DisableTorchFunctionSubclass", "running a function on the data of a subclass",
            "look for it in torch.overrides"),
    Private("torch._C._disabled_torch_function_impl", "telling plain tensors from those of an engine",
            "look for it in torch.overrides"),
    Private("torch._C._functorch.peek_interpreter_stack", "refusing to split tensors inside of torch.func transforms",
            "let the transform fail by itself"),
    Private("torch._foreach_copy_", "copies of what was gathered", "copy one at a time"),
    Private("torch._foreach_zero_", "zeroing gradients that are slices", "zero one at a time"),
    Private("torch._assert_async", "checks of indices without waiting for the device", "torch.all(...).item()"),
    Private("torch.Tensor._post_accumulate_grad_hooks", "reducing at once where the user looks at gradients at once",
            "never defer a reduction"),
)  # fmt: skip

#: Private attributes that ``LazyGradient`` returns without computing its values, besides the public ones.
GETTERS_WITHOUT_VALUES = ("_backward_hooks", "_base", "_version")
METHODS_WITHOUT_VALUES = ("_is_view",)
#: ``__torch_function__`` for tensor subclasses that do not override any function.
disabled_torch_function: Any = torch._C._disabled_torch_function_impl
foreach_copy_: Any = torch._foreach_copy_
foreach_zero_: Any = torch._foreach_zero_


def version_of(tensor: Tensor) -> int:
    """Return a tensor's version counter, which every in-place write increments."""
    return tensor._version


def is_changed(tensor: Tensor, before: Tensor) -> bool:
    """Return whether a number on the host differs from what it was; on a device, comparing would have to wait for it.

    Collectives write to tensors without incrementing their version counters.

    Args:
        tensor: A tensor of one element.
        before: Copy of it.
    """
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or in_transform():
        return False
    try:
        now, then = tensor.detach().item(), before.item()
    except RuntimeError:
        # Tracers such as make_fx have no numbers.
        return False
    return now != then and not (now != now and then != then)


def base_of(view: Tensor) -> Tensor | None:
    """Return the tensor that a tensor is an autograd view of, or None."""
    return view._base


def gradient_hooks_of(tensor: Tensor) -> OrderedDict[int, Any]:
    """Return the hooks of ``tensor.register_hook`` by handle id; ``handle.remove()`` deletes from this dict."""
    hooks: OrderedDict[int, Any] | None = tensor._backward_hooks  # type: ignore[assignment]
    return OrderedDict() if hooks is None else hooks


def accumulation_hooks_of(tensor: Tensor) -> dict[int, Any]:
    """Return the hooks of ``tensor.register_post_accumulate_grad_hook`` by handle id, of engines or of the user."""
    return tensor._post_accumulate_grad_hooks or {}


def set_accumulation_hooks(tensor: Tensor, hooks: dict[int, Any]) -> None:
    """Share the accumulation hooks of another tensor, so that its handles also remove hooks of this one."""
    tensor._post_accumulate_grad_hooks = hooks


def set_gradient_hooks(tensor: Tensor, hooks: OrderedDict[int, Any]) -> None:
    """Share the hook dict of another tensor, so that its handles also add and remove hooks of this one."""
    tensor._backward_hooks = hooks


def is_view(tensor: Tensor) -> bool:
    """Return whether a tensor is a view of another one, as autograd tracks it."""
    return tensor._is_view()


def storage_key(tensor: Tensor | torch.UntypedStorage) -> int:
    """Return a key that is equal exactly for tensors that share a storage; also without memory (``meta`` tensors).

    Raises:
        NotImplementedError: For tensors without a storage (sparse tensors).
        RuntimeError: Inside ``torch.func`` transforms (``vmap``), whose tensors have no storage either.
    """
    storage: Any = tensor.untyped_storage() if isinstance(tensor, Tensor) else tensor
    return int(storage._cdata)


def is_unshared(grad: Tensor) -> bool:
    """Return whether the memory of a gradient that autograd has just produced has no other holder.

    Autograd passes one buffer to several consumers where the backward of an addition ends a branch. Only the last
    consumer may overwrite or keep it. The test is that of torch's ``AccumulateGrad``, extended to views.
    """
    base: Any = grad._base
    # Besides the tensor itself: the storage object created on this line, a view's base, and the base's Python object.
    owners = torch._C._storage_Use_Count(grad.untyped_storage()._cdata)
    if grad._use_count() > 1 or owners > (2 if base is None else 3):  # type: ignore[attr-defined]
        return False
    return base is None or base._use_count() <= 2


def is_only_holder(tensor: Tensor) -> bool:
    """Return whether no other tensor shares this tensor's memory, tensors saved in autograd graphs included."""
    # Besides the tensor itself: the storage object created on the next line.
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= 2)


def make_subclass(cls: type[Any], data: Tensor, requires_grad: bool) -> Any:
    """Return a tensor of a given subclass on the memory of ``data``."""
    return Tensor._make_subclass(cls, data, requires_grad)


def make_wrapper(cls: type[Any], shape: Iterable[int], **options: Any) -> Any:
    """Return a wrapper-subclass tensor without memory."""
    return Tensor._make_wrapper_subclass(cls, tuple(shape), **options)


def below_subclasses() -> AbstractContextManager[None]:
    """Return a context that skips ``__torch_function__`` of tensor subclasses; modes still apply."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def below_torch_functions() -> AbstractContextManager[None]:
    """Return a context that skips ``__torch_function__`` of both subclasses and modes."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context


def in_transform() -> bool:
    """Return whether a ``torch.func`` transform is active (``vmap``, ``grad``, ``jacrev``)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def assert_async(condition: Tensor) -> None:
    """Assert a condition on the device, without waiting for it."""
    torch._assert_async(condition)
