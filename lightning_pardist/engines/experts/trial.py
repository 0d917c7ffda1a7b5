"""Trial on one rank whether a layer of experts gives the same results and gradients if its tokens are dispatched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_pardist.compat import pytree
from lightning_pardist.compat.modules import has_run_hooks, own_parameters
from lightning_pardist.engines.common.devices import device_in_use, preserve_random_state
from lightning_pardist.engines.experts.calls import ListedExperts
from lightning_pardist.engines.experts.exchange import Peers
from lightning_pardist.engines.experts.finding import ExpertLayer
from lightning_pardist.engines.experts.footprint import Footprint
from lightning_pardist.engines.experts.layer_weights import LayerWeights, with_expert_parameters
from lightning_pardist.engines.experts.stacked import (
    StackedRoute,
    replaced,
    routes,
    run_pairs,
    undispatched_arguments,
)
from lightning_pardist.engines.tensor.rows import Arguments, Rows

#: Settings for what a layer of experts communicates.
Dispatch = Literal["auto", "tokens", "weights"]
DISPATCHES = get_args(Dispatch)
#: Tolerance for results of other summation orders, relative to the largest; wrong results differ by their own size.
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3}
_LOW_PRECISION = 0.1
#: Maximum number of rows with which a trial looks for dependence between rows, if a batch does not have more.
_ROWS = 16384


class CannotDispatchError(Exception):
    """Raised if tokens of a layer cannot be dispatched, with the reason."""


@dataclass(frozen=True)
class Choice:
    """Choice of what a layer communicates, with the reason.

    Attributes:
        dispatch: ``"tokens"`` or ``"weights"``.
        route: Roles of the arguments of stacked experts whose tokens are dispatched.
        reason: Reason for ``"weights"``.
        rows: Rows of the layer's call that it treats independently; None if it does not, or this was not tried.
    """

    dispatch: Dispatch
    route: StackedRoute | None = None
    reason: str = ""
    rows: Rows | None = None


def choose_routes(
    module: nn.Module,
    layers: Sequence[ExpertLayer],
    *,
    size: int,
    dispatch: Dispatch = "auto",
    in_parts: bool = False,
) -> list[Choice]:
    """Choose what each layer communicates, by running it on this rank alone. Not collective.

    Args:
        module: The user's module, not distributed.
        layers: Its layers of experts.
        size: Number of ranks over which the experts are distributed.
        dispatch: ``"tokens"`` rejects a layer whose tokens cannot be dispatched, ``"weights"`` tries none.
        in_parts: Whether sequences will be sharded over ranks, so that independent rows are looked for.

    Raises:
        ValueError: If a layer does not support the setting.
    """
    found = []
    for layer in layers:
        if dispatch == "weights":
            found.append(Choice("weights", reason="as set"))
            continue
        try:
            found.append(_tried(module, layer, size))
        except CannotDispatchError as problem:
            if dispatch == "tokens":
                raise ValueError(
                    f"expert_dispatch='tokens' does not work for the experts {layer.name!r}: {problem}. Set 'auto' or"
                    " 'weights', which send their weights instead."
                ) from problem
            found.append(Choice("weights", reason=str(problem)))
    if in_parts:
        found = [
            replace(choice, rows=_rows(module, layer, choice)) for layer, choice in zip(layers, found, strict=True)
        ]
    return found


def assume_routes(module: nn.Module, layers: Sequence[ExpertLayer], *, dispatch: Dispatch = "auto") -> list[Choice]:
    """Choose what each layer communicates without a trial, for tensors without values: tokens, if they are recognised.

    Args:
        module: Not distributed; its tensors need no values.
        layers: Its layers of experts.
        dispatch: The setting.
    """
    found = []
    for layer in layers:
        route = next(routes(layer, module.get_submodule(layer.runner)), None) if layer.stacked else None
        is_whole = dispatch == "weights" or not isinstance(layer.output, Tensor) or (layer.stacked and route is None)
        rows = None if route is None else _rows_of_route(layer, route)
        found.append(Choice("weights", reason="as set or assumed") if is_whole else Choice("tokens", route, rows=rows))
    return found


def _tried(module: nn.Module, layer: ExpertLayer, size: int) -> Choice:
    runner = module.get_submodule(layer.runner)
    with preserve_random_state(device_in_use()), torch.enable_grad(), _random_parameters(runner, layer, module):
        if layer.stacked:
            return Choice("tokens", _stacked_route(runner, layer, size))
        _try_lists(module, runner, layer)
        return Choice("tokens")


# --- stacked ----------------------------------------------------------------------------------------------------------


def _stacked_route(runner: nn.Module, layer: ExpertLayer, size: int) -> StackedRoute:
    if not isinstance(layer.output, Tensor):
        raise CannotDispatchError("their module does not return a tensor")
    _refuse_hooks([child for child in runner.modules() if child is not runner], layer.runner)
    problem = "their module is not called with tokens and the indices of their experts"
    before = Footprint(runner)
    for route in routes(layer, runner):
        if own := undispatched_arguments(route, layer.call):
            kinds = ", ".join(sorted({type(leaf).__name__ for _, leaf in own}))
            problem = f"their module has other arguments, which may differ between ranks and are not sent ({kinds})"
            continue
        call = _random_call(layer, route)
        try:
            expected = _results(runner, lambda: runner.forward(*call[0], **call[1]), call)  # noqa: B023
            left_behind = before != Footprint(runner)
            found = _results(runner, lambda: _run_rank_by_rank(runner, layer, route, call, size), call)  # noqa: B023
            lonely = _rows_are_independent(runner, layer, route, call, size)
        except Exception as error:
            problem = f"their forward fails when it has only some of them ({type(error).__name__}: {error})"
            continue
        if not _same(found, expected):
            problem = "results of groups of them do not add up to what their forward returns"
        elif not lonely:
            problem = "an expert's result for a row depends on other rows"
        elif left_behind or before != Footprint(runner):
            problem = "their forward changes buffers, attributes or globals, which would depend on other ranks' tokens"
        else:
            return route
    raise CannotDispatchError(problem)


def _random_call(layer: ExpertLayer, route: StackedRoute) -> Arguments:
    """Return arguments of the first call's shapes with random values; experts have unequal counts, and one has none."""
    leaves = pytree.tree_leaves(layer.call)
    index = leaves[route.index]
    places = index.shape[:-1].numel()
    scores = torch.rand(places, layer.count, device=index.device) + torch.linspace(0, 0.5, layer.count).to(index.device)
    if layer.count > index.shape[-1]:
        scores[:, 0] = -1
    changed: dict[int, Any] = {route.index: scores.topk(index.shape[-1], 1).indices.view(index.shape).to(index.dtype)}
    for i in route.tokens:
        changed[i] = torch.randn_like(leaves[i]).requires_grad_()
    for i in route.weights:
        changed[i] = torch.rand_like(leaves[i]).requires_grad_()
    return replaced(layer.call, changed)


