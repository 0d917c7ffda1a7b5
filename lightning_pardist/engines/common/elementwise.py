"""Tries whether an optimizer is elementwise, so that each rank may step on a part of the parameters."""

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

#: ``"flat"``: one-dimensional runs of elements. ``"dims"``: parts along one dim, the number of dims kept.
Form = Literal["flat", "dims"]
_T = TypeVar("_T", bound=Tensor)

_STEPS = 3
#: By number of dims, a small shape and one of a few thousand elements: some optimizers treat large tensors in another
#: way (states of 8 bits, factored ones), some of them in blocks of 256 and only where those come out even. Of more
#: dims, every further one is 2 and 1.
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
    """Whether an optimizer's update of an element depends on nothing but that element, its gradient and its state.

    It is tried out rather than looked up, with the settings of every parameter group, its numbers of dims and the
    attributes of its parameters: some steps on small tensors by one optimizer, and on parts of them by an optimizer
    each, as ranks have them. So one that joins all of its parameters in a norm or an estimate is found as well as one
    that needs matrices.

    Args:
        optimizer: A torch optimizer; neither it nor its parameters are changed.
        form: What a rank's optimizer is given.

    Returns:
        False as well where the optimizer cannot step like this, or where a step changes nothing.
    """
    cuts: list[Cut] = (
        [_cut_flat] if form == "flat" else [lambda whole: _halves(whole, 0), lambda whole: _halves(whole, 1)]
    )
    moved = False
    # Small ones first: what takes a root of a matrix for every dim is never given large ones.
    for size, (options, group) in itertools.product(
        range(2), zip(trial_settings(optimizer), optimizer.param_groups, strict=True)
    ):
        values, grads = _example([(_shapes(dims)[size], marks) for dims, marks in kinds_of(group)])
        try:
            whole = stepped_twin(optimizer, options, values, grads)
            wholes = values_of(whole)
            if not all(_same_on_parts(optimizer, options, values, grads, whole, cut) for cut in cuts):
                return False
        except Exception:
            # On parts, or on anything of these shapes.
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
            return [marked(cut(t)[index], t.__dict__) for t in tensors if len(cut(t)) > index]

        part = stepped_twin(optimizer, options, parts(values), [parts(step_grads) for step_grads in grads])
        if not all(torch.allclose(a, b, 1e-5, 1e-7) for a, b in zip(values_of(part), parts(wholes), strict=True)):
            return False
        if not same_numbers(part, whole):
            other = stepped_twin(optimizer, options, others_of(values), [others_of(each) for each in grads])
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
    """The shape of a trial's small tensor with so many dims."""
    return _shapes(dims)[0]


