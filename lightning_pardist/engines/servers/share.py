"""One server's share of an optimizer's parameters, and its update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pardist.checkpoint.tensors import restore_shared, shared_state
from lightning_pardist.compat.compilation import no_concurrent_compile
from lightning_pardist.engines.common.elementwise import (
    copy_of_groups,
    own_copy,
    own_step,
    user_attributes,
    with_user_attributes,
)
from lightning_pardist.engines.common.update_scope import FoundScope, group_settings


class GroupNumbers:
    """Numeric settings of an optimizer's groups (``lr``, ``betas``), which schedulers change.

    A worker's schedulers change its own optimizer; the server updates with the numbers of the worker that sent the
    gradient. Numbers that no worker has changed since the start are the server's own: optimizers may count or estimate
    in their groups.

    Args:
        optimizer: Optimizer of a worker or a server; at this time the same on all ranks.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._places = [
            (index, key, width)
            for index, group in enumerate(optimizer.param_groups)
            for key, value in sorted(group.items())
            if key != "params" and (width := len(_numbers_in(value)))
        ]
        self._start = self.read()
        self._published: list[float | None] = [None] * len(self._start)
        self._scheduled = [False] * len(self._start)

    def read(self) -> list[float]:
        """Return the current numbers."""
        groups = self._optimizer.param_groups
        return [number for index, key, _ in self._places for number in _numbers_in(groups[index][key])]

    def to_send(self) -> list[float]:
        """Return the numbers as set by the user or schedulers; those at the start where only a server changed them."""
        return [
            start if value == published else value
            for value, published, start in zip(self.read(), self._published, self._start, strict=True)
        ]

    def of_server(self) -> list[float | None]:
        """Return, on a server, the numbers that are its own; None for those that workers set."""
        return [None if scheduled else own for scheduled, own in zip(self._scheduled, self.read(), strict=True)]

    def apply(self, numbers: Sequence[float]) -> None:
        """Set a worker's numbers in the groups, for those that any worker has changed since the start."""
        changed = (number != start for number, start in zip(numbers, self._start, strict=True))
        self._scheduled = [old or new for old, new in zip(self._scheduled, changed, strict=True)]
        own = self.read()
        picked = zip(self._scheduled, numbers, own, strict=True)
        self._write([number if scheduled else mine for scheduled, number, mine in picked])

    def publish(self, numbers: Sequence[float | None]) -> None:
        """Show the result of :meth:`of_server` on a worker, for numbers that were not set on the worker."""
        now = self.read()
        before = zip(now, self._start, self._published, strict=True)
        untouched = [own in (start, published) for own, start, published in before]
        self._published = [number if mine else None for number, mine in zip(numbers, untouched, strict=True)]
        shown = zip(self._published, now, strict=True)
        self._write([own if published is None else published for published, own in shown])

    def _write(self, numbers: Sequence[float]) -> None:
        at = 0
        for index, key, width in self._places:
            group = self._optimizer.param_groups[index]
            group[key] = _like(group[key], numbers[at : at + width])
            at += width


