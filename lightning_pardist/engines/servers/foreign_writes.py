"""User changes on a worker that bypass the servers: values, settings and state that servers would not receive."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_CHUNK = 2**20
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ForeignWrites:
    """Records a worker's view of an optimizer, and raises an error if user code has changed it.

    Values are compared rather than counts of writes: ``.data`` is written to without one, and weights may be swapped
    for others and swapped back.

    Args:
        optimizer: The worker's optimizer, in the state with which the servers start.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._count = len(_params(optimizer))
        self._values: dict[nn.Parameter, Tensor] = {}
        self._settings = _settings(optimizer)
        self._states: dict[Any, Any] = {}
        #: Placeholders for state that servers have and that no meeting has fetched.
        self._places: dict[nn.Parameter, dict[str, Any]] | None = None
        self.note(_params(optimizer))
        self.note_states()

    def note(self, params: Sequence[nn.Parameter]) -> None:
        """Record that these parameters have the servers' values now."""
        self._values.update({param: fingerprint(param) for param in params})

    def note_states(self) -> None:
        """Record that the optimizer shows a server's state now."""
        self._states = {param: state for param, state in self._optimizer.state.items() if state}

    def add_placeholders(self) -> None:
        """Put placeholders for state that only a server has, so that clearing it is detected in training."""
        if self._places is None:
            state = self._optimizer.state
            self._places = {param: {} for param in _params(self._optimizer) if not state.get(param)}
            for param, place in self._places.items():
                state[param] = place

    def remove_placeholders(self) -> None:
        """Remove the placeholders before the optimizer's state is read, or shown."""
        places, self._places = self._places or {}, None
        for param, place in places.items():
            if self._optimizer.state.get(param) is place and not place:
                del self._optimizer.state[param]

    def check(self) -> None:
        """Check that nothing was changed since the last record. Not collective.

        Raises:
            RuntimeError: If something was, with what it is and what to do instead.
        """
        name = type(self._optimizer).__name__
        params = _params(self._optimizer)
        if len(params) != self._count or any(param not in self._values for param in params):
            raise RuntimeError(
                f"{name} was given further parameters during training, which no server has. Give it all of them in"
                " configure_optimizers; frozen ones may be thawed later."
            )
        for index, (now, start) in enumerate(zip(_settings(self._optimizer), self._settings, strict=True)):
            if changed := sorted(key for key in now.keys() | start.keys() if not _is_same(now, start, key)):
                raise RuntimeError(
                    f"{', '.join(map(repr, changed))} in group {index} of {name} changed during training. Servers"
                    " receive changes only of numbers that the group had when training started. Set it in"
                    " configure_optimizers, or use pardist_ps."
                )
        state = self._optimizer.state
        places = self._places or {}
        shown = {**self._states, **places}
        if any(state.get(param) is not its for param, its in shown.items()) or any(places.values()):
            raise RuntimeError(
                f"The state of {name} was cleared or replaced during training. Servers hold the state, and the change"
                " would not reach them. Use pardist_ps without dedicated_servers."
            )
        self.check_values(params)

    def check_values(self, params: Sequence[nn.Parameter]) -> None:
        """Check that parameters have the recorded values.

        Raises:
            RuntimeError: If any has other values.
        """
        if not params:
            return
        same = [(fingerprint(param) == self._values[param]).cpu() for param in params]
        if not torch.stack(same).all():
            raise RuntimeError(
                f"A parameter of {type(self._optimizer).__name__} was written to outside of its step. Servers hold the"
                " parameters, and the change would not reach them. Change them by gradients only, leave parameters"
                " without gradients out of the optimizer, swap weights for a validation in on_validation_epoch_start,"
                " or use pardist_ps without dedicated_servers."
            )


def fingerprint(tensor: Tensor) -> Tensor:
    """Return a 64-bit integer that is almost surely different for other bits, or for the same bits in another order.

    A change of one element always changes the result, as its factor is odd.
    """
    values = tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    bits = values.reshape(-1).view(_INTEGERS[values.element_size()])
    factors = torch.arange(1, 2 * min(_CHUNK, bits.numel()) + 1, 2, device=bits.device)
    found = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in bits.split(_CHUNK):
        # Products and sums wrap around, which is exact.
        found = 3 * found + (part * factors[: part.numel()]).sum()
    return found


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return each group's settings, with placeholders for numbers, which may change."""
    return [{key: _form(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return "a number" if value.numel() == 1 and not value.is_complex() else value.detach().clone()
    if isinstance(value, tuple | list):
        return [_form(item) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "a number"
    return copy.copy(value) if isinstance(value, dict | set) else value


def _is_same(one: dict[str, Any], other: dict[str, Any], key: str) -> bool:
    return key in one and key in other and _equal(one[key], other[key])


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return one is other or bool(one == other)
