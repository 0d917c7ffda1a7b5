"""Optimizer steps on shards: for optimizers that update every element by itself."""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_MARK = "_pardist_steps_on_shards"


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether stepping on halves of a parameter gives the halves of stepping on the whole. Tried out, not looked up.

    False for LBFGS, Muon, Shampoo, LARS, LAMB, Adafactor and the like, whose update of an element depends on others.

    Args:
        optimizer: Any optimizer; neither it nor its parameters are changed.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 4, generator=generator)
    gradients = [torch.randn(4, 4, generator=generator) for _ in range(3)]
    options = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    try:
        for option in options:
            if "lr" in option:
                # That of a warmup's first step may be 0, and would hide what the optimizer does.
                option["lr"] = 0.1
            whole = _try(optimizer, option, [start], [[g] for g in gradients])
            halves = _try(optimizer, option, list(start.split(2)), [list(g.split(2)) for g in gradients])
            if not torch.allclose(torch.cat(whole), torch.cat(halves), rtol=1e-6, atol=1e-7):
                return False
    except Exception:
        return False
    return True


def _try(
    optimizer: torch.optim.Optimizer, option: dict[str, Any], parts: list[torch.Tensor], steps: list[list[torch.Tensor]]
) -> list[torch.Tensor]:
    clone = object.__new__(type(optimizer))
    clone.__dict__.update(optimizer.__dict__)
    clone.__dict__.pop("step", None)
    parameters = [nn.Parameter(part.clone()) for part in parts]
    option = {k: v.detach().clone().cpu() if isinstance(v, torch.Tensor) else v for k, v in option.items()}
    clone.param_groups = [{**option, "params": parameters}]
    clone.state = defaultdict(dict)
    step = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
    for gradients in steps:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        step(clone)
    return [parameter.detach() for parameter in parameters]


def step_on_shards(
    optimizer: torch.optim.Optimizer,
    *,
    before_step: Callable[[], None] | None = None,
    after_step: Callable[[], None] | None = None,
) -> None:
    """Let ``optimizer.step()`` run on this rank's shards as ordinary tensors, in place. Not collective.

    Outside of ``step`` the optimizer holds the module's ``DTensor`` parameters, so that groups, schedulers, clipping
    and ``zero_grad`` see what they expect; its state is kept as local tensors. Without ``DTensor``s in the step,
    every kernel works, ``fused`` and ``foreach`` included, and a step costs what it costs on one device.

    Args:
        optimizer: Made from the module's parameters after it was sharded.
        before_step: Called right before the update, after a closure.
        after_step: Called after every step, such as ``FullySharded.refresh``.

    Raises:
        ValueError: If the optimizer's update of an element depends on other elements.
    """
    if getattr(optimizer, _MARK, False):
        return
    if not is_elementwise(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} updates an element with what it knows of others (a norm, a matrix), so it is"
            " wrong on shards. Use pardist_ddp, or an optimizer that works element by element (SGD, Adam, AdamW)."
        )
    inner = optimizer.step
    twins: dict[nn.Parameter, nn.Parameter] = {}

    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if before_step is not None:
            before_step()
        groups = [group["params"] for group in self.param_groups]
        state = self.state
        try:
            local_state: defaultdict[Any, Any] = defaultdict(dict)
            for group, parameters in zip(self.param_groups, groups, strict=True):
                group["params"] = [_twin(parameter, twins) for parameter in parameters]
                for parameter, twin in zip(parameters, group["params"], strict=True):
                    if parameter in state:
                        local_state[twin] = state[parameter]
            self.state = local_state
            inner(**kwargs)
        finally:
            for group, parameters in zip(self.param_groups, groups, strict=True):
                for parameter, twin in zip(parameters, group["params"], strict=True):
                    if twin in local_state:
                        state[parameter] = local_state[twin]
                    if twin is not parameter:
                        twin.grad = None
                group["params"] = parameters
            self.state = state
        if after_step is not None:
            after_step()
        return result

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    setattr(optimizer, _MARK, True)


def _twin(parameter: nn.Parameter, twins: dict[nn.Parameter, nn.Parameter]) -> nn.Parameter:
    """An ordinary parameter on the memory of this rank's shard."""
    if not isinstance(parameter, DTensor):
        return parameter
    local = parameter.to_local().detach()
    twin = twins.get(parameter)
    if twin is None or twin.data_ptr() != local.data_ptr() or twin.shape != local.shape:
        twin = twins[parameter] = nn.Parameter(local, requires_grad=parameter.requires_grad)
    gradient = parameter.grad
    twin.grad = gradient.to_local().detach() if isinstance(gradient, DTensor) else gradient
    return twin
