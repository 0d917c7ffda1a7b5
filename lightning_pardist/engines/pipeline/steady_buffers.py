"""Sample-independent buffer updates (spectral norm): applied once per step, not once per micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pardist.compat.modules import own_buffers
from lightning_pardist.engines.pipeline.interception import undisturbed

_NUMBERS = (int, float, bool, type(None))


class SteadyBuffers:
    """Buffers that every micro-batch updates from their values before the step. Not collective.

    Numbers in attributes of the modules that hold these buffers (how many rows of a cache are filled) go with them.

    Args:
        root: The root module.
        names: Names of the buffers.
    """

    def __init__(self, root: nn.Module, names: Collection[str]) -> None:
        self._places = [
            (root.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in sorted(names)
        ]
        self._own: list[Tensor] = []
        self._latest: dict[int, list[Tensor]] = {}
        #: Numbers that the owners of buffers keep in attributes, such as how many rows of a cache are filled.
        self._owners = list({id(owner): owner for owner, _ in self._places}.values())
        self._numbers: list[dict[str, Any]] = []
        self._latest_numbers: dict[int, list[dict[str, Any]]] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Wrap a training step; afterwards the buffers have been updated once."""
        self._own = [own_buffers(owner)[key] for owner, key in self._places]  # type: ignore[misc]
        self._numbers = self._numbers_now()
        try:
            yield
            self._settle()
        finally:
            self._own, self._numbers = [], []
            self._latest, self._latest_numbers = {}, {}

    @contextmanager
    def microbatch(self, index: int) -> Iterator[None]:
        """Wrap the run of one stage on one micro-batch, inside :meth:`step`; outside, do nothing."""
        if not self._own:
            yield
            return
        # Clones: autograd may have saved the buffer that the next micro-batch writes to.
        given = self._latest.get(index) or [buffer.detach().clone() for buffer in self._own]
        self._show(given, self._latest_numbers.get(index, self._numbers))
        try:
            yield
        finally:
            self._latest[index] = [own_buffers(owner)[key] for owner, key in self._places]  # type: ignore[misc]
            self._latest_numbers[index] = self._numbers_now()
            self._show(self._own, self._numbers)

    def _show(self, buffers: list[Tensor], numbers: list[dict[str, Any]]) -> None:
        for (owner, key), buffer in zip(self._places, buffers, strict=True):
            own_buffers(owner)[key] = buffer
        self._set_numbers(numbers)

    def _numbers_now(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in vars(owner).items() if type(value) in _NUMBERS and key != "training"}
            for owner in self._owners
        ]

    def _set_numbers(self, numbers: list[dict[str, Any]]) -> None:
        for owner, now, then in zip(self._owners, self._numbers_now(), numbers, strict=True):
            for key in now.keys() - then.keys():
                del vars(owner)[key]
            vars(owner).update(then)

    @torch.no_grad()
    def _settle(self) -> None:
        if not self._latest:
            return
        self._set_numbers(self._latest_numbers[max(self._latest)])
        changed = self._latest[max(self._latest)]
        for (owner, key), own, value in zip(self._places, self._own, changed, strict=True):
            if own.shape == value.shape and own.dtype == value.dtype:
                own.copy_(value)
            else:
                own_buffers(owner)[key] = value.detach()


@torch.no_grad()
def confirm_steady_buffers(
    root: nn.Module, names: Collection[str], step: Callable[[Any], Any], batch: Any, microbatch: Any
) -> frozenset[str]:
    """Return the buffers with equal values after a step on a batch and on a part of it, e.g. no counts of samples.

    Args:
        root: The root module, in training mode; its state is restored afterwards.
        names: Names of the buffers to check.
        step: The step; called with either batch.
        batch: The whole batch.
        microbatch: A part of it.
    """
    found = []
    for given in (batch, microbatch):
        with undisturbed(root):
            step(given)
            found.append({name: root.get_buffer(name).detach().clone() for name in names})
    whole, part = found
    return frozenset(name for name in names if whole[name].shape == part[name].shape and _same(whole[name], part[name]))


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=1e-5, atol=1e-7, equal_nan=True)
