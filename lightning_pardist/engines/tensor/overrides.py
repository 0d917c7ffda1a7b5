"""User-given plans: name patterns mapped to sharding styles."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from lightning_pardist.engines.tensor.layout import Layout
from lightning_pardist.engines.tensor.operator_trace import OperatorTrace, TraceSlot

if TYPE_CHECKING:
    from lightning_pardist.engines.tensor.layout_propagation import LayoutConstraints

WAYS = ("column", "row", "vocab", "replicate")


def resolve_overrides(
    module: nn.Module,
    found: OperatorTrace,
    overrides: Mapping[str, Any],
    tp_size: int,
    on_indivisible: str,
    constraints: LayoutConstraints,
) -> dict[str, str]:
    """Resolve user overrides to fixed layouts.

    Args:
        module: The user's module.
        found: Its trace, which shows how a weight is used and so which of its dims are outputs.
        overrides: Name patterns -> sharding styles.
        tp_size: Number of tensor ranks.
        on_indivisible: ``"error"`` or ``"replicate"``.
        constraints: Extended in place.

    Returns:
        Reasons by parameter name.

    Raises:
        ValueError: If a pattern matches nothing, a style is unknown or impossible, or a size does not divide.
    """
    if on_indivisible not in ("error", "replicate"):
        raise ValueError(f"on_indivisible={on_indivisible!r} is unknown. Use 'error' or 'replicate'.")
    first_names = {alias: name for name, aliases in found.aliases.items() for alias in aliases}
    uses = _uses(found)
    reasons: dict[str, str] = {}
    for pattern, value in overrides.items():
        names = _matching(module, pattern)
        for name in names:
            first = first_names.get(name, name)
            if first not in found.parameters:
                continue
            way = _way(pattern, value, uses.get(first) == "embedding")
            layout = _layout(found, first, way, uses.get(first))
            parameter = found.parameters[first]
            if layout is not None and not layout.divides(tuple(parameter.shape), tp_size):
                if on_indivisible == "error":
                    raise ValueError(_indivisible(pattern, way, name, tuple(parameter.shape), layout.dim, tp_size))
                layout = None
            constraints.fixed.pop(first, None)
            if layout is None:
                constraints.whole[first] = f"by hand: {pattern}"
            else:
                constraints.fixed[first] = layout
                constraints.whole.pop(first, None)
            reasons[first] = f"by hand: {pattern}"
    return reasons


def _indivisible(pattern: str, way: str, name: str, shape: tuple[int, ...], dim: int, tp_size: int) -> str:
    sizes = ", ".join(str(size) for size in range(1, shape[dim] + 1) if shape[dim] % size == 0)
    return (
        f"plan[{pattern!r}]={way!r} splits {name} of shape {shape} along dim {dim}, but"
        f" tensor_parallel_size={tp_size} does not divide {shape[dim]}. Use one of {sizes}, or"
        " on_indivisible='replicate'."
    )


def _matching(module: nn.Module, pattern: str) -> list[str]:
    """Return the parameters that match a pattern, directly or through their module."""
    every = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    direct = [name for name in every if fnmatchcase(name, pattern)]
    modules = [name for name, _ in module.named_modules() if name and fnmatchcase(name, pattern)]
    below = [name for name in every if any(name.rpartition(".")[0] == owner for owner in modules)]
    if not below:
        below = [name for name in every if any(name.startswith(owner + ".") for owner in modules)]
    names = list(dict.fromkeys(direct + below))
    if not names:
        known = ", ".join(list(dict.fromkeys(name.rpartition(".")[0] for name in every))[:8])
        raise ValueError(
            f"plan[{pattern!r}] matches no parameter and no module that has some. The module has {known}, ..."
        )
    return names


def _way(pattern: str, value: Any, embedding: bool) -> str:
    if isinstance(value, str) and value in WAYS:
        return value
    if isinstance(value, ColwiseParallel):
        return "column"
    if isinstance(value, RowwiseParallel):
        # In torch, an embedding's rows are its vocabulary.
        return "vocab" if embedding else "row"
    if isinstance(value, (SequenceParallel, ParallelStyle)):
        return "replicate"
    raise ValueError(
        f"plan[{pattern!r}]={value!r} is not a way to split. Use one of {', '.join(WAYS)} or a torch ParallelStyle."
    )


def _uses(found: OperatorTrace) -> dict[str, str]:
    """Return the name of the function that uses each parameter as a weight."""
    uses: dict[str, str] = {}
    for node in found.nodes:
        for arg in (*node.args, *node.kwargs.values()):
            weight = isinstance(arg, TraceSlot) and arg.name and node.name not in ("t", "to", "transpose")
            # A tied weight is treated as its head's weight: the columns of an embedding would be another dim.
            if weight and uses.get(arg.name) in (None, "embedding"):
                uses[arg.name] = node.name
    return uses


def _layout(found: OperatorTrace, name: str, way: str, use: str | None) -> Layout | None:
    """Return a parameter's layout: weights are ``[out, in, ...]`` except for matrix products and transposed ones."""
    if way == "replicate":
        return None
    shape = found.parameters[name].shape
    if len(shape) == 0:
        return None
    if way == "vocab":
        return Layout(0)
    if len(shape) == 1:
        return Layout(0) if way == "column" else None
    turned = use in ("addmm", "matmul", "mm") or (use or "").startswith("conv_transpose") or use == "embedding"
    outputs, inputs = (1, 0) if turned else (0, 1)
    return Layout(outputs if way == "column" else inputs)
