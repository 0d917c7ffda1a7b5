"""Determine what an optimizer's update of an element depends on, by trial steps on small tensors."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
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
    copy_of_groups,
    is_elementwise,
    kinds_of,
    numbers_of_shapes,
    other_values,
    own_step,
    same_numbers,
    small_shape,
    trial_settings,
    values_of,
    with_user_attributes,
)
from lightning_pardist.settings import one_of

#: ``"elementwise"``: the element's own gradient, value and state (Adam, SGD). ``"per_tensor"``: those of its tensor
#: (Muon, Adafactor, Shampoo, LAMB). ``"joint"``: those of all tensors (LBFGS, a norm over all parameters).
Scope = Literal["elementwise", "per_tensor", "joint"]
ScopeSetting = Literal["auto", "elementwise", "per_tensor", "joint"]

_MEANINGS: dict[Scope, str] = {
    "elementwise": "updates every element independently",
    "per_tensor": "updates one tensor at a time",
    "joint": "updates all tensors together",
}
_STEPS = 3

Values = list[list[Tensor]]


@dataclass(frozen=True)
class FoundScope:
    """The update scope of one optimizer.

    Attributes:
        scope: What an element's update depends on.
        in_rounds: Whether a step can be split into several calls of ``step``, each with some of the tensors, if all
            start with the same group settings.
        steps_on_none: Whether ``step`` can be called without any tensor.
        is_set: Whether the scope was set by the user, without trial steps.
    """

    scope: Scope
    in_rounds: bool = True
    steps_on_none: bool = True
    is_set: bool = False

    def describe(self) -> str:
        """Return a description for the log."""
        origin = "set by update_scope" if self.is_set else "found by a trial; update_scope overrides it"
        return f"{_MEANINGS[self.scope]} ({origin})"


_found: WeakKeyDictionary[Optimizer, dict[Form, FoundScope]] = WeakKeyDictionary()


def check_scope(setting: str) -> ScopeSetting:
    """Return the setting, if it is valid.

    Raises:
        ValueError: If it is not.
    """
    one_of("update_scope", setting, get_args(ScopeSetting))
    return setting  # type: ignore[return-value]


def find_scope(optimizer: Optimizer, *, form: Form, setting: ScopeSetting = "auto") -> FoundScope:
    """Determine the update scope of an optimizer. Not collective, equal on all ranks.

    Steps of copies of the optimizer are compared: on a small tensor and on shards of it, on several tensors together
    and on each alone. The optimizer, its parameters and all random states are unchanged. The result is cached per
    optimizer and form.

    Args:
        optimizer: The optimizer, before or after its first step.
        form: The form of the shards that a rank holds.
        setting: The user's setting; ``"auto"`` for trial steps.

    Raises:
        ValueError: If the trial fails, or the step uses collectives or draws random numbers, which would differ between
            ranks.
    """
    if setting != "auto":
        return _cached(optimizer, form, FoundScope(setting, in_rounds=False, steps_on_none=False, is_set=True))
    known = _found.get(optimizer, {}).get(form)
    return known or _cached(optimizer, form, _probe_scope(optimizer, form))


def calls_closure_again(optimizer: Optimizer) -> bool:
    """Return whether a step requires a closure, which it may call several times and whose loss it uses."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def known_scope(optimizer: Optimizer) -> FoundScope | None:
    """Return a cached result of :func:`find_scope`; None if there is none."""
    return next(iter(_found.get(optimizer, {}).values()), None)


def _cached(optimizer: Optimizer, form: Form, found: FoundScope) -> FoundScope:
    _found.setdefault(optimizer, {})[form] = found
    return found


def _probe_scope(optimizer: Optimizer, form: Form) -> FoundScope:
    with no_collectives() as called:
        try:
            return _probe_without_collectives(optimizer, form)
        finally:
            if called():
                raise ValueError(
                    f"The step of {type(optimizer).__name__} calls collectives ({called()}), but ranks may hold"
                    " other shards and tensors than it expects. Use its single-device version: the strategy divides"
                    " its work among ranks according to update_scope."
                ) from None


