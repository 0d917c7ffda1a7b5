"""``nn.Module``: its tables of parameters, buffers and submodules, and its hooks.

``named_parameters(recurse=False)`` leaves out entries that are None and duplicates, and ``register_parameter`` refuses
a name that is taken: neither can replace one parameter by another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from lightning_pardist.compat.contract import Private

_TABLES = "putting tensors in the place of others (shards, parts, stand-ins)"
NAMES = (
    Private("torch.nn.Module._parameters", _TABLES, "setattr() and named_parameters(recurse=False)"),
    Private("torch.nn.Module._buffers", _TABLES, "setattr() and named_buffers(recurse=False)"),
    Private("torch.nn.Module._modules", "restoring a module's attributes after a trial run", "named_children()"),
    Private("torch.nn.Module._non_persistent_buffers_set", "buffers that are registered while a run lasts",
            "compare named_buffers() with state_dict()"),
    Private("torch.nn.Module._apply", "moving a module part of which is on meta", "assign .data of each tensor"),
    Private("torch.nn.Module._load_state_dict_pre_hooks", "loading tensors in place where no hook forbids it",
            "always load by load_state_dict()"),
    Private("torch.nn.Module._load_state_dict_post_hooks", "loading tensors in place where no hook forbids it",
            "always load by load_state_dict()"),
    Private("torch.nn.Module._forward_hooks", "experts whose hooks would run on another rank, or twice",
            "none: tokens of such experts would have to stay"),
    Private("torch.nn.Module._forward_pre_hooks", "experts whose hooks would run on another rank, or twice",
            "none: tokens of such experts would have to stay"),
    Private("torch.nn.Module._backward_hooks", "experts whose hooks would run on another rank, or twice",
            "none: tokens of such experts would have to stay"),
    Private("torch.nn.Module._backward_pre_hooks", "experts whose hooks would run on another rank, or twice",
            "none: tokens of such experts would have to stay"),
    Private("torch.nn.Module.state_dict._metadata", "versions of submodules in a checkpoint's state",
            "none: loading takes states of today's versions for the first ones", on_instances=True),
    Private("torch.nn.modules.batchnorm._BatchNorm", "batch normalisation over all ranks",
            "the classes of one, two and three dims"),
    Private("torch.nn.modules.batchnorm._BatchNorm._check_input_dim", "batch normalisation over all ranks",
            "leave wrong shapes to the operator"),
    Private("torch.nn.modules.batchnorm._NormBase", "telling running statistics from other buffers",
            "the classes of one, two and three dims"),
    Private("torch.nn.Module._ddp_params_and_buffers_to_ignore",
            "refusing modules that keep tensors apart on each rank",
            "none: torch's DDP would have another way to say it", on_instances=True),
)  # fmt: skip

#: Names of the tables in a module's ``__dict__``.
TABLES = frozenset({"_parameters", "_buffers", "_modules"})
BatchNorm = _BatchNorm
NormBase = _NormBase


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the module's own parameter dict, not a copy: writing to it changes the module."""
    return module._parameters


def ignored_by_torch_ddp(module: nn.Module) -> list[str]:
    """Return the names of parameters and buffers that the user has excluded from torch's DDP."""
    names = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    return [name for name, _ in tensors if name in names] if names else []


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the module's own buffer dict, not a copy."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the module's own dict of children, not a copy."""
    return module._modules


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of the module's own buffers that are not in its state dict."""
    return module._non_persistent_buffers_set


def apply_to_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Apply a function to every parameter, gradient and buffer, and replace each by the result."""
    module._apply(function)


def check_dims(layer: nn.Module, input: Tensor) -> None:
    """Check that an input has the number of dims that a layer expects.

    Raises:
        ValueError: From torch, if it has not.
    """
    layer._check_input_dim(input)  # type: ignore[operator]


def has_load_hooks(module: nn.Module) -> bool:
    """Return whether loading a state dict into this module, without its submodules, runs any hooks."""
    return bool(module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks)


def has_run_hooks(module: nn.Module) -> bool:
    """Return whether forward or backward of this module, without its submodules, runs any hooks."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def has_full_backward_hooks(module: nn.Module) -> bool:
    """Return whether ``register_full_backward_hook`` was called on this module itself."""
    return bool(module._backward_hooks)


def copy_metadata(like: Any, state: Any) -> None:
    """Copy the submodule versions of another state dict, which torch uses to load states of earlier versions."""
    if (metadata := getattr(like, "_metadata", None)) is not None:
        state._metadata = metadata