def kinds_of(group: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """What kinds of parameters a group has: each number of dims with each set of attributes that occurs with it.

    Attributes that are neither numbers nor words count by their types.
    """
    found: dict[Any, tuple[int, dict[str, Any]]] = {}
    for param in group["params"]:
        marks = marks_of(param)
        key = param.dim(), tuple(sorted((name, _kind(value)) for name, value in marks.items()))
        found.setdefault(key, (param.dim(), marks))
    return [found[key] for key in sorted(found)] or [(2, {})]


def marks_of(param: Tensor) -> dict[str, Any]:
    """Attributes by which users tell an optimizer which of its parameters are special."""
    return {name: value for name, value in param.__dict__.items() if not name.startswith("_pardist")}


def marked(tensor: _T, marks: Mapping[str, Any]) -> _T:
    """The tensor, with such attributes."""
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
    """The parameters after some steps of a copy of an optimizer, see :func:`stepped_twin`."""
    return values_of(stepped_twin(optimizer, options, values, grads, step=step))


def stepped_twin(
    optimizer: Optimizer,
    options: dict[str, Any],
    values: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    *,
    step: Callable[[Optimizer], None] | None = None,
) -> Optimizer:
    """Run some steps of a copy of an optimizer on other parameters.

    Args:
        optimizer: Of which kind; it is not changed.
        options: Settings of the one parameter group.
        values: The parameters.
        grads: Step by step, a gradient for each of them.
        step: Runs one step in place of the optimizer's own.

    Returns:
        The copy after all steps.
    """
    clone = twin(optimizer, options, values)
    params: list[nn.Parameter] = clone.param_groups[0]["params"]
    for step_grads in grads:
        for param, grad in zip(params, step_grads, strict=True):
            param.grad = grad.clone()
        (step or own_step(clone))(clone)
    return clone


def values_of(clone: Optimizer) -> list[Tensor]:
    """The parameters of a copy, group by group."""
    return [param.detach() for group in clone.param_groups for param in group["params"]]


def same_numbers(
    one: Optimizer, other: Optimizer, groups: Sequence[int] | None = None, *, but: Collection[Any] = ()
) -> bool:
    """Whether two copies keep the same numbers for all of their parameters together.

    An estimate over all of them (Prodigy's distance, arXiv 2306.06101) may begin to matter in a later step only.

    Args:
        one: After some steps.
        other: After as many.
        groups: Parameter groups that count; all if None.
        but: What :func:`numbers_of_shapes` gave.
    """
    found, wanted = (_numbers(each, groups, but) for each in (one, other))
    return found.keys() == wanted.keys() and all(
        value.shape == wanted[key].shape and torch.allclose(value, wanted[key], 1e-5, 0.0, equal_nan=True)
        for key, value in found.items()
    )


def numbers_of_shapes(one: Optimizer, other: Optimizer) -> set[Any]:
    """Which numbers are the same whatever the values and gradients: they count steps, tensors or elements.

    No estimate is among them. Where the update uses one of them, parts show it in their values.

    Args:
        one: After some steps.
        other: After as many on tensors of the same shapes, with other values and gradients.
    """
    found, wanted = _numbers(one, None), _numbers(other, None)
    return {key for key, value in found.items() if key in wanted and torch.equal(value, wanted[key])}


def others_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Other values (or gradients) for a trial, of the same shapes and attributes."""
    # Neither multiples nor signs apart: whatever an estimate looks at changes.
    return [marked(each * each + 0.25, each.__dict__) for each in tensors]


def _numbers(optimizer: Optimizer, groups: Sequence[int] | None, but: Collection[Any] = ()) -> dict[Any, Tensor]:
    """In parameter groups, in state that is nobody's own, and in attributes."""
    places: dict[Any, Mapping[Any, Any]] = {"attributes": optimizer.__dict__, "shared": shared_state(optimizer)}
    places.update((at, group) for at, group in enumerate(optimizer.param_groups) if groups is None or at in groups)
    return {
        (place, key): torch.as_tensor(value, dtype=torch.float64)
        for place, values in places.items()
        for key, value in values.items()
        if (place, key) not in but
        if isinstance(value, bool | int | float) or (isinstance(value, Tensor) and not value.is_complex())
    }


def twin(optimizer: Optimizer, options: dict[str, Any], values: Sequence[Tensor]) -> Optimizer:
    """An optimizer of the same kind before its first step, over copies of ``values`` in one group."""
    return twin_of_groups(optimizer, [options], [values])


def twin_of_groups(
    optimizer: Optimizer, settings: Sequence[dict[str, Any]], values: Sequence[Sequence[Tensor]]
) -> Optimizer:
    """An optimizer of the same kind before its first step, over copies of ``values``, group by group.

    Attributes of ``values`` are those of its parameters.
    """
    clone: Optimizer = object.__new__(type(optimizer))
    clone.__dict__.update({key: own_copy(value) for key, value in optimizer.__dict__.items()})
    clone.__dict__.pop("step", None)
    clone.param_groups = [
        {
            **{key: own_copy(value) for key, value in options.items()},
            "params": [marked(nn.Parameter(value.clone()), _own_marks(value)) for value in members],
        }
        for options, members in zip(settings, values, strict=True)
    ]
    clone.state = defaultdict(dict)
    if optimizer.state or type(optimizer).__module__.startswith("torch.optim."):
        # Adagrad's constructor makes state before torch 2.12, which waits elsewhere while parameters are exchanged;
        # others have made it by stepping. Somebody else's constructor may do more than that.
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
    (values,), ((grad,), *_) = _example([(small_shape(2), {})])
    found = []
    for options in trial_settings(optimizer):
        clone = twin(optimizer, options, [values])
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
        return [marked(torch.randn(shape, generator=generator), marks) for shape, marks in kinds]

    return draw(), [draw() for _ in range(_STEPS)]


def trial_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Each group's settings, fit for a trial in fp32 on the host."""
    found = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if "lr" in options:
            # That of a warmup's first step may be 0, and would hide what the optimizer does.
            # It stays a tensor for classes that refuse numbers; torch's own take tensors under "capturable" alone.
            tensor = isinstance(options["lr"], Tensor) and "capturable" not in options
            options["lr"] = torch.tensor(0.1) if tensor else 0.1
        # Kernels for one device say nothing about the arithmetic.
        options.update({key: False for key in ("fused", "capturable") if key in options})
        found.append({key: v.detach().cpu() if isinstance(v, Tensor) else v for key, v in options.items()})
    return found


def _own_marks(value: Tensor) -> dict[str, Any]:
    # Tensors with dims fit the parameter that has them, not one of a trial.
    return {
        name: own_copy(mark) for name, mark in value.__dict__.items() if not isinstance(mark, Tensor) or not mark.dim()
    }


def own_copy(value: Any) -> Any:
    """A setting or an attribute that an optimizer may change without changing another one's."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, dict | list | set) else value
