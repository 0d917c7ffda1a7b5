"""What an optimizer's update of an element depends on, found by trying it on small tensors."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pardist.checkpoint.tensors import restore_shared, shared_state
from lightning_pardist.compat.collective_waits import no_collectives
from lightning_pardist.engines.common.elementwise import (
    Form,
    is_elementwise,
    kinds_of,
    marked,
    numbers_of_shapes,
    others_of,
    own_step,
    same_numbers,
    small_shape,
    trial_settings,
    twin_of_groups,
    values_of,
)
from lightning_pardist.settings import one_of

#: ``"elementwise"``: on the element's own gradient, value and state (Adam, SGD). ``"per_tensor"``: on those of its
#: tensor (Muon, Adafactor, Shampoo, LAMB). ``"joint"``: on those of all tensors (LBFGS, a norm over all parameters).
Scope = Literal["elementwise", "per_tensor", "joint"]
ScopeSetting = Literal["auto", "elementwise", "per_tensor", "joint"]

_MEANINGS: dict[Scope, str] = {
    "elementwise": "updates every element by itself",
    "per_tensor": "updates one tensor at a time",
    "joint": "updates all tensors together",
}
_STEPS = 3

Values = list[list[Tensor]]


@dataclass(frozen=True)
class FoundScope:
    """The answer for one optimizer.

    Attributes:
        scope: What an element's update depends on.
        in_rounds: Whether a step may be taken in several calls of ``step``, each with some of the tensors, if all
            begin with the same settings.
        steps_on_none: Whether ``step`` may be called where it has no tensor.
        is_set: Whether the user said so, and nothing was tried.
    """

    scope: Scope
    in_rounds: bool = True
    steps_on_none: bool = True
    is_set: bool = False

    def describe(self) -> str:
        """In words, for the log."""
        return f"{_MEANINGS[self.scope]} ({'as set' if self.is_set else 'found by a trial, update_scope sets it'})"


_found: WeakKeyDictionary[Optimizer, dict[Form, FoundScope]] = WeakKeyDictionary()


def check_scope(setting: str) -> ScopeSetting:
    """The setting, if it is one.

    Raises:
        ValueError: If it is not.
    """
    one_of("update_scope", setting, get_args(ScopeSetting))
    return setting  # type: ignore[return-value]


def find_scope(optimizer: Optimizer, *, form: Form, setting: ScopeSetting = "auto") -> FoundScope:
    """Find out what an optimizer needs to see of its parameters. Not collective, equal on all ranks.

    Steps of copies of the optimizer are compared: on a small tensor and on parts of it, on several tensors together and
    on each alone. Neither the optimizer, nor its parameters, nor any random state is changed. An optimizer is tried
    once.

    Args:
        optimizer: Before its first step, or after any.
        form: In which form a rank holds parts.
        setting: What the user says; ``"auto"`` to try.

    Raises:
        ValueError: If it cannot be tried, talks to other ranks, or draws random numbers, which ranks would draw
            differently.
    """
    if setting != "auto":
        return _noted(optimizer, form, FoundScope(setting, in_rounds=False, steps_on_none=False, is_set=True))
    known = _found.get(optimizer, {}).get(form)
    return known or _noted(optimizer, form, _tried(optimizer, form))


def calls_closure_again(optimizer: Optimizer) -> bool:
    """Whether a step needs a closure: it runs forward and backward as often as it likes, and looks at the loss."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def known_scope(optimizer: Optimizer) -> FoundScope | None:
    """What :func:`find_scope` has found before."""
    return next(iter(_found.get(optimizer, {}).values()), None)


def _noted(optimizer: Optimizer, form: Form, found: FoundScope) -> FoundScope:
    _found.setdefault(optimizer, {})[form] = found
    return found


def _tried(optimizer: Optimizer, form: Form) -> FoundScope:
    with no_collectives() as called:
        try:
            return _tried_alone(optimizer, form)
        finally:
            if called():
                raise ValueError(
                    f"The step of {type(optimizer).__name__} talks to other ranks itself ({called()}), which may hold"
                    " other parts and tensors than it expects. Use its single-device form: ranks share its work as"
                    " update_scope says."
                ) from None


def _tried_alone(optimizer: Optimizer, form: Form) -> FoundScope:
    if is_elementwise(optimizer, form=form):
        return FoundScope("elementwise")
    if calls_closure_again(optimizer):
        # It runs forward and backward again, with all that they use.
        return FoundScope("joint")
    with _same_random_state() as draws:
        start, grads = _example(optimizer)
        try:
            stepped = _stepped(optimizer, start, grads)
            together = _values(stepped)
        except Exception as error:
            reason = f"a step on small tensors failed ({type(error).__name__}: {error})"
            raise ValueError(_refusal(optimizer, reason)) from None
        if draws():
            raise ValueError(_refusal(optimizer, "its step draws random numbers, and ranks would draw different ones"))
        if all(torch.equal(a, b) for a, b in zip(_flat(together), _flat(start), strict=True)):
            # One that wraps another optimizer and steps that, for instance.
            raise ValueError(_refusal(optimizer, "a step on other parameters than its own changed nothing"))
        if not _same_alone(optimizer, start, grads, stepped):
            return FoundScope("joint")
        in_rounds = _agree(lambda: _stepped(optimizer, start, grads, rounds=True), together) is not None
        none: Values = [[] for _ in start]
        on_none = _agree(lambda: _stepped(optimizer, none, [none]), none) is not None
        return FoundScope("per_tensor", in_rounds=in_rounds, steps_on_none=on_none)