_SEVERAL = (list, tuple, dict)


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that an optimizer holds in attributes, and those in them, as those of SAM or Lookahead."""
    found, waiting = [optimizer], [optimizer]
    while waiting:
        held = vars(waiting.pop()).values()
        several = [each.values() if isinstance(each, dict) else each for each in held if isinstance(each, _SEVERAL)]
        for each in (*held, *itertools.chain.from_iterable(several)):
            if isinstance(each, Optimizer) and not any(each is known for known in found):
                found.append(each)
                waiting.append(each)
    return found[1:]


def _needs_closure(optimizer: Optimizer) -> bool:
    """Return whether a step fails without a closure, though its signature has a default, and calls one again."""
    if "closure" not in inspect.signature(type(optimizer).step).parameters:
        return False
    calls: list[Tensor] = []

    def closure() -> Tensor:
        calls.append(torch.ones(()))
        return calls[-1]

    with _same_random_state():
        start, grads = _example(optimizer)
        try:
            _stepped(optimizer, start, grads[:1])
        except Exception:
            # A step may fail in any way on a closure of None, and on trial parameters.
            try:
                _stepped(optimizer, start, grads[:1], closure=closure)
            except Exception:
                return False
            return len(calls) > 1
    return False


def _probe_without_collectives(optimizer: Optimizer, form: Form) -> FoundScope:
    if is_elementwise(optimizer, form=form):
        return FoundScope("elementwise")
    if calls_closure_again(optimizer) or _needs_closure(optimizer):
        # The closure reruns forward and backward, which use all parameters.
        return FoundScope("joint")
    with _same_random_state() as draws:
        start, grads = _example(optimizer)
        try:
            stepped = _stepped(optimizer, start, grads)
            together = _values(stepped)
        except Exception as error:
            reason = f"a trial step on small tensors failed ({type(error).__name__}: {error})"
            raise ValueError(_refusal(optimizer, reason)) from None
        if draws():
            raise ValueError(_refusal(optimizer, "its step draws random numbers, which would differ between ranks"))
        if all(torch.equal(a, b) for a, b in zip(_flat(together), _flat(start), strict=True)):
            # For instance, the optimizer wraps another one and steps that.
            raise ValueError(_refusal(optimizer, "a trial step on other parameters than its own changed nothing"))
        if not _same_alone(optimizer, start, grads, stepped):
            return FoundScope("joint")
        in_rounds = _matching_trial(lambda: _stepped(optimizer, start, grads, rounds=True), together) is not None
        none: Values = [[] for _ in start]
        on_none = _matching_trial(lambda: _stepped(optimizer, none, [none]), none) is not None
        return FoundScope("per_tensor", in_rounds=in_rounds, steps_on_none=on_none)


def _same_alone(optimizer: Optimizer, start: Values, grads: list[Values], stepped: Optimizer) -> bool:
    """Return whether a step on each tensor alone gives the same result as a step on all tensors together."""
    together = _values(stepped)
    for index, members in enumerate(start):
        for position in range(len(members)):

            def alone(values: Values, index: int = index, position: int = position) -> Values:
                return [[group[position]] if at == index else [] for at, group in enumerate(values)]

            run = [alone(step_grads) for step_grads in grads]
            found = _matching_trial(functools.partial(_stepped, optimizer, alone(start), run), alone(together))
            # Counts of groups without parameters may not advance, so only this tensor's group is compared.
            if found is None:
                return False
            if same_numbers(found, stepped, groups=[index]):
                continue
            if not same_numbers(found, stepped, groups=[index], but=_counts(optimizer, start, grads, stepped)):
                return False
    return True


def _counts(optimizer: Optimizer, start: Values, grads: list[Values], stepped: Optimizer) -> set[Any]:
    """Return the numbers of a stepped copy that do not depend on values and gradients; empty if the trial fails."""
    others, *run = [[other_values(members) for members in values] for values in (start, *grads)]
    try:
        return numbers_of_shapes(stepped, _stepped(optimizer, others, run))
    except Exception:
        # The step fails on these values.
        return set()


def _matching_trial(run: Callable[[], Optimizer], wanted: Values) -> Optimizer | None:
    """Run trial steps and return the stepped copy if its values match ``wanted``; None otherwise, or if they fail."""
    try:
        found = run()
    except Exception:
        return None
    same = all(torch.allclose(a, b, 1e-5, 1e-7) for a, b in zip(values_of(found), _flat(wanted), strict=True))
    return found if same else None


def _values(stepped: Optimizer) -> Values:
    return [[param.detach() for param in group["params"]] for group in stepped.param_groups]


def _stepped(
    optimizer: Optimizer,
    start: Values,
    grads: Sequence[Values],
    *,
    rounds: bool = False,
    closure: Callable[[], Tensor] | None = None,
) -> Optimizer:
    """Step a copy of the optimizer on other parameters; with ``rounds``, one parameter at a time."""
    clone = copy_of_groups(optimizer, trial_settings(optimizer), start)
    groups = [list(group["params"]) for group in clone.param_groups]
    step: Callable[..., Any] = own_step(clone)
    for step_grads in grads:
        for params, values in zip(groups, step_grads, strict=True):
            for param, grad in zip(params, values, strict=True):
                param.grad = grad.clone()
        if not rounds:
            step(clone) if closure is None else step(clone, closure)
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
    """Return copies of the parameter groups' settings, in which an optimizer may count steps."""
    return [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def restore_settings(optimizer: Optimizer, settings: Sequence[dict[str, Any]]) -> None:
    """Restore settings returned by :func:`group_settings`, tensors in place."""
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        for key, value in values.items():
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                group[key].copy_(value)
            else:
                group[key] = value


def _example(optimizer: Optimizer) -> tuple[Values, list[Values]]:
    """Return small trial parameters, two per kind in each group, and gradients for some steps."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> Values:
        return [
            [
                with_user_attributes(torch.randn(small_shape(dims), generator=generator), marks)
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
    """Restore the host's random state on exit; yields a function that returns whether random numbers were drawn."""
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        yield lambda: not torch.equal(before, torch.get_rng_state())


def _refusal(optimizer: Optimizer, reason: str) -> str:
    return (
        f"Cannot determine whether {type(optimizer).__name__} updates elements, tensors or all tensors together:"
        f" {reason}. Use pardist_ddp, which does not shard parameters and state, use an optimizer such as AdamW or"
        " SGD, or set update_scope='per_tensor' or 'joint'."
    )


def needs_full_tensors(optimizer: Optimizer, *, form: Form, setting: ScopeSetting = "auto") -> bool:
    """Return whether an optimizer must step on unsharded tensors. Arguments and errors as in :func:`find_scope`."""
    return has_parameters(optimizer) and find_scope(optimizer, form=form, setting=setting).scope != "elementwise"


def non_elementwise_error(optimizer: Optimizer, found: FoundScope) -> str:
    """Return the error message for an optimizer that would have to be elementwise, and is not."""
    return (
        f"{type(optimizer).__name__} cannot step on shards of parameters: it {found.describe()}, and no group of"
        " ranks that together hold the full tensors is given. Pass one, or use an elementwise optimizer such as"
        " AdamW or SGD."
    )


def has_parameters(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has parameters; False for a placeholder of one from ``configure_optimizers``."""
    return any(isinstance(param, nn.Parameter) for group in optimizer.param_groups for param in group["params"])
