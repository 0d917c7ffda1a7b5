"""Derives a tensor-parallel plan from one traced run of the module's step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from torch import nn

from lightning_pardist.engines.common.tables import starred
from lightning_pardist.engines.ddp.sparse import sparse_parameters
from lightning_pardist.engines.tensor.dispatch import eager
from lightning_pardist.engines.tensor.layout import Layout
from lightning_pardist.engines.tensor.layout_propagation import LayoutConstraints, LayoutPropagation
from lightning_pardist.engines.tensor.operator_trace import OperatorTrace, TraceSlot, trace_operators
from lightning_pardist.engines.tensor.overrides import resolve_overrides
from lightning_pardist.engines.tensor.tensor_plan import TensorParallelPlan, TensorPlan

#: An unpaired weight smaller than this share of the model is not worth the collectives of sharding it.
_SMALL = 0.01
_NOT_WORTH_IT = "small, not worth splitting"
#: A head of at least this share of the model stays sharded even if its outputs have to be gathered.
_LARGE = 0.1


def plan_layout(
    module: nn.Module,
    step: Callable[[], Any],
    *,
    tp_size: int,
    overrides: Mapping[str, Any] | None = None,
    on_indivisible: Literal["error", "replicate"] = "error",
    sequence_parallel: bool = False,
    plain: Iterable[str] = (),
) -> TensorParallelPlan:
    """Derive how to shard a module from its structure and one traced run. Not collective; needs no process group.

    The plan depends on shapes, so ranks that trace batches of the same shapes derive the same plan. If control flow
    depends on data (routing, early exits), derive it on one rank and broadcast it: it is plain data.

    Args:
        module: The user's module, not sharded, on any device. Left unchanged: buffers, gradients and random state too.
        step: Runs the module as training does, up to the loss, e.g. ``lambda: module.training_step(batch, 0)``.
        tp_size: Number of tensor ranks.
        overrides: Glob patterns of module or parameter names to ``"column"``, ``"row"``, ``"vocab"``, ``"replicate"``
            or a torch ``ParallelStyle``; they take precedence over the derived layouts.
        on_indivisible: What to do with an override whose size ``tp_size`` does not divide.
        sequence_parallel: Whether results of row-wise layers stay sharded along the sequence.
        plain: Names of parameters that are sharded elsewhere (experts).

    Raises:
        ValueError: If an override matches nothing, names a parameter without that split, or does not divide.
    """
    if tp_size < 1:
        raise ValueError(f"tp_size={tp_size} is not a positive number of ranks. Use 1 or more.")
    with eager():
        found = trace_operators(module, step)
    constraints = LayoutConstraints()
    sparse = set(sparse_parameters(module))
    constraints.whole |= {name: "its gradients are sparse" for name, p in found.parameters.items() if p in sparse}
    why = resolve_overrides(module, found, overrides or {}, tp_size, on_indivisible, constraints)
    for name in plain:
        constraints.fixed.pop(name, None)
        constraints.whole[name] = why[name] = "experts, which are distributed over other ranks"
    _prepare(found, constraints)
    walk = (
        _settle(found, tp_size, constraints)
        if tp_size > 1
        else LayoutPropagation(found, tp_size, constraints, {}, decide=False)
    )
    if sequence_parallel:
        why_split, walk = (
            walk.why,
            LayoutPropagation(found, tp_size, constraints, walk.layouts, decide=False, sequence=True).run(),
        )
        walk.why = why_split
    return TensorParallelPlan(
        tp_size=tp_size,
        parameters=_describe(found, found.parameters, walk, constraints, why, buffer=False),
        buffers=_describe(found, found.buffers, walk, constraints, why, buffer=True),
        collectives=walk.collectives(starred),
        fallbacks=walk.fallback_plans(starred),
        sequence_parallel=sequence_parallel,
    )


def _prepare(found: OperatorTrace, constraints: LayoutConstraints) -> None:
    """Choose the embeddings to shard by vocabulary, and the heads to keep sharded at the cost of a gather."""
    total = sum(parameter.numel() for parameter in found.parameters.values()) or 1
    embedded, multiplied = set(), set()
    last = ""
    for node in found.nodes:
        slots = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, TraceSlot) and arg.name]
        if node.name == "embedding":
            embedded |= {slot.name for slot in slots}
        elif node.name in ("linear", "matmul", "mm"):
            multiplied |= {slot.name for slot in slots}
            last = next((slot.name for slot in slots if slot.name in found.parameters), last)
    for name, parameter in found.parameters.items():
        share = parameter.numel() / total
        if name in embedded and (name in multiplied or share >= _SMALL):
            constraints.lookups.add(name)
        tied = name in embedded and name in multiplied
        if tied or (name == last and share >= _LARGE):
            constraints.gather.add(name)


def _settle(found: OperatorTrace, tp_size: int, constraints: LayoutConstraints) -> LayoutPropagation:
    """Propagate until no new constraint is found: each round walks once with decisions and once with them fixed."""
    total = sum(parameter.numel() for parameter in found.parameters.values()) or 1
    while True:
        walk = LayoutPropagation(found, tp_size, constraints, constraints.fixed, decide=True).run()
        final = LayoutPropagation(found, tp_size, constraints, walk.layouts, decide=False).run()
        learnt = dict(final.problems)
        if not learnt:
            # Only weights that start a sharding are checked; those that follow one (biases, norms) are no sources.
            for name in walk.layouts:
                if name in constraints.fixed or name not in walk.starts:
                    continue
                if name not in final.ended:
                    learnt[name] = "the step needs its outputs whole"
                elif name not in final.paired and found.parameters[name].numel() < _SMALL * total:
                    learnt[name] = _NOT_WORTH_IT
        fresh = {
            name: reason
            for name, reason in learnt.items()
            if name not in constraints.whole and name not in constraints.gather
        }
        if not fresh:
            final.why = walk.why
            return final
        constraints.whole.update(fresh)


def _describe(
    found: OperatorTrace,
    tensors: Mapping[str, Any],
    walk: LayoutPropagation,
    constraints: LayoutConstraints,
    why: Mapping[str, str],
    *,
    buffer: bool,
) -> tuple[TensorPlan, ...]:
    items = []
    total = sum(parameter.numel() for parameter in found.parameters.values()) or 1
    for name, tensor in tensors.items():
        layout: Layout | None = walk.layouts.get(name)
        reason = (
            why.get(name)
            or (walk.why.get(name) if layout is not None else constraints.whole.get(name))
            or (_NOT_WORTH_IT if tensor.numel() < _SMALL * total else "no layer of the step splits it")
        )
        items.append(
            TensorPlan(
                name=name,
                aliases=tuple(found.aliases.get(name, ())),
                shape=tuple(tensor.shape),
                bytes=tensor.numel() * tensor.element_size(),
                layout=layout,
                why=reason,
                buffer=buffer,
            )
        )
    return tuple(items)
