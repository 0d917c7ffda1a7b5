"""Optimizers, gradient scalers and schedulers: hooks and private parts used when this package takes the step."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_pardist.compat.contract import Private

_HOOKS = "hooks around steps that are taken on the host"
_SCALING = "one overflow decision for all ranks"
_CLIPPING = "clipping in a few kernels for all gradients"
_SCHEDULERS = "schedulers that count steps taken elsewhere"
NAMES = (
    Private("torch.optim.optimizer._global_optimizer_pre_hooks", _HOOKS, "call no hooks there"),
    Private("torch.optim.optimizer._global_optimizer_post_hooks", _HOOKS, "call no hooks there"),
    Private("torch.optim.optimizer._get_foreach_kernels_supported_devices", "planning optimizers of devices on a CPU",
            "plan with one operator a parameter"),
    Private("torch.optim.Optimizer._optimizer_step_pre_hooks", _HOOKS, "call no hooks there"),
    Private("torch.optim.Optimizer._optimizer_step_post_hooks", _HOOKS, "call no hooks there"),
    Private("torch.optim.Optimizer._optimizer_step_code", "the profiler's name for a step", "leave it out"),
    Private("torch.optim.lr_scheduler.LRScheduler._wrapped_by_lr_sched", _SCHEDULERS,
            "torch warns that schedulers come before optimizers: filter it", on_instances=True),
    Private("torch.optim.Optimizer._opt_called", _SCHEDULERS,
            "torch warns that schedulers come before optimizers: filter it", on_instances=True),
    Private("torch.amp.GradScaler._scale", _SCALING, "scale a tensor of one element first"),
    Private("torch.amp.GradScaler._lazy_init_scale_growth_tracker", _SCALING, "scale a tensor of one element first"),
    Private("torch.amp.GradScaler._unscale_grads_", _SCALING, "a scaler class of our own"),
    Private("torch._amp_foreach_non_finite_check_and_unscale_", _SCALING, "isfinite() and mul_()"),
    Private("torch._foreach_norm", _CLIPPING, "linalg.vector_norm() of each"),
    Private("torch._foreach_mul_", _CLIPPING, "mul_() of each"),
    Private("torch._foreach_clamp_min_", _CLIPPING, "clamp_() of each"),
    Private("torch._foreach_clamp_max_", _CLIPPING, "clamp_() of each"),
)  # fmt: skip


@contextmanager
def as_on_devices() -> Iterator[None]:
    """Return a context in which CPU optimizers default to foreach operators, as they do on CUDA."""
    # Not an attribute of the package, which deletes it.
    module: Any = importlib.import_module("torch.optim.optimizer")
    before = module._get_foreach_kernels_supported_devices
    module._get_foreach_kernels_supported_devices = lambda: [*before(), "cpu"]
    try:
        yield
    finally:
        module._get_foreach_kernels_supported_devices = before


def pre_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks that torch calls before a step of this optimizer."""
    return [*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()]


def post_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks that torch calls after a step of this optimizer."""
    return [*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()]


def mark_step(optimizer: Optimizer) -> None:
    """Mark a step of the optimizer for profilers."""
    optimizer._optimizer_step_code()


def follow_schedulers(optimizer: Optimizer, step: Callable[..., Any]) -> None:
    """Make ``step`` count as an optimizer step for schedulers created earlier, which warn if none came before them."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer._opt_called = True  # type: ignore[attr-defined]


def initialize_scaler(scaler: torch.amp.GradScaler, device: torch.device) -> None:
    """Create the scaler's scale tensor, which is otherwise created with the first loss."""
    if scaler.is_enabled() and scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)


def replace_unscale(scaler: torch.amp.GradScaler, unscale: Callable[..., Any] | None) -> None:
    """Replace the scaler's unscale function; None restores its own."""
    if unscale is None:
        scaler.__dict__.pop("_unscale_grads_", None)
    else:
        scaler.__dict__["_unscale_grads_"] = unscale


def foreach_norms(grads: list[Tensor], norm_type: float, dtype: torch.dtype) -> list[Tensor]:
    """Return the norm of each tensor, all of one device and dtype, computed in ``dtype``."""
    found: list[Tensor] = list(torch._foreach_norm(grads, norm_type, dtype))
    return found


def foreach_multiply_(grads: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors of one device and dtype in place by a scalar tensor on their device."""
    torch._foreach_mul_(grads, factor)


def foreach_clamp_(grads: list[Tensor], limit: float) -> None:
    """Clamp tensors of one device and dtype in place to ``[-limit, limit]``."""
    torch._foreach_clamp_min_(grads, -limit)
    torch._foreach_clamp_max_(grads, limit)


def unscale_(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply gradients in place by ``inv_scale``, and record whether any is not finite.

    Args:
        grads: Gradients of one device and dtype.
        found_inf: Set to 1 if one is infinite or NaN; shape ``[1]``.
        inv_scale: Factor; shape ``[1]``.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
