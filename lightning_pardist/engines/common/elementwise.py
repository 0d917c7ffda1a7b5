"""Test by trial steps whether an optimizer is elementwise, so that each rank can update a shard of the parameters."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pardist.checkpoint.tensors import shared_state
from lightning_pardist.engines.common.train_switches import SWITCHES, has_switches

#: ``"flat"``: one-dimensional slices of elements. ``"dims"``: shards along one dim, with the number of dims kept.
Form = Literal["flat", "dims"]
_T = TypeVar("_T", bound=Tensor)

_STEPS = 3
#: By number of dims, a small shape and one of a few thousand elements: some optimizers treat large tensors differently
#: (8-bit or factored state), some of them in blocks of 256 and only if the size is a multiple. For more dims, each
#: further dim is 2 in the small and 1 in the large shape.
_SHAPES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((), ()),
    ((6,), (5888,)),
    ((4, 6), (80, 64)),
    ((2, 4, 6), (40, 2, 64)),
    ((4, 3, 3, 3), (64, 16, 3, 3)),
    ((3, 2, 3, 3, 3), (64, 4, 3, 3, 3)),
)
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype)

Cut = Callable[[Tensor], Sequence[Tensor]]


def is_elementwise(optimizer: Optimizer, *, form: Form) -> bool:
    """Return whether an optimizer's update of an element depends only on that element, its gradient and its state.

    This is tested by trial steps, with the settings of every parameter group, its numbers of dims and the attributes of
    its parameters: one copy of the optimizer steps on small tensors, further copies on shards of them, as on ranks.
    The results differ if the optimizer needs matrices, or combines all of its parameters in a norm or an estimate.

    Args:
        optimizer: A torch optimizer; neither it nor its parameters are changed.
        form: The form of the shards that a rank's optimizer gets.

    Returns:
        True if the optimizer is elementwise; False also if it cannot step on shards, or if a step changes nothing.
    """
    cuts: list[Cut] = (
        [_cut_flat] if form == "flat" else [lambda whole: _halves(whole, 0), lambda whole: _halves(whole, 1)]
    )
    moved = False
    # Small shapes first, so that optimizers that compute matrix roots per dim fail before large ones are tried.
    for size, (options, group) in itertools.product(
        range(2), zip(trial_settings(optimizer), optimizer.param_groups, strict=True)
    ):
        values, grads = _example([(_shapes(dims)[size], marks) for dims, marks in kinds_of(group)])
        try:
            whole = stepped_copy(optimizer, options, values, grads)
            wholes = values_of(whole)
            if not all(_same_on_parts(optimizer, options, values, grads, whole, cut) for cut in cuts):
                return False
        except Exception:
            # The optimizer cannot step on shards, or on tensors of these shapes.
            return False
        moved = moved or any(not torch.equal(whole, start) for whole, start in zip(wholes, values, strict=True))
    return moved


def _same_on_parts(
    optimizer: Optimizer,
    options: dict[str, Any],
    values: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    whole: Optimizer,
    cut: Cut,
) -> bool:
    wholes = values_of(whole)
    for index in range(2):

        def parts(tensors: Sequence[Tensor], index: int = index) -> list[Tensor]:
            return [with_user_attributes(cut(t)[index], t.__dict__) for t in tensors if len(cut(t)) > index]

        part = stepped_copy(optimizer, options, parts(values), [parts(step_grads) for step_grads in grads])
        if not all(torch.allclose(a, b, 1e-5, 1e-7) for a, b in zip(values_of(part), parts(wholes), strict=True)):
            return False
        if not same_numbers(part, whole):
            other = stepped_copy(optimizer, options, other_values(values), [other_values(each) for each in grads])
            if not same_numbers(part, whole, but=numbers_of_shapes(whole, other)):
                return False
    return True


def _cut_flat(whole: Tensor) -> Sequence[Tensor]:
    return [part for part in whole.flatten().tensor_split([whole.numel() * 5 // 12]) if part.numel()]


def _halves(whole: Tensor, dim: int) -> Sequence[Tensor]:
    return whole.chunk(2, dim) if dim < whole.dim() else [whole]


def _shapes(dims: int) -> Sequence[tuple[int, ...]]:
    if dims < len(_SHAPES):
        return _SHAPES[dims]
    small, large = _SHAPES[-1]
    return small + (2,) * (dims - len(small)), large + (1,) * (dims - len(large))


def small_shape(dims: int) -> tuple[int, ...]:
    """Return the shape of the small trial tensor with a given number of dims."""
    return _shapes(dims)[0]


def kinds_of(group: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Return the distinct kinds of parameters in a group, as pairs of number of dims and attributes.

    Attributes that are not simple values (numbers, strings, dtypes) are compared by type.
    """
    found: dict[Any, tuple[int, dict[str, Any]]] = {}
    for param in group["params"]:
        marks = user_attributes(param)
        key = param.dim(), tuple(sorted((name, _kind(value)) for name, value in marks.items()))
        found.setdefault(key, (param.dim(), marks))
    return [found[key] for key in sorted(found)] or [(2, {})]