class Share:
    """One server's part of one optimizer: parameter values, optimizer and state, in host memory.

    Args:
        optimizer: The user's optimizer; it is copied, with the state of the share's parameters.
        mine: For each parameter in order, whether it belongs to the share.
        found: Scope of the optimizer's update.
    """

    def __init__(self, optimizer: Optimizer, mine: Sequence[bool], found: FoundScope) -> None:
        self._user, self._found = optimizer, found
        numbers = iter(range(len(mine)))
        chosen = [[p for p in group["params"] if mine[next(numbers)]] for group in optimizer.param_groups]
        #: The user's own parameters that belong to the share.
        self.originals: list[nn.Parameter] = [param for params in chosen for param in params]
        values = [
            [with_user_attributes(param.detach().cpu(), user_attributes(param)) for param in params]
            for params in chosen
        ]
        self.optimizer = copy_of_groups(optimizer, group_settings(optimizer), values)
        self.params: list[nn.Parameter] = [p for group in self.optimizer.param_groups for p in group["params"]]
        for param, original in zip(self.params, self.originals, strict=True):
            param.requires_grad_(original.requires_grad)
            # copy_of_groups leaves out marks that are tensors with dims, which fit this parameter but not others.
            with_user_attributes(
                param, {name: _on_host(own_copy(mark)) for name, mark in user_attributes(original).items()}
            )
            if original in optimizer.state:
                self.optimizer.state[param] = {key: _on_host(value) for key, value in optimizer.state[original].items()}
        restore_shared(self.optimizer, shared_state(optimizer))
        self.numbers = GroupNumbers(self.optimizer)
        #: Number of updates made so far.
        self.version = 0
        self._changed_at = [0] * len(self.params)
        #: For parameters with sparse gradients, the version at which each row was changed last.
        self._rows_changed_at: dict[int, Tensor] = {}

    @torch.no_grad()
    def update(self, grads: Sequence[Tensor | None], numbers: Sequence[float]) -> None:
        """Run one step of the optimizer with a worker's gradients and settings."""
        self.numbers.apply(numbers)
        before = {}
        for index, (param, grad) in enumerate(zip(self.params, grads, strict=True)):
            param.grad = grad
            if grad is not None and grad.is_sparse:
                before[index] = param.detach().clone()
        try:
            if self._found.steps_on_none or any(grad is not None for grad in grads):
                # In parallel, the thread of a worker may compile its step.
                with no_concurrent_compile():
                    own_step(self.optimizer)(self.optimizer)
        finally:
            for param in self.params:
                param.grad = None
        self.version += 1
        for index, (param, grad) in enumerate(zip(self.params, grads, strict=True)):
            if grad is not None:
                self._note_change(index, param, before.get(index))

    def _note_change(self, index: int, param: nn.Parameter, before: Tensor | None) -> None:
        self._changed_at[index] = self.version
        if before is not None:
            rows = self._rows_changed_at.setdefault(index, torch.full([len(param)], self.version - 1))
            # All rows with changed values: optimizer state may change rows that have no gradient.
            rows[(before != param).reshape(len(param), -1).any(1)] = self.version
        elif index in self._rows_changed_at:
            self._rows_changed_at[index].fill_(self.version)

    def changes_since(self, version: int) -> list[Tensor | None]:
        """Return the changes since a version: whole parameters, rows as sparse tensors, or None.

        Values are not copied.
        """
        found: list[Tensor | None] = []
        for index, param in enumerate(self.params):
            rows = self._rows_changed_at.get(index)
            if self._changed_at[index] <= version:
                found.append(None)
            elif rows is None or 2 * len(changed := (rows > version).nonzero().view(-1)) > len(rows):
                found.append(param.detach())
            else:
                values = param.detach()[changed]
                found.append(
                    torch.sparse_coo_tensor(
                        changed[None], values, param.shape, is_coalesced=True, check_invariants=False
                    )
                )
        return found

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores of the share; tensors are not copied."""
        return {
            "state": {
                place: dict(self.optimizer.state[param])
                for place, param in enumerate(self.params)
                if param in self.optimizer.state
            },
            "shared": shared_state(self.optimizer),
            "numbers": self.numbers.of_server(),
        }

    def publish(self) -> None:
        """Show the share's state in the user's optimizer, without copies: no update may run until it was read."""
        for param, original in zip(self.params, self.originals, strict=True):
            if param in self.optimizer.state:
                self._user.state[original] = self.optimizer.state[param]
        restore_shared(self._user, shared_state(self.optimizer))


@torch.no_grad()
def write_changes(params: Sequence[Tensor], changes: Sequence[Tensor | None]) -> None:
    """Write the result of :meth:`Share.changes_since` to a worker's parameters."""
    for param, change in zip(params, changes, strict=True):
        if change is None:
            continue
        if change.is_sparse:
            param[change.indices()[0].to(param.device)] = change.values().to(param.device)
        else:
            param.copy_(change)


def _numbers_in(value: object) -> tuple[float, ...]:
    if isinstance(value, Tensor):
        return (float(value),) if value.numel() == 1 and not value.is_complex() else ()
    if isinstance(value, (tuple, list)):
        found = [_numbers_in(item) for item in value]
        return tuple(number for numbers in found for number in numbers) if all(map(len, found)) else ()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ()
    return (float(value),)


def _like(old: object, numbers: Sequence[float]) -> object:
    if isinstance(old, Tensor):
        return old.fill_(numbers[0])
    if isinstance(old, (tuple, list)):
        widths = [len(_numbers_in(item)) for item in old]
        ends = [sum(widths[: index + 1]) for index in range(len(widths))]
        items = [_like(item, numbers[end - n : end]) for item, end, n in zip(old, ends, widths, strict=True)]
        return type(old)(items)
    number = numbers[0]
    return int(number) if isinstance(old, int) and math.isfinite(number) and number == int(number) else number


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value