@torch.no_grad()
def _rows_are_independent(
    runner: nn.Module, layer: ExpertLayer, route: StackedRoute, call: Arguments, size: int
) -> bool:
    """Return whether each row's result is independent of the other rows, for one expert and for several."""
    leaves = pytree.tree_leaves(call)
    places, dims, each = leaves[route.index].shape[:-1].numel(), leaves[route.index].dim() - 1, layer.count // size
    rows = max(6, places, min(size * places, _ROWS))
    own = {name: own_parameters(runner)[name][:each] for name in layer.stacked}  # type: ignore[index]
    tokens = [torch.randn_like(t.new_empty(rows, *t.shape[dims:])) for t in (leaves[i] for i in route.tokens)]
    weights = [torch.rand_like(leaves[i].new_empty(rows)) for i in route.weights]
    for each_of in tokens:
        # Shift the values so that means over rows differ as well.
        each_of[rows // 3 :] += 3

    def run(index: Tensor, part: slice) -> Tensor:
        pairs = index[part], [t[part] for t in tokens], [w[part] for w in weights]
        return run_pairs(runner, runner.forward, route, call, own, pairs)

    for index in (torch.zeros(rows, dtype=torch.int64), torch.arange(rows) % each):
        here = index.to(leaves[route.index].device)
        parts = torch.cat([run(here, slice(0, rows // 3)), run(here, slice(rows // 3, rows))])
        if not _close(parts, run(here, slice(0, rows))):
            return False
    return True


def _refuse_hooks(children: Sequence[nn.Module], runner: str) -> None:
    if any(has_run_hooks(child) for child in children):
        raise CannotDispatchError(f"modules inside of {runner!r} have hooks, which would run twice or on another rank")


def _run_rank_by_rank(runner: nn.Module, layer: ExpertLayer, route: StackedRoute, call: Arguments, size: int) -> Tensor:
    """Return the combined result of all ranks, computed one rank after another."""
    leaves = pytree.tree_leaves(call)
    index, each = leaves[route.index], layer.count // size
    places, dims = index.shape[:-1], index.dim() - 1
    flat, choices = index.reshape(-1), index.shape[-1]
    total: Tensor | None = None
    for rank in range(size):
        pairs = (flat // each == rank).nonzero().squeeze(1)
        if not len(pairs):
            continue
        token = pairs // choices
        own = {name: own_parameters(runner)[name][rank * each : (rank + 1) * each] for name in layer.stacked}  # type: ignore[index]
        tokens = [leaves[i].reshape(places.numel(), *leaves[i].shape[dims:])[token] for i in route.tokens]
        weights = [leaves[i].reshape(-1)[pairs] for i in route.weights]
        result = run_pairs(runner, runner.forward, route, call, own, (flat[pairs] % each, tokens, weights))
        part = result.new_zeros(places.numel(), *result.shape[1:]).index_add(0, token, result)
        total = part if total is None else total + part
    if total is None:
        raise CannotDispatchError("no expert was chosen")
    return total.reshape(*places, *total.shape[1:])


# --- lists ------------------------------------------------------------------------------------------------------------


def _try_lists(module: nn.Module, runner: nn.Module, layer: ExpertLayer) -> None:
    given = pytree.tree_leaves(layer.inputs)
    if len(layer.lists) > 1:
        raise CannotDispatchError(f"an expert is in several lists, {' and '.join(layer.lists)}")
    if len(given) != 1 or len(layer.inputs[0]) != 1 or not isinstance(given[0], Tensor) or given[0].dim() < 2:
        raise CannotDispatchError("an expert is called with something other than a single tensor of rows")
    if not isinstance(layer.output, Tensor) or layer.output.shape[:-1] != given[0].shape[:-1]:
        raise CannotDispatchError("an expert does not return a tensor with one row for each row of its input")
    experts = [parts[0] for parts in layer.experts(module)]
    others = sum(p.numel() for p in runner.parameters()) - sum(p.numel() for e in experts for p in e.parameters())
    if others > sum(p.numel() for e in experts for p in e.parameters()):
        raise CannotDispatchError(
            f"{layer.runner!r}, which calls them and would run twice, has more parameters outside of the experts than"
            " in them"
        )
    inside = {*runner.modules(), *(child for expert in experts for child in expert.modules())} - {runner}
    _refuse_hooks([*inside], layer.runner)
    call = pytree.tree_map(_trained, layer.call)
    rehearsed = ListedExperts(0, layer, runner.forward, experts, LayerWeights([]), Peers(None))
    with ExitStack() as stack:
        for expert in experts:
            # Dropout inside would draw random numbers in another order.
            stack.callback(expert.train, expert.training)
            expert.eval()
        _try_rows(experts, given[0])
        try:
            expected = _results(runner, lambda: runner.forward(*call[0], **call[1]), call)
            state = Footprint(runner)
            again = _results(runner, lambda: runner.forward(*call[0], **call[1]), call)
        except RuntimeError as error:
            raise CannotDispatchError(f"{layer.runner!r}, which calls them, fails by itself ({error})") from error
        if not _same(again, expected) or state != Footprint(runner):
            raise CannotDispatchError(
                f"{layer.runner!r}, which calls them, gives another result, or changes its state, when it runs twice"
            )
        for index, expert in enumerate(experts):
            stack.enter_context(_with_forward(expert, rehearsed.called(index)))
        try:
            found = _results(runner, lambda: rehearsed(*call[0], **call[1]), call)
        except Exception as error:
            raise CannotDispatchError(
                f"the forward that calls them fails without their results ({type(error).__name__}: {error})"
            ) from error
    if not _same(found, expected):
        raise CannotDispatchError("the inputs of some experts depend on the results of others")


def _try_rows(experts: Sequence[nn.Module], given: Tensor) -> None:
    """Check that an expert's result for a row does not depend on other rows."""
    rows = torch.randn(6, given.shape[-1], device=given.device).to(given.dtype)
    rows[2:] += 3
    try:
        whole = experts[0](rows)
        parts = torch.cat([experts[0](rows[:2]), experts[0](rows[2:])])
    except Exception as error:
        raise CannotDispatchError(f"an expert does not run on rows ({type(error).__name__}: {error})") from error
    if whole.shape != parts.shape or not _close(parts, whole):
        raise CannotDispatchError("an expert's result for a row depends on other rows")


@contextmanager
def _with_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    before = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        vars(module).pop("forward")
        if before is not None:
            vars(module)["forward"] = before


# --- rows ---------------------------------------------------------------------------------------------------------


def _rows(module: nn.Module, layer: ExpertLayer, choice: Choice) -> Rows | None:
    """Return the rows that a layer's call treats independently, so that each rank may call it with some of them."""
    if choice.route is not None:
        return _rows_of_route(layer, choice.route)
    leaves = pytree.tree_leaves(layer.call)
    first = next((t for t in leaves if isinstance(t, Tensor) and t.is_floating_point() and t.dim() > 1), None)
    runner = module.get_submodule(layer.runner)
    with ExitStack() as stack:
        stack.enter_context(preserve_random_state(device_in_use()))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_random_parameters(runner, layer, module))
        for expert in (child for parts in layer.experts(module) for child in parts):
            stack.callback(expert.train, expert.training)
            expert.eval()
        for places in range(0 if first is None else first.dim() - 1, 0, -1):
            try:
                if (found := _rows_along(runner, layer.call, first.shape[:places])) is not None:  # type: ignore[union-attr]
                    return found
            except (RuntimeError, ValueError, TypeError, IndexError, CannotDispatchError):
                # The forward does not support other shapes.
                continue
    return None


def _rows_of_route(layer: ExpertLayer, route: StackedRoute) -> Rows:
    places = pytree.tree_leaves(layer.call)[route.index].dim() - 1
    return Rows(tuple(sorted({route.index, *route.tokens, *route.weights})), places, tuple(range(places)))


def _rows_along(runner: nn.Module, call: Arguments, shape: torch.Size) -> Rows | None:
    """Return rows along the first dims if results and gradients computed in two parts equal those of all rows."""
    places = len(shape)
    having = [i for i, t in enumerate(pytree.tree_leaves(call)) if isinstance(t, Tensor) and t.shape[:places] == shape]
    drawn = pytree.tree_map(_random_like, call)
    given = pytree.tree_leaves(drawn)

    def run(some: Arguments) -> list[Tensor]:
        results = pytree.tree_leaves(runner.forward(*some[0], **some[1]))
        if not all(isinstance(result, Tensor) for result in results):
            raise CannotDispatchError("not all that it returns are tensors")
        return results

    with torch.no_grad():
        flat = [result.shape[:places] != shape for result in run(drawn)]
    expected = _results(runner, lambda: run(drawn), drawn)
    left_behind = Footprint(runner)

    def in_turns(dim: int) -> list[Tensor]:
        lengths = [max(1, shape[dim] // 3), shape[dim] - max(1, shape[dim] // 3)]
        parts, start = [], 0
        for length in lengths:
            results = run(replaced(drawn, {i: given[i].narrow(dim, start, length) for i in having}))
            if left_behind != Footprint(runner):
                raise CannotDispatchError("it leaves something behind that depends on how many rows there are")
            some = [*shape[:dim], length, *shape[dim + 1 :]]
            parts.append([r.unflatten(0, some) if f else r for r, f in zip(results, flat, strict=True)])
            start += length
        joined = [torch.cat(both, dim) for both in zip(*parts, strict=True)]
        return [each.flatten(0, places - 1) if f else each for each, f in zip(joined, flat, strict=True)]

    dims = [
        dim
        for dim in range(places)
        if shape[dim] > 1 and _same(_results(runner, lambda: in_turns(dim), drawn), expected)  # noqa: B023
    ]
    return Rows(tuple(having), places, tuple(dims), tuple(flat)) if dims else None


def _random_like(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return torch.randn_like(leaf).requires_grad_()
    return leaf


# --- both -------------------------------------------------------------------------------------------------------------


@contextmanager
def _random_parameters(runner: nn.Module, layer: ExpertLayer, module: nn.Module) -> Iterator[None]:
    """Give experts random weights inside: a new module's may be zeros, for which every sum is correct."""
    owners = [runner] if layer.stacked else [o for parts in layer.experts(module) for p in parts for o in p.modules()]
    places = [
        (owner, name)
        for owner in owners
        for name in layer.stacked or [name for name, _ in owner.named_parameters(recurse=False)]
    ]
    with with_expert_parameters(places, [_random_tensor(own_parameters(owner)[name]) for owner, name in places]):
        yield


def _random_tensor(parameter: Tensor | None) -> Tensor:
    if parameter is None:
        raise CannotDispatchError("a parameter is missing")
    scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5
    return (torch.randn_like(parameter) * scale).detach().requires_grad_(parameter.is_floating_point())


def _trained(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.detach().clone().requires_grad_()
    return leaf


def _results(runner: nn.Module, run: Callable[[], Any], call: Arguments) -> list[Tensor | None]:
    """Return floating-point outputs of a run with a fixed seed, and gradients of a weighted sum of them."""
    torch.manual_seed(0)
    inputs = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor) and leaf.requires_grad]
    inputs += [value for child in runner.modules() for value in own_parameters(child).values() if value is not None]
    inputs = [value for value in inputs if value.requires_grad]
    kept = [(leaf, leaf.detach().clone()) for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]
    outputs = [leaf for leaf in pytree.tree_leaves(run()) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    for leaf, value in kept:
        if not torch.equal(leaf.detach(), value):
            raise CannotDispatchError("their module writes to its inputs")
    weights = [torch.randn_like(output) for output in outputs]
    total = torch.stack([(output * w).sum().float() for output, w in zip(outputs, weights, strict=True)]).sum()
    grads: Sequence[Tensor | None] = [None] * len(inputs)
    if total.requires_grad:
        grads = torch.autograd.grad(total, inputs, allow_unused=True)
    return [*(output.detach() for output in outputs), *grads]


def _same(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> bool:
    if len(found) != len(expected):
        return False
    for one, other in zip(found, expected, strict=True):
        if one is None and other is None:
            continue
        like = other if one is None else one
        if like is None or not _close(
            torch.zeros_like(like) if one is None else one, torch.zeros_like(like) if other is None else other
        ):
            return False
    return True


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    one, other = one.detach(), other.detach()
    scale = max(float(other.abs().max()), 1e-6) if other.numel() else 1.0
    limit = _CLOSE.get(other.dtype, _LOW_PRECISION)
    return not other.numel() or float((one - other).abs().max()) <= limit * scale