def user_attributes(param: Tensor) -> dict[str, Any]:
    """Return the attributes that users set on a parameter, which an optimizer may read."""
    return {name: value for name, value in param.__dict__.items() if not name.startswith("_pardist")}


def with_user_attributes(tensor: _T, marks: Mapping[str, Any]) -> _T:
    """Set attributes on a tensor and return it."""
    tensor.__dict__.update(marks)
    return tensor


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {value!r}" if isinstance(value, _SIMPLE) else type(value).__name__


def stepped(
    optimizer: Optimizer,
    options: dict[str, Any],
    values: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    *,
    step: Callable[[Optimizer], None] | None = None,
) -> list[Tensor]:
    """Return the parameters after some steps of a copy of an optimizer, see :func:`stepped_copy`."""
    return values_of(stepped_copy(optimizer, options, values, grads, step=step))


def stepped_copy(
    optimizer: Optimizer,
    options: dict[str, Any],
    values: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    *,
    step: Callable[[Optimizer], None] | None = None,
) -> Optimizer:
    """Run some steps of a copy of an optimizer on other parameters.

    Args:
        optimizer: The optimizer to copy; it is not changed.
        options: Settings of the single parameter group.
        values: Initial values of the parameters.
        grads: For each step, one gradient per parameter.
        step: Function that runs one step; the optimizer's own step if None.

    Returns:
        The copy after all steps.
    """
    clone = optimizer_copy(optimizer, options, values)
    params: list[nn.Parameter] = clone.param_groups[0]["params"]
    for step_grads in grads:
        for param, grad in zip(params, step_grads, strict=True):
            param.grad = grad.clone()
        (step or own_step(clone))(clone)
    return clone


def values_of(clone: Optimizer) -> list[Tensor]:
    """Return the parameters of a copy, in the order of its groups."""
    return [param.detach() for group in clone.param_groups for param in group["params"]]


def same_numbers(
    one: Optimizer, other: Optimizer, groups: Sequence[int] | None = None, *, but: Collection[Any] = ()
) -> bool:
    """Return whether two copies hold the same numbers outside of per-parameter state.

    An estimate over all parameters (Prodigy's distance, arXiv 2306.06101) may affect values only in a later step.

    Args:
        one: A copy after some steps.
        other: A copy after the same number of steps.
        groups: Indices of parameter groups to compare; all if None.
        but: Numbers to ignore, as returned by :func:`numbers_of_shapes`.
    """
    found, wanted = (_numbers(each, groups, but) for each in (one, other))
    return found.keys() == wanted.keys() and all(
        value.shape == wanted[key].shape and torch.allclose(value, wanted[key], 1e-5, 0.0, equal_nan=True)
        for key, value in found.items()
    )


def numbers_of_shapes(one: Optimizer, other: Optimizer) -> set[Any]:
    """Return the numbers that do not depend on values and gradients: counts of steps, tensors or elements.

    Estimates are not among them. If the update uses one of these counts, steps on shards give different values.

    Args:
        one: A copy after some steps.
        other: A copy after as many steps on tensors of the same shapes, with other values and gradients.
    """
    found, wanted = _numbers(one, None), _numbers(other, None)
    return {key for key, value in found.items() if key in wanted and torch.equal(value, wanted[key])}


