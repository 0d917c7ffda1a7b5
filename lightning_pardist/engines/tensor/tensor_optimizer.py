"""Optimizer steps under tensor parallelism: elementwise on shards, any other on gathered parameters."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pardist.engines.common.elementwise import is_elementwise
from lightning_pardist.engines.fsdp.shard_optimizer import step_as_made, step_on_shards
from lightning_pardist.engines.tensor.parallelize import local_like, whole_tensor
from lightning_pardist.local_tensors import own_part

_MARK = "_pardist_steps_on_whole"


def attach(optimizer: Optimizer) -> None:
    """Have ``optimizer.step()`` give what it gives on one process. Not collective itself; call it once.

    An optimizer that updates every element by itself (SGD, Adam, ...) steps on this rank's parts as ordinary tensors,
    with every kernel it has. Any other (LBFGS, Muon, Adafactor, ...) steps on whole parameters and gradients, which
    every tensor rank puts together for it; its step is then collective over the tensor ranks, and its state whole.

    Args:
        optimizer: Made from a module's parameters after :func:`~lightning_pardist.engines.tensor.apply`.
    """
    if is_elementwise(optimizer, form="dims"):
        step_on_shards(optimizer)
    elif not getattr(optimizer, _MARK, False):
        _step_on_whole(optimizer)


def detach(optimizer: Optimizer) -> None:
    """Undo :func:`attach`: the module is whole again. Not collective."""
    step_as_made(optimizer)
    if optimizer.__dict__.pop(_MARK, False):
        optimizer.__dict__.pop("step", None)


def steps_on_whole(optimizer: Optimizer) -> bool:
    """Whether :func:`attach` made this optimizer step on whole tensors, so that its state is whole on every rank."""
    return getattr(optimizer, _MARK, False)


def _step_on_whole(optimizer: Optimizer) -> None:
    inner = optimizer.step
    twins: dict[Tensor, nn.Parameter] = {}

    def step(self: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        groups = [list(group["params"]) for group in self.param_groups]
        split = list(dict.fromkeys(p for group in groups for p in group if isinstance(p, DTensor)))
        for parameter in split:
            whole = whole_tensor(parameter).clone()
            twins.setdefault(parameter, nn.Parameter(whole, requires_grad=parameter.requires_grad)).data = whole
        originals: dict[Tensor, Tensor] = {twin: parameter for parameter, twin in twins.items()}

        def evaluate() -> Any:
            if closure is None:
                return None
            # The closure looks at the optimizer too: it zeroes gradients.
            _put_back(split, twins)
            _exchange(self, originals)
            try:
                with torch.enable_grad():
                    return closure()
            finally:
                _exchange(self, twins)
                _bring_gradients(split, twins)

        _exchange(self, twins)
        _bring_gradients(split, twins)
        try:
            result = inner(evaluate, **kwargs) if closure is not None else inner(**kwargs)
            _put_back(split, twins)
        finally:
            _exchange(self, originals)
            for twin in twins.values():
                twin.grad = None
                twin.data = twin.data.new_empty(0)
        return result

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    setattr(optimizer, _MARK, True)


def _exchange(optimizer: Optimizer, names: Mapping[Tensor, Tensor]) -> None:
    """Let the optimizer hold other parameters, in the very lists and dicts that it may hold on to (LBFGS does)."""
    for group in optimizer.param_groups:
        group["params"][:] = [names.get(parameter, parameter) for parameter in group["params"]]
    state = {names.get(parameter, parameter): values for parameter, values in optimizer.state.items()}
    optimizer.state.clear()
    optimizer.state.update(state)


def _bring_gradients(parameters: Sequence[Tensor], twins: dict[Tensor, nn.Parameter]) -> None:
    for parameter in parameters:
        twins[parameter].grad = None if parameter.grad is None else whole_tensor(parameter.grad).clone()


@torch.no_grad()
def _put_back(parameters: Sequence[Tensor], twins: dict[Tensor, nn.Parameter]) -> None:
    for parameter in parameters:
        own_part(parameter).copy_(own_part(local_like(twins[parameter].detach(), parameter)))
