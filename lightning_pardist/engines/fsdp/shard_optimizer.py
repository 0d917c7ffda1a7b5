"""Elementwise optimizer steps on shards."""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_pardist.checkpoint.tensors import restore_shared, shared_state
from lightning_pardist.compat.optimizers import follow_schedulers
from lightning_pardist.engines.common.elementwise import user_attributes, with_user_attributes
from lightning_pardist.engines.common.joint_updates import step_on_full_tensors
from lightning_pardist.engines.common.train_switches import SWITCHES, wrap_switches
from lightning_pardist.engines.common.update_scope import (
    Scope,
    ScopeSetting,
    find_scope,
    has_parameters,
    non_elementwise_error,
)
from lightning_pardist.engines.offload import HostedState, HostStep
from lightning_pardist.local_tensors import local_shard

_MARK = "_pardist_steps_on_shards"


def step_on_shards(
    optimizer: torch.optim.Optimizer,
    *,
    before_step: Callable[[], None] | None = None,
    after_step: Callable[[], None] | None = None,
    host: HostStep | None = None,
    hosted: HostedState | None = None,
    device: torch.device | None = None,
    group: Callable[[Scope], dist.ProcessGroup] | None = None,
    scope: ScopeSetting = "auto",
) -> None:
    """Make ``optimizer.step()`` update this rank's shards as plain tensors, in place.

    An optimizer that is not elementwise steps on whole tensors instead, see
    :func:`~lightning_pardist.engines.common.joint_updates.step_on_full_tensors`, which is collective.

    Outside of ``step`` the optimizer holds the module's ``DTensor`` parameters, for groups, schedulers, clipping and
    ``zero_grad``; its state is kept as local tensors. Without ``DTensor``s in the step, every kernel works, ``fused``
    and ``foreach`` included, and a step costs the same as on one device.

    Args:
        optimizer: Created from the module's parameters after it was sharded.
        before_step: Called right before the update, after the closure.
        after_step: Called after every step, such as ``FullySharded.refresh``.
        host: Runs the steps of an elementwise optimizer whose state is offloaded.
        hosted: Keeps the offloaded state of an optimizer that is not elementwise.
        device: Device on which whole tensors are updated; that of the shards if None.
        group: Returns the ranks that update whole tensors together, given the update's scope.
        scope: What an element's update depends on; found by a trial if ``"auto"``.

    Raises:
        ValueError: If the update of an element depends on other elements and there is no group, or if the optimizer
            cannot be tried.
    """
    if getattr(optimizer, _MARK, False):
        return
    found = find_scope(optimizer, form="dims", setting=scope) if has_parameters(optimizer) else None
    if found is not None and found.scope != "elementwise":
        if group is None:
            raise ValueError(non_elementwise_error(optimizer, found))
        step_on_full_tensors(
            optimizer,
            found,
            group=group(found.scope),
            device=device,
            hosted=hosted,
            before_step=before_step,
            after_step=after_step,
        )
        return
    inner = optimizer.step
    twins: dict[nn.Parameter, nn.Parameter] = {}
    for entry in optimizer.state.values():
        _local_entry(entry)

    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if before_step is not None:
            before_step()
        with _on_twins(self, twins):
            (inner if host is None else host.run)(**kwargs)
        if after_step is not None:
            after_step()
        return result

    follow_schedulers(optimizer, step)
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    wrap_switches(optimizer, lambda: _on_twins(optimizer, twins), after=after_step)
    setattr(optimizer, _MARK, True)


def restore_step(optimizer: torch.optim.Optimizer) -> None:
    """Undo :func:`step_on_shards`, once the module is unsharded. Not collective."""
    if optimizer.__dict__.pop(_MARK, False):
        for name in ("step", *SWITCHES):
            optimizer.__dict__.pop(name, None)


@contextmanager
def _on_twins(optimizer: torch.optim.Optimizer, twins: dict[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    """Context manager in which an optimizer's groups and state hold plain tensors in place of DTensors."""
    groups = [group["params"] for group in optimizer.param_groups]
    state = optimizer.state
    local_state: defaultdict[Any, Any] = defaultdict(dict, shared_state(optimizer))
    try:
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [_twin(parameter, twins) for parameter in parameters]
            for parameter, twin in zip(parameters, group["params"], strict=True):
                if parameter in state:
                    local_state[twin] = _local_entry(state[parameter])
        optimizer.state = local_state
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            for parameter, twin in zip(parameters, group["params"], strict=True):
                if twin in local_state:
                    state[parameter] = local_state[twin]
                if twin is not parameter:
                    twin.grad = None
            group["params"] = parameters
        shared, optimizer.state = shared_state(optimizer), state
        restore_shared(optimizer, shared)


def _local_entry(entry: Any) -> Any:
    """Convert a parameter's state to local tensors, including state created before the first step (Adagrad).

    State that belongs to no parameter (``self.state["steps"] = 0``) is returned as it is.
    """
    if not isinstance(entry, dict):
        return entry
    for key, value in entry.items():
        if isinstance(value, DTensor):
            entry[key] = local_shard(value)
    return entry


def _twin(parameter: nn.Parameter, twins: dict[nn.Parameter, nn.Parameter]) -> nn.Parameter:
    """Return a plain parameter that shares the memory of this rank's shard."""
    if not isinstance(parameter, DTensor):
        return parameter
    local = local_shard(parameter).detach()
    twin = twins.get(parameter)
    if twin is None or twin.data_ptr() != local.data_ptr() or twin.shape != local.shape:
        twin = twins[parameter] = nn.Parameter(local, requires_grad=parameter.requires_grad)
        with_user_attributes(twin, user_attributes(parameter))
    gradient = parameter.grad
    twin.grad = local_shard(gradient).detach() if isinstance(gradient, DTensor) else gradient
    return twin
