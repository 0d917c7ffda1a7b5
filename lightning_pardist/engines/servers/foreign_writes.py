"""What a user changes on a worker behind the servers' backs: values, settings and state that they would not know of."""

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
    """Notes what a worker has of an optimizer, and refuses what anybody else has made of it.

    Values are compared, not counts of writes: ``.data`` is written to without one, and weights may be put in place of
    others and taken back.

    Args:
        optimizer: The worker's, with what the servers begin with.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._count = len(_params(optimizer))
        self._values: dict[nn.Parameter, Tensor] = {}
        self._settings = _settings(optimizer)
        self._states: dict[Any, Any] = {}
        #: Stand for the state that servers have and no meeting has shown.
        self._places: dict[nn.Parameter, dict[str, Any]] | None = None
        self.note(_params(optimizer))
        self.note_states()

    def note(self, params: Sequence[nn.Parameter]) -> None:
        """These parameters have the servers' values now."""
        self._values.update({param: fingerprint(param) for param in params})

    def note_states(self) -> None:
        """The optimizer shows a server's state now."""
        self._states = {param: state for param, state in self._optimizer.state.items() if state}

    def put_places(self) -> None:
        """Training goes on: from here on it shows as well if state is cleared that only a server has."""
        if self._places is None:
            state = self._optimizer.state
            self._places = {param: {} for param in _params(self._optimizer) if not state.get(param)}
            for param, place in self._places.items():
                state[param] = place

    def take_places(self) -> None:
        """The optimizer's state is about to be read, or shown."""
        places, self._places = self._places or {}, None
        for param, place in places.items():
            if self._optimizer.state.get(param) is place and not place:
                del self._optimizer.state[param]

    def check(self) -> None:
        """Refuse changes since then. Not collective.

        Raises:
            RuntimeError: With what was changed, and what to do instead.
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
                    f"{', '.join(map(repr, changed))} in group {index} of {name} changed during training, and servers"
                    " are told of numbers that were there at its start alone. Set it in configure_optimizers, or use"
                    " pardist_ps."
                )
        state = self._optimizer.state
        places = self._places or {}
        shown = {**self._states, **places}
        if any(state.get(param) is not its for param, its in shown.items()) or any(places.values()):
            raise RuntimeError(
                f"The state of {name} was cleared or replaced during training. Servers have the state, and would not"
                " know: use pardist_ps without dedicated_servers."
            )
        self.check_values(params)

    def check_values(self, params: Sequence[nn.Parameter]) -> None:
        """Refuse other values than those noted.

        Raises:
            RuntimeError: If there are any.
        """
        if not params:
            return
        same = [(fingerprint(param) == self._values[param]).cpu() for param in params]
        if not torch.stack(same).all():
            raise RuntimeError(
                f"A parameter of {type(self._optimizer).__name__} was written to outside of its step. Servers have the"
                " parameters, and would not know: change them by gradients, leave what has none out of the optimizer,"
                " put other weights in place for a validation in on_validation_epoch_start, or use pardist_ps"
                " without dedicated_servers."
            )


def fingerprint(tensor: Tensor) -> Tensor:
    """A number that is as good as never the same for other bits, or for the same in another order; a 64-bit integer.

    A change of one element always shows: its factor is odd.
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
    """Each group's settings, with the form in place of numbers, which may change."""
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
