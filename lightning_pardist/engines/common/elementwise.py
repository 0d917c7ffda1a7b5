"""Tries whether an optimizer is elementwise, so that each rank may step on a part of the parameters."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

#: ``"flat"``: one-dimensional runs of elements. ``"dims"``: parts along one dim, the number of dims kept.
Form = Literal["flat", "dims"]

_STEPS = 3
#: Some optimizers treat tensors of a few thousand elements in another way (states of 8 bits, factored ones).
_SHAPES = ((4, 6), (80, 72))


def is_elementwise(optimizer: Optimizer, *, form: Form) -> bool:
    """Whether an optimizer's update of an element depends on nothing but that element, its gradient and its state.

    It is tried out rather than looked up, with the settings of every parameter group: some steps on a small matrix by
    one optimizer, and on parts of it by an optimizer each, as ranks have them. So one that joins all of its parameters
    in a norm or an estimate is found as well as one that needs matrices.

    Args:
        optimizer: A torch optimizer; neither it nor its parameters are changed.
        form: What a rank's optimizer is given.

    Returns:
        False as well where the optimizer cannot step like this, or where a step changes nothing.
    """
    cuts: list[Callable[[Tensor], Sequence[Tensor]]] = [lambda whole: whole.flatten().tensor_split([10])]
    if form == "dims":
        cuts = [lambda whole: whole.chunk(2), lambda whole: whole.chunk(2, dim=1)]
    moved = False
    for options, shape in itertools.product(trial_settings(optimizer), _SHAPES):
        try:
            values, grads = _example(shape)
            (whole,) = stepped(optimizer, options, [values], [[grad] for grad in grads])
            if not all(_same_on_parts(optimizer, options, whole, cut) for cut in cuts):
                return False
        except Exception:
            # On parts, or on anything of this shape.
            return False
        moved = moved or not torch.equal(whole, values)
    return moved


def _same_on_parts(
    optimizer: Optimizer, options: dict[str, Any], whole: Tensor, cut: Callable[[Tensor], Sequence[Tensor]]
) -> bool:
    values, grads = _example(whole.shape)
    parts = zip(cut(values), cut(whole), *map(cut, grads), strict=True)
    return all(
        torch.allclose(stepped(optimizer, options, [start], [[grad] for grad in part_grads])[0], wanted, 1e-5, 1e-7)
        for start, wanted, *part_grads in parts
    )


def stepped(
    optimizer: Optimizer,
    options: dict[str, Any],
    values: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    *,
    step: Callable[[Optimizer], None] | None = None,
) -> list[Tensor]:
    """Run some steps of a copy of an optimizer on other parameters.

    Args:
        optimizer: Of which kind; it is not changed.
        options: Settings of the one parameter group.
        values: The parameters.
        grads: Step by step, a gradient for each of them.
        step: Runs one step in place of the optimizer's own.

    Returns:
        The parameters after all steps.
    """
    clone = twin(optimizer, options, values)
    params: list[nn.Parameter] = clone.param_groups[0]["params"]
    for step_grads in grads:
        for param, grad in zip(params, step_grads, strict=True):
            param.grad = grad.clone()
        (step or own_step(clone))(clone)
    return [param.detach() for param in params]


def twin(optimizer: Optimizer, options: dict[str, Any], values: Sequence[Tensor]) -> Optimizer:
    """An optimizer of the same kind before its first step, over copies of ``values`` in one group."""
    return twin_of_groups(optimizer, [options], [values])


def twin_of_groups(
    optimizer: Optimizer, settings: Sequence[dict[str, Any]], values: Sequence[Sequence[Tensor]]
) -> Optimizer:
    """An optimizer of the same kind before its first step, over copies of ``values``, group by group."""
    clone: Optimizer = object.__new__(type(optimizer))
    clone.__dict__.update({key: _own_copy(value) for key, value in optimizer.__dict__.items()})
    clone.__dict__.pop("step", None)
    clone.param_groups = [
        {
            **{key: _own_copy(value) for key, value in options.items()},
            "params": [nn.Parameter(value.clone()) for value in members],
        }
        for options, members in zip(settings, values, strict=True)
    ]
    clone.state = defaultdict(dict)
    if optimizer.state:
        # Adagrad's constructor makes state before torch 2.12; others have made it by stepping.
        make: Callable[..., Optimizer] = type(optimizer)
        with suppress(TypeError, ValueError):
            clone.state = make([group for group in clone.param_groups if group["params"]]).state
    return clone


def own_step(optimizer: Optimizer) -> Callable[[Optimizer], None]:
    """The update as the optimizer's class has it, without the hooks that torch calls around it."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step)


def state_bytes_per_element(optimizer: Optimizer) -> list[float]:
    """Bytes of state that one step leaves for each fp32 element, group by group; 0 for an optimizer without state."""
    values, (grad, *_) = _example(_SHAPES[0])
    found = []
    for options in trial_settings(optimizer):
        clone = twin(optimizer, options, [values])
        param: nn.Parameter = clone.param_groups[0]["params"][0]
        param.grad = grad
        own_step(clone)(clone)
        tensors = [value for value in clone.state[param].values() if isinstance(value, Tensor)]
        found.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.dim()) / values.numel())
    return found


def _example(shape: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator), [torch.randn(shape, generator=generator) for _ in range(_STEPS)]


def trial_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Each group's settings, fit for a trial in fp32 on the host."""
    found = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if "lr" in options:
            # That of a warmup's first step may be 0, and would hide what the optimizer does.
            options["lr"] = 0.1
        # Kernels for one device say nothing about the arithmetic.
        options.update({key: False for key in ("fused", "capturable") if key in options})
        found.append({key: v.detach().cpu() if isinstance(v, Tensor) else v for key, v in options.items()})
    return found


def _own_copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, dict | list | set) else value