def other_values(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return other values (or gradients) for a trial, of the same shapes and attributes."""
    # Not a multiple or a sign change, so that any estimate changes.
    return [with_user_attributes(each * each + 0.25, each.__dict__) for each in tensors]


def _numbers(optimizer: Optimizer, groups: Sequence[int] | None, but: Collection[Any] = ()) -> dict[Any, Tensor]:
    """Return the numbers in parameter groups, in state shared by all parameters, and in attributes."""
    places: dict[Any, Mapping[Any, Any]] = {"attributes": optimizer.__dict__, "shared": shared_state(optimizer)}
    places.update((at, group) for at, group in enumerate(optimizer.param_groups) if groups is None or at in groups)
    return {
        (place, key): torch.as_tensor(value, dtype=torch.float64)
        for place, values in places.items()
        for key, value in values.items()
        if (place, key) not in but
        if isinstance(value, bool | int | float) or (isinstance(value, Tensor) and not value.is_complex())
    }


def optimizer_copy(optimizer: Optimizer, options: dict[str, Any], values: Sequence[Tensor]) -> Optimizer:
    """Return a copy of an optimizer before its first step, over copies of ``values`` in one group."""
    return copy_of_groups(optimizer, [options], [values])


def copy_of_groups(
    optimizer: Optimizer, settings: Sequence[dict[str, Any]], values: Sequence[Sequence[Tensor]]
) -> Optimizer:
    """Return a copy of an optimizer before its first step, over copies of ``values``, group by group.

    Attributes of ``values`` are copied to its parameters.
    """
    clone: Optimizer = object.__new__(type(optimizer))
    clone.__dict__.update({key: own_copy(value) for key, value in optimizer.__dict__.items()})
    for name in ("step", *SWITCHES):
        clone.__dict__.pop(name, None)
    clone.param_groups = [
        {
            **{key: own_copy(value) for key, value in options.items()},
            "params": [
                with_user_attributes(nn.Parameter(value.clone()), _copied_user_attributes(value)) for value in members
            ],
        }
        for options, members in zip(settings, values, strict=True)
    ]
    clone.state = defaultdict(dict)
    if optimizer.state or type(optimizer).__module__.startswith("torch.optim."):
        # Before torch 2.12 Adagrad creates state in its constructor, which is moved aside while parameters are
        # exchanged; other optimizers create it in a step. Constructors outside of torch may have other effects.
        make: Callable[..., Optimizer] = type(optimizer)
        with suppress(TypeError, ValueError):
            clone.state = make([group for group in clone.param_groups if group["params"]]).state
    if has_switches(clone):
        # Schedule-free optimizers refuse to step before their user has switched them to training.
        clone.train()  # type: ignore[attr-defined]
    return clone


def own_step(optimizer: Optimizer) -> Callable[[Optimizer], None]:
    """Return the ``step`` of the optimizer's class, without torch's pre- and post-step hooks."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step)


def state_bytes_per_element(optimizer: Optimizer) -> list[float]:
    """Return the bytes of state per fp32 element after one step, for each group; 0 for an optimizer without state."""
    (values,), ((grad,), *_) = _example([(small_shape(2), {})])
    found = []
    for options in trial_settings(optimizer):
        clone = optimizer_copy(optimizer, options, [values])
        param: nn.Parameter = clone.param_groups[0]["params"][0]
        param.grad = grad
        own_step(clone)(clone)
        tensors = [value for value in clone.state[param].values() if isinstance(value, Tensor)]
        found.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.dim()) / values.numel())
    return found


def _example(
    kinds: Sequence[tuple[tuple[int, ...], Mapping[str, Any]]],
) -> tuple[list[Tensor], list[list[Tensor]]]:
    generator = torch.Generator().manual_seed(0)

    def draw() -> list[Tensor]:
        return [with_user_attributes(torch.randn(shape, generator=generator), marks) for shape, marks in kinds]

    return draw(), [draw() for _ in range(_STEPS)]


def trial_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return each group's settings, adapted to trial steps in fp32 on the host."""
    found = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if "lr" in options:
            # The learning rate may be 0 in the first step of a warmup, which would hide the update.
            # It stays a tensor for classes that refuse numbers; torch's own accept tensors only with "capturable".
            tensor = isinstance(options["lr"], Tensor) and "capturable" not in options
            options["lr"] = torch.tensor(0.1) if tensor else 0.1
        # Device-specific kernels do not change the arithmetic.
        options.update({key: False for key in ("fused", "capturable") if key in options})
        found.append({key: v.detach().cpu() if isinstance(v, Tensor) else v for key, v in options.items()})
    return found


def _copied_user_attributes(value: Tensor) -> dict[str, Any]:
    # Tensors with dims fit the shape of the original parameter, not that of a trial parameter.
    return {
        name: own_copy(mark) for name, mark in value.__dict__.items() if not isinstance(mark, Tensor) or not mark.dim()
    }


def own_copy(value: Any) -> Any:
    """Return a copy of a setting or attribute that can be changed without affecting the original."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, dict | list | set) else value
