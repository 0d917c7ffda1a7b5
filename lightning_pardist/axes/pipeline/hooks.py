"""Warnings about hooks of a module that behave differently in a pipeline than in one process."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from types import CodeType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_pardist.compat.modules import has_full_backward_hooks
from lightning_pardist.compat.tensors import accumulation_hooks_of, gradient_hooks_of

_ON_GRADIENTS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
#: Hooks that are also overridden for other reasons (a learning rate warm-up), and usually clip by functions that
#: include all stages: checked for direct reads of ``grad``.
_AROUND_UPDATES = ("optimizer_step", "configure_gradient_clipping")


def hook_warnings(module: pl.LightningModule, units: Collection[str], num_microbatches: int) -> Iterator[str]:
    """Yield warnings for the log; none without such hooks.

    Args:
        module: The full module, before it is split into stages.
        units: Names of the modules that stages consist of.
        num_microbatches: Number of micro-batches of a training step.
    """
    crossing = [
        name or type(module).__name__
        for name, child in module.named_modules()
        if has_full_backward_hooks(child) and any(f"{unit}.".startswith(f"{name}." if name else "") for unit in units)
    ]
    if crossing:
        yield (
            f"Full backward hooks of {', '.join(crossing)} run only where input and output are on the same stage;"
            " what they return is lost for other stages. Register them on submodules within a stage, or use hooks"
            " on tensors."
        )
    params = module.named_parameters()
    hooked = [name for name, param in params if gradient_hooks_of(param) or accumulation_hooks_of(param)]
    if hooked and num_microbatches > 1:
        yield (
            f"Hooks on the gradients of {', '.join(hooked)} run for each of {num_microbatches} micro-batches: a hook"
            " that is not linear (clipping by value) has a different result than for the whole batch. pardist_mp"
            " makes no micro-batches."
        )
    by_hand = [name for name in _ON_GRADIENTS if is_overridden(name, module, pl.LightningModule)]
    by_hand += [name for name in _AROUND_UPDATES if _reads(getattr(module, name), "grad")]
    if by_hand:
        yield (
            f"In {', '.join(by_hand)} of {type(module).__name__} the gradients of parameters of other stages are"
            " None: what the module itself computes from gradients there covers this stage only. Lightning's"
            " grad_norm and torch's clipping functions cover all stages."
        )


def _reads(method: Any, name: str) -> bool:
    """Return whether a method's own code refers to an attribute or global of a name; False for non-Python code."""
    codes = [code] if (code := getattr(inspect.unwrap(method), "__code__", None)) else []
    for code in codes:
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return any(name in code.co_names for code in codes)
