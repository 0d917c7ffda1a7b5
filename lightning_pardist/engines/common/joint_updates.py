"""Replicated steps on gathered tensors, for optimizers that update all of their sharded parameters jointly."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pardist.compat.optimizers import follow_schedulers
from lightning_pardist.engines.common.full_tensor_updates import (
    FullTensorUpdates,
    HeldTensor,
    full_parameter_like,
    updates_of,
)
from lightning_pardist.engines.common.owner_plan import Kind
from lightning_pardist.engines.common.owner_updates import OwnerUpdates
from lightning_pardist.engines.common.update_scope import FoundScope, inner_optimizers
from lightning_pardist.engines.offload import HostedState


class JointUpdates(FullTensorUpdates):
    """Joint updates: every rank gathers all tensors, computes the same step, and keeps its shards of the result.

    If the step calls its closure again (LBFGS), the shards hold the current trial values while the closure runs.
    Optimizer state is unsharded on every rank. During a step so are values and gradients, including those of parameters
    that are on ``meta`` on this rank.

    Args:
        step: The optimizer's own ``step``.
        **kwargs: Arguments of :class:`~lightning_pardist.engines.common.full_tensor_updates.FullTensorUpdates`.

    Raises:
        ValueError: If state is offloaded to files: a step needs all of it at once.
    """

    def __init__(self, optimizer: Optimizer, *, step: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(optimizer, **kwargs)
        if self._hosted is not None and self._hosted.in_files:
            raise ValueError(
                f"{type(optimizer).__name__} cannot keep its state in files: it {self.found.describe()} and needs"
                " all of its state at once, but offload to a folder keeps only a window of it in memory. Use"
                " offload='cpu'."
            )
        self._own_step = step
        self._twins: dict[int, nn.Parameter] = {}

    @override
    def owns(self, number: int) -> bool:
        """Return True: every rank holds the state of all parameters."""
        return True

    @override
    def describe(self) -> str:
        held = sum(param.numel() * param.element_size() for param in self._params()) / 1e6
        return (
            f"{type(self.optimizer).__name__} {self.found.describe()}: every rank gathers all parameters ({held:.1f}"
            " MB) and as much of gradients in every step and every call of its closure, and holds all optimizer"
            " state"
        )

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Run one optimizer step on gathered tensors. Collective over the group."""
        if self._before_step is not None:
            self._before_step()
        self._gather_tensors()
        try:
            if closure is None:
                result = self._own_step(**kwargs)
            else:
                result = self._own_step(lambda: self._evaluated(closure), **kwargs)
            self._write_back()
        finally:
            self._exchange_params(back=True)
            for twin in self._twins.values():
                twin.grad = None
            self._twins = {}
            self.settle()
        if self._after_step is not None:
            self._after_step()
        return result

    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        """Run the closure (forward and backward) with the optimizer's current values. Collective over the group."""
        self._write_back()
        # The closure also uses the optimizer's parameters: it zeroes gradients.
        self._exchange_params(back=True)
        if self._after_step is not None:
            self._after_step()
        # It may raise on some ranks only: no collective may follow, and the optimizer must hold the user's parameters.
        with torch.enable_grad():
            result = closure()
        if self._before_step is not None:
            self._before_step()
        self._exchange_params(back=False)
        self._gather_gradients()
        return result

    @torch.no_grad()
    def _gather_tensors(self) -> None:
        """Gather values and gradients, and put them into the optimizer's groups. Collective over the group."""
        present = self._present()
        params = self._params()
        wholes = self._gathered([*range(len(params))], "reads")
        self._twins = {number: full_parameter_like(params[number], whole) for number, whole in wholes.items()}
        self._set_gradients(present)
        self._move_state()
        self._exchange_params(back=False)

    def _move_state(self) -> None:
        if self._hosted is not None:
            state = self.optimizer.state
            for param in [key for key in state if isinstance(key, Tensor)]:
                state[param] = self._hosted.fetch(state[param])

    @torch.no_grad()
    def _gather_gradients(self) -> None:
        inside = self._params()
        self._exchange_params(back=True)
        try:
            self._set_gradients(self._present())
        finally:
            self._exchange_params(back=False)
        if len(inside) != len(self._params()):
            raise RuntimeError(
                "The closure of an optimizer's step changed the optimizer's parameter groups. Change them between"
                " steps."
            )

    def _set_gradients(self, present: list[int]) -> None:
        grads = self._gathered(present, "grads")
        for number, twin in self._twins.items():
            twin.grad = grads.get(number)

    def _gathered(self, numbers: list[int], kind: Kind) -> dict[int, Tensor]:
        wholes: dict[tuple[int, Kind], Tensor] = {(number, kind): self._empty(number) for number in numbers}
        ranks = range(self.group.size())
        moves = [move for number in numbers for rank in ranks for move in self.plan.gather(number, kind, rank)]
        self._exchange(moves, wholes).finish()
        return {number: whole for (number, _), whole in wholes.items()}

    @torch.no_grad()
    def _write_back(self) -> None:
        """Write the values back to this rank's shards."""
        for number, held in self._held.items():
            for part in held.boxes("writes").parts:
                box = tuple(slice(at, at + size) for at, size in zip(part.offsets, part.sizes, strict=True))
                part.values.copy_(self._twins[number].detach()[box])

    def _exchange_params(self, *, back: bool) -> None:
        """Swap the optimizer's parameters, in place in its lists and dicts, to which it may hold references (LBFGS)."""
        optimizer, params = self.optimizer, self._current
        names: Mapping[Any, Any] = {
            (twin if back else params[number]): (params[number] if back else twin)
            for number, twin in self._twins.items()
        }
        # Inner optimizers, as that of SAM, may share the groups, and have state of their own.
        for each in (optimizer, *inner_optimizers(optimizer)):
            for group in each.param_groups:
                group["params"][:] = [names.get(param, param) for param in group["params"]]
            state = {names.get(param, param): values for param, values in each.state.items()}
            each.state.clear()
            each.state.update(state)


def step_on_full_tensors(
    optimizer: Optimizer,
    found: FoundScope,
    *,
    group: dist.ProcessGroup,
    held: Callable[[nn.Parameter], HeldTensor] = HeldTensor.updated_in_place,
    device: torch.device | None = None,
    hosted: HostedState | None = None,
    before_step: Callable[[], None] | None = None,
    after_step: Callable[[], None] | None = None,
) -> None:
    """Replace ``optimizer.step()`` by an update of unsharded tensors, however they are sharded.

    The call is collective over ``group``, and so is every step. It does nothing if the optimizer was set up before.

    Args:
        optimizer: Holds the user's parameters.
        found: What the update of an element depends on; not ``"elementwise"``.
        group: Ranks that together hold all elements of the parameters.
        held: Returns the storage of a parameter on this rank.
        device: Device of the update; that of the parameters' values if None.
        hosted: Holds the state between steps if it is offloaded; otherwise None.
        before_step: Called right before the update, after a closure.
        after_step: Called after the update.
    """
    if updates_of(optimizer) is not None:
        return
    settings: dict[str, Any] = {
        "group": group,
        "held": held,
        "found": found,
        "device": device,
        "hosted": hosted,
        "before_step": before_step,
        "after_step": after_step,
    }
    step: Callable[..., Any]
    if found.scope == "joint":
        joint = JointUpdates(optimizer, step=optimizer.step, **settings)

        def step(self: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            return joint.step(closure, **kwargs)
    else:
        owners = OwnerUpdates(optimizer, **settings)

        def step(self: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            result = None
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
            owners.step(**kwargs)
            return result

    follow_schedulers(optimizer, step)
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