def _same_alone(optimizer: Optimizer, start: Values, grads: list[Values], stepped: Optimizer) -> bool:
    """Whether each tensor comes out as it does among the others, where it is the optimizer's only one."""
    together = _values(stepped)
    for index, members in enumerate(start):
        for position in range(len(members)):

            def alone(values: Values, index: int = index, position: int = position) -> Values:
                return [[group[position]] if at == index else [] for at, group in enumerate(values)]

            run = [alone(step_grads) for step_grads in grads]
            found = _agree(lambda run=run, alone=alone: _stepped(optimizer, alone(start), run), alone(together))  # type: ignore[misc]
            # Some groups' counts stand still without parameters.
            if found is None:
                return False
            if same_numbers(found, stepped, groups=[index]):
                continue
            if not same_numbers(found, stepped, groups=[index], but=_counts(optimizer, start, grads, stepped)):
                return False
    return True


def _counts(optimizer: Optimizer, start: Values, grads: list[Values], stepped: Optimizer) -> set[Any]:
    """Numbers that have nothing to do with values and gradients."""
    others, *run = [[others_of(members) for members in values] for values in (start, *grads)]
    try:
        return numbers_of_shapes(stepped, _stepped(optimizer, others, run))
    except Exception:
        # On values like these.
        return set()


def _agree(run: Callable[[], Optimizer], wanted: Values) -> Optimizer | None:
    """What has stepped, if it has come to the same values."""
    try:
        found = run()
    except Exception:
        return None
    same = all(torch.allclose(a, b, 1e-5, 1e-7) for a, b in zip(values_of(found), _flat(wanted), strict=True))
    return found if same else None


def _values(stepped: Optimizer) -> Values:
    return [[param.detach() for param in group["params"]] for group in stepped.param_groups]


def _stepped(optimizer: Optimizer, start: Values, grads: Sequence[Values], *, rounds: bool = False) -> Optimizer:
    """Run a copy of the optimizer on other parameters; in ``rounds``, one of them at a time."""
    clone = twin_of_groups(optimizer, trial_settings(optimizer), start)
    groups = [list(group["params"]) for group in clone.param_groups]
    step = own_step(clone)
    for step_grads in grads:
        for params, values in zip(groups, step_grads, strict=True):
            for param, grad in zip(params, values, strict=True):
                param.grad = grad.clone()
        if not rounds:
            step(clone)
            continue
        settings, shared = group_settings(clone), copy.deepcopy(shared_state(clone))
        for index, params in enumerate(groups):
            for param in params:
                restore_settings(clone, settings)
                restore_shared(clone, copy.deepcopy(shared))
                for at, group in enumerate(clone.param_groups):
                    group["params"] = [param] if at == index else []
                step(clone)
        for group, params in zip(clone.param_groups, groups, strict=True):
            group["params"] = params
    return clone


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The parameter groups without parameters, as copies: an optimizer may count steps in them."""
    return [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def restore_settings(optimizer: Optimizer, settings: Sequence[dict[str, Any]]) -> None:
    """Let parameter groups have the settings that :func:`group_settings` gave, tensors in place."""
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        for key, value in values.items():
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                group[key].copy_(value)
            else:
                group[key] = value


def _example(optimizer: Optimizer) -> tuple[Values, list[Values]]:
    """Small parameters, in each group two of every kind that it has, and gradients for some steps."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> Values:
        return [
            [
                marked(torch.randn(small_shape(dims), generator=generator), marks)
                for dims, marks in kinds
                for _ in range(2)
            ]
            for kinds in of_groups
        ]

    of_groups = [kinds_of(group) if group["params"] else [] for group in optimizer.param_groups]
    return draw(), [draw() for _ in range(_STEPS)]


def _flat(values: Values) -> list[Tensor]:
    return [value for group in values for value in group]


@contextmanager
def _same_random_state() -> Iterator[Callable[[], bool]]:
    """Inside, random numbers may be drawn; yields whether any were."""
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        yield lambda: not torch.equal(before, torch.get_rng_state())


def _refusal(optimizer: Optimizer, reason: str) -> str:
    return (
        f"{type(optimizer).__name__} cannot be told to update elements, tensors or all of them together: {reason}."
        " Use pardist_ddp, which keeps parameters and state whole, or an optimizer such as AdamW or SGD; or say what it"
        " does by update_scope='per_tensor' or 'joint'."
    )


def steps_on_wholes(optimizer: Optimizer, *, form: Form, setting: ScopeSetting = "auto") -> bool:
    """Whether an optimizer is given whole tensors where ranks hold parts; as :func:`find_scope`."""
    return has_parameters(optimizer) and find_scope(optimizer, form=form, setting=setting).scope != "elementwise"


def cannot_step_on_parts(optimizer: Optimizer, found: FoundScope) -> str:
    """What is said where an optimizer would have to be elementwise, and is not."""
    return (
        f"{type(optimizer).__name__} cannot step on parts of parameters: it {found.describe()}, and no group of ranks"
        " is named that hold them whole. Name one, or use an elementwise optimizer such as AdamW or SGD."
    )


def has_parameters(optimizer: Optimizer) -> bool:
    """Whether there is anything to update; not in what stands in for an optimizer of ``configure_optimizers``."""
    return any(isinstance(param, nn.Parameter) for group in optimizer.param_groups for param in group["params"])
