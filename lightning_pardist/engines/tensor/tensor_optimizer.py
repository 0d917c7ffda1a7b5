"""Optimizer steps under tensor parallelism: elementwise updates on shards, all others on full tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pardist.engines.common.full_tensor_updates import restore_own_step
from lightning_pardist.engines.common.joint_updates import step_on_full_tensors
from lightning_pardist.engines.common.update_scope import Scope, ScopeSetting, find_scope, has_parameters
from lightning_pardist.engines.fsdp.shard_optimizer import restore_step, step_on_shards
from lightning_pardist.local_tensors import tensor_axis


def attach(
    optimizer: Optimizer,
    *,
    scope: ScopeSetting = "auto",
    group: Callable[[Scope], dist.ProcessGroup] | None = None,
) -> None:
    """Make ``optimizer.step()`` match a single process. Collective over the tensor ranks; call once.

    An optimizer that updates each element independently (SGD, Adam, ...) steps on this rank's shards as plain tensors,
    with all of its kernels. One that updates one tensor at a time (Muon, Adafactor, ...) has each full tensor updated
    by one tensor rank, which keeps its state. One that updates all parameters jointly (LBFGS, ...) steps on full
    parameters on every rank. Steps of the last two are collective over the tensor ranks.

    Args:
        optimizer: Made from a module's parameters after :func:`~lightning_pardist.engines.tensor.apply_layout`.
        scope: Which of the three kinds it is; determined by a trial if ``"auto"``.
        group: Returns the process group that updates full tensors together, given the kind; the tensor ranks if None.

    Raises:
        ValueError: If the trial is not possible.
    """
    split = [
        (param, axis)
        for group in optimizer.param_groups
        for param in group["params"]
        if isinstance(param, DTensor) and (axis := tensor_axis(param)) is not None
    ]
    if not split or not has_parameters(optimizer):
        return
    found = find_scope(optimizer, form="dims", setting=scope)
    if found.scope == "elementwise":
        step_on_shards(optimizer, scope=scope)
    else:
        param, axis = split[0]
        together = param.device_mesh.get_group(axis) if group is None else group(found.scope)
        step_on_full_tensors(optimizer, found, group=together)


def detach(optimizer: Optimizer) -> None:
    """Undo :func:`attach` for a module whose parameters are full again. Not collective."""
    restore_step(optimizer)
    restore_own_step(optimizer)
