"""Whether an optimizer treats every element alike, so that it may be given slices of parameters."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def require_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose update of an element depends on the shape of its parameter or on other elements.

    It is tried out rather than looked up: two steps on a small matrix, and on the same matrix in two flat slices.

    Args:
        optimizer: A torch optimizer; it is not changed.

    Raises:
        ValueError: If the two differ, or the optimizer cannot step like this, with its name.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 6, generator=generator)
    grads = [torch.randn(4, 6, generator=generator) for _ in range(2)]
    try:
        whole = _stepped(optimizer, [values], [[grad] for grad in grads])[0].flatten()
        slices = _stepped(
            optimizer,
            list(values.flatten().split([10, 14])),
            [list(grad.flatten().split([10, 14])) for grad in grads],
        )
    except Exception as error:
        reason = f"it could not be tried on slices ({type(error).__name__}: {error})"
        raise ValueError(_refusal(optimizer, reason)) from None
    if not torch.allclose(whole, torch.cat(slices), rtol=1e-5, atol=1e-7):
        raise ValueError(_refusal(optimizer, "its update of an element depends on the whole parameter"))


def _stepped(optimizer: Optimizer, values: list[torch.Tensor], grads: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    params = [nn.Parameter(value.clone()) for value in values]
    probe: Any = object.__new__(type(optimizer))
    probe.__dict__.update(optimizer.__dict__)
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    # A learning rate of a warmup's first step may be 0, and would show nothing.
    group["lr"] = 0.1 if "lr" in group else None
    if group["lr"] is None:
        del group["lr"]
    # Kernels for one device say nothing about the arithmetic.
    group.update({key: False for key in ("fused", "capturable") if key in group})
    probe.param_groups = [{**group, "params": params}]
    probe.state = defaultdict(dict)
    step = type(optimizer).step
    step = getattr(step, "__wrapped__", step)
    for step_grads in grads:
        for param, grad in zip(params, step_grads, strict=True):
            param.grad = grad.clone()
        step(probe)
    return [param.detach() for param in params]


def _refusal(optimizer: Optimizer, reason: str) -> str:
    return (
        f"{type(optimizer).__name__} cannot be sharded by elements: {reason}."
        " Use pardist_ddp, which keeps parameters and state whole, or an elementwise optimizer such as AdamW or SGD."
    )
