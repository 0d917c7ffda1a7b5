"""Propagates parameter layouts through a traced step and searches for a consistent set of them.

The step's calls are visited in order with the same rules that execute it later. A weight whose inputs are replicated is
sharded by its outputs (column-wise); the sharding propagates through the calls that follow; a weight whose input is
sharded is sharded by its inputs (row-wise), and a sum over ranks ends the propagation. This finds pairs of layers with
only elementwise operators between them, attention heads, and channels with their norms, whatever the class names. If
the sharding cannot be propagated further, the weight that started it is replicated (or its outputs are laid out in
segments), and the walk restarts at the call where that weight was first used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from lightning_pardist.compat import pytree
from lightning_pardist.engines.tensor.calls import Call, Need, NoRule, Operand, Outcome
from lightning_pardist.engines.tensor.layout import Layout
from lightning_pardist.engines.tensor.mha_arguments import MHA_PROJECTIONS
from lightning_pardist.engines.tensor.operator_trace import Node, OperatorTrace, TraceSlot
from lightning_pardist.engines.tensor.rules_elementwise import lookup
from lightning_pardist.engines.tensor.rules_matmul import scattered
from lightning_pardist.engines.tensor.rules_nn import mha_layouts
from lightning_pardist.engines.tensor.tensor_plan import CollectivePlan, FallbackPlan

_SUMS = frozenset(["linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "_grouped_mm", "grouped_mm"])
_MOVES = frozenset([
    "t", "transpose", "permute", "get:T", "get:mT", "getitem", "select", "to", "type_as", "contiguous", "float",
    "half", "bfloat16", "unsqueeze", "squeeze", "clone", "movedim", "swapaxes", "unbind", "detach",
])  # fmt: skip


@dataclass
class LayoutConstraints:
    """Constraints on parameter layouts, extended until a walk of the trace succeeds.

    Attributes:
        fixed: Layouts set by the user.
        whole: Parameters that must be replicated -> reason.
        segments: Number of segments in which the outputs of a column-wise weight are laid out.
        gather: Weights whose sharded outputs may be gathered, because replicating them would cost more.
        lookups: Embedding weights worth sharding by vocabulary.
    """

    fixed: dict[str, Layout] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    segments: dict[str, int] = field(default_factory=dict)
    gather: set[str] = field(default_factory=set)
    lookups: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Value:
    layout: Layout | None = None
    sources: frozenset[str] = frozenset()


@dataclass
class _Event:
    node: int
    kind: str
    phase: str
    bytes: int
    why: str


class LayoutPropagation:
    """One walk over a trace under given constraints.

    Args:
        trace: The recorded step.
        size: Number of tensor ranks.
        constraints: Known constraints; extended where a sharding cannot be propagated.
        layouts: Initial layouts. With ``decide`` false nothing is added to them.
        decide: Whether undecided weights may be sharded.
        sequence: Whether results of row-wise weights stay sharded along the sequence. Not while deciding.

    Attributes:
        layouts: Layouts of the sharded parameters and buffers.
        why: Reasons by name.
        problems: Sources whose sharding could not be propagated, with the reason, in a walk without decisions.
        paired: Sources whose sharding ends in the reduction of a row-wise weight.
        starts: Weights that start a sharding.
        ended: Sources whose sharding ends in any reduction or in the loss.
    """

    def __init__(
        self,
        trace: OperatorTrace,
        size: int,
        constraints: LayoutConstraints,
        layouts: dict[str, Layout],
        decide: bool,
        sequence: bool = False,
    ) -> None:
        self.trace, self.size, self.constraints, self.decide = trace, size, constraints, decide
        self.sequence = sequence
        self.layouts = dict(layouts)
        self.why: dict[str, str] = {}
        self.met: dict[str, int] = {}
        self.starts: set[str] = set()
        self.values: dict[int, _Value] = {}
        self.moved: dict[int, tuple[str, tuple[Node, ...]]] = {}
        self.events: list[_Event] = []
        self.fallbacks: list[tuple[int, FallbackPlan]] = []
        self.problems: dict[str, str] = {}
        self.paired: set[str] = set()
        self.ended: set[str] = set()
        self._entered: set[tuple[int, int]] = set()

    def run(self) -> LayoutPropagation:
        """Visit all calls, going back if a decision has to be revised."""
        position = 0
        while position < len(self.trace.nodes):
            position = self._visit(position)
        return self

    def value(self, slot: TraceSlot) -> _Value:
        """Return the layout of a tensor, and the parameters that its sharding comes from."""
        if slot.name and slot.index not in self.values:
            layout = self.layouts.get(slot.name)
            return _Value(layout, frozenset([slot.name]) if layout else frozenset())
        return self.values.get(slot.index, _Value())

    def _operand(self, slot: TraceSlot) -> Operand:
        return Operand(slot.shape, self.value(slot).layout, slot.dtype, slot)

    def _call(self, node: Node) -> Call:
        args, kwargs = pytree.tree_map_only(TraceSlot, self._operand, (node.args, node.kwargs))
        return Call(node.func, node.name, args, kwargs, self.size, node.inplace, True, self.sequence)

    def _visit(self, position: int) -> int:
        node = self.trace.nodes[position]
        self._note_moves(node)
        call = self._call(node)
        if self.decide and not call.split_operands() and self._decide(node, position):
            call = self._call(node)
        if not call.split_operands():
            self._set(node, None, frozenset())
            return position + 1
        rule = lookup(node.name)
        try:
            if rule is None:
                raise NoRule("no sharding rule")
            outcome = rule(call)
            if self.decide and outcome.reduce and node.name in _SUMS and not self._has_weight(node):
                # Possible, but reducing attention scores that are sharded within heads costs more than it saves.
                raise NoRule("a sum of two activations over the split dim")
        except NoRule as problem:
            return self._handle_conflict(node, position, call, problem)
        except (TypeError, ValueError, IndexError, AttributeError, KeyError) as problem:
            return self._handle_conflict(node, position, call, NoRule(f"{type(problem).__name__}: {problem}"))
        if self._follow(outcome, node, position):
            return position
        self._account(outcome, call, node, position)
        return position + 1

    def _has_weight(self, node: Node) -> bool:
        slots = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, TraceSlot)]
        return any(slot.name in self.trace.parameters or slot.index in self.moved for slot in slots)

    def _set(self, node: Node, layout: Any, sources: frozenset[str]) -> None:
        slots = [leaf for leaf in pytree.tree_leaves(node.out) if isinstance(leaf, TraceSlot)]
        layouts = layout if isinstance(layout, list) else [layout] * len(slots)
        for slot, item in zip(slots, layouts, strict=False):
            if item is None and slot.index in self.moved:
                self.values.pop(slot.index, None)
                continue
            self.values[slot.index] = _Value(item, sources if item is not None else frozenset())

    # -- decisions --------------------

    def _decide(self, node: Node, position: int) -> bool:
        """Shard the weights of a call whose operands are all replicated; return whether one was."""
        if node.name == "multi_head_attention_forward":
            return self._decide_attention(node, position)
        found = _weight(node)
        if found is None:
            return False
        slot, dim, why = found
        name, layout = self._origin(slot, dim)
        if not name or layout is None or name in self.layouts or name in self.constraints.whole:
            return False
        if node.name == "embedding" and name not in self.constraints.lookups:
            return False
        layout = Layout(layout.dim, self.constraints.segments.get(name, 1))
        parameter = self.trace.parameters.get(name)
        if parameter is None:
            return False
        if not layout.divides(tuple(parameter.shape), self.size):
            self.constraints.whole[name] = f"{self.size} does not divide {parameter.shape[layout.dim]}"
            return False
        self._record_layout(name, layout, why, position)
        self.starts.add(name)
        if slot.index in self.moved:
            self._replay(slot)
        return True

    def _record_layout(self, name: str, layout: Layout, why: str, position: int) -> None:
        self.layouts[name] = layout
        self.why[name] = why
        self.met[name] = position

    def _decide_attention(self, node: Node, position: int) -> bool:
        call = self._call(node)
        bound = _bind_attention(call)
        names = {key: bound[key].tensor.name for key in mha_layouts(bound["use_separate_proj_weight"]) if bound[key]}
        known = any(name in self.layouts or name in self.constraints.whole or not name for name in names.values())
        if known or bound["num_heads"] % self.size:
            if not known:
                reason = f"{self.size} does not divide {bound['num_heads']} heads"
                self.constraints.whole.update(dict.fromkeys(names.values(), reason))
            return False
        for key, layout in mha_layouts(bound["use_separate_proj_weight"]).items():
            if key in names:
                why = "row-wise: sums over heads" if key == "out_proj_weight" else "column-wise: by heads"
                self._record_layout(names[key], layout, why, position)
        return True

    def _origin(self, slot: TraceSlot, dim: int) -> tuple[str, Layout | None]:
        """Return the parameter that a tensor is a form of, and its layout that shards the tensor along ``dim``."""
        if slot.index not in self.moved:
            return slot.name, Layout(dim)
        name, nodes = self.moved[slot.index]
        parameter = self.trace.parameters.get(name)
        for candidate in range(parameter.ndim if parameter is not None else 0):
            if self._through(nodes, Layout(candidate)) == Layout(dim):
                return name, Layout(candidate)
        return name, None

    def _through(self, nodes: Iterable[Node], start: Layout) -> Layout | None:
        """Propagate layout ``start`` through a chain of moves of one tensor; None if the sharding is lost."""
        layout = start
        for node in nodes:
            first = node.args[0]

            def operand(slot: TraceSlot, first: TraceSlot = first, layout: Layout = layout) -> Operand:
                return Operand(slot.shape, layout if slot is first else None, slot.dtype, slot)

            args, kwargs = pytree.tree_map_only(TraceSlot, operand, (node.args, node.kwargs))
            rule = lookup(node.name)
            try:
                outcome = rule(Call(node.func, node.name, args, kwargs, self.size)) if rule else None
            except NoRule:
                return None
            if outcome is None or outcome.out is None:
                return None
            reached = outcome.out[0] if isinstance(outcome.out, list) else outcome.out
            if reached is None:
                return None
            layout = reached
        return layout

    def _note_moves(self, node: Node) -> None:
        """Record tensors that are another form of a parameter: transposed, cast, or one expert of a stacked weight."""
        if node.name not in _MOVES or not node.args or not isinstance(node.args[0], TraceSlot):
            return
        source = node.args[0]
        if source.index in self.moved:
            name, nodes = self.moved[source.index]
        elif source.name in self.trace.parameters:
            name, nodes = source.name, ()
        else:
            return
        for slot in pytree.tree_leaves(node.out):
            if isinstance(slot, TraceSlot) and not slot.name:
                self.moved[slot.index] = (name, (*nodes, node))

    def _replay(self, slot: TraceSlot) -> None:
        name, nodes = self.moved[slot.index]
        layout: Layout | None = self.layouts.get(name)
        for position, node in enumerate(nodes):
            layout = None if layout is None else self._through(nodes[: position + 1], self.layouts[name])
            self._set(node, layout, frozenset([name]))

    def _follow(self, outcome: Outcome, node: Node, position: int) -> bool:
        """Shard the parameters that the call needs sharded; return whether the call has to be visited again."""
        changed = False
        for need in _needs((outcome.args, outcome.kwargs)):
            if need.how != "part" or need.layout is None or not self.decide:
                continue
            slot = need.operand.tensor
            name, layout = self._origin(slot, need.layout.dim)
            if not name or layout is None or name in self.layouts or name in self.constraints.whole:
                continue
            layout = Layout(layout.dim, need.layout.segments)
            known = self.trace.parameters.get(name)
            known = self.trace.buffers.get(name) if known is None else known
            if known is None or not layout.divides(tuple(known.shape), self.size):
                continue
            if layout.segments > 1 and slot.index in self.moved:
                continue
            row = node.name in _SUMS or node.name.startswith("conv")
            weight = row and outcome.reduce == "sum"
            self._record_layout(
                name, layout, "row-wise: meets split inputs" if weight else "follows what it is applied to", position
            )
            if slot.index in self.moved:
                self._replay(slot)
            changed = True
        return changed

    # -- conflicts --------------------

    def _handle_conflict(self, node: Node, position: int, call: Call, problem: NoRule) -> int:
        blamed = problem.blame or call.split_operands()
        sources = frozenset().union(*(self.value(operand.tensor).sources for operand in blamed))
        open_sources = {
            name for name in sources if name not in self.constraints.fixed and name not in self.constraints.gather
        }
        where = f"{node.name} in {node.module or 'the step'}: {problem.reason}"
        if problem.segments and self._change_segments(sources, problem.segments):
            return self._back(sources, position)
        if open_sources and self.decide:
            for name in open_sources:
                self.constraints.whole[name] = where
            return self._back(open_sources, position)
        self.problems.update(dict.fromkeys(open_sources, where))
        moved = 0
        for operand in call.split_operands():
            nbytes = math.prod(operand.shape) * operand.dtype.itemsize
            moved += nbytes
            self.events.append(_Event(position, "all_gather", "forward", nbytes, f"{node.name} on whole tensors"))
        self.fallbacks.append((position, FallbackPlan(node.name, node.module, 1, moved, problem.reason)))
        first = call.args[0] if node.inplace and call.args else None
        kept = first.layout if isinstance(first, Operand) else None
        self._set(node, kept, sources if kept is not None else frozenset())
        return position + 1

    def _change_segments(self, sources: frozenset[str], segments: int) -> bool:
        fit = sources and self.decide and all(
            name in self.layouts and self.layouts[name].segments == 1 and name not in self.constraints.segments
            and Layout(self.layouts[name].dim, segments).divides(tuple(self.trace.parameters[name].shape), self.size)
            for name in sources if name in self.trace.parameters
        )  # fmt: skip
        if not fit:
            return False
        for name in sources:
            self.constraints.segments[name] = segments
            if name in self.constraints.fixed:
                self.constraints.fixed[name] = self.layouts[name] = Layout(self.constraints.fixed[name].dim, segments)
        return True

    def _back(self, sources: Iterable[str], position: int) -> int:
        """Discard all decisions since the first of ``sources`` was met, and return the position to resume from."""
        start = min((self.met.get(name, 0) for name in sources), default=0)
        for name in [name for name, met in self.met.items() if met >= start]:
            del self.met[name]
            if name not in self.constraints.fixed:
                self.layouts.pop(name, None)
                self.why.pop(name, None)
        self.events = [event for event in self.events if event.node < start]
        self.fallbacks = [item for item in self.fallbacks if item[0] < start]
        self.values = {index: value for index, value in self.values.items() if not value.sources & set(sources)}
        return min(start, position)

    # -- costs --------------------

    def _account(self, outcome: Outcome, call: Call, node: Node, position: int) -> None:
        sources = frozenset().union(*(self.value(operand.tensor).sources for operand in call.split_operands()))
        where = node.module or "the step"
        for need in _needs((outcome.args, outcome.kwargs)):
            slot = need.operand.tensor
            if need.how == "gather":
                nbytes = math.prod(slot.shape) * slot.dtype.itemsize
                why = f"sequence of the input of {where}"
                self.events.append(_Event(position, "all_gather", "forward", nbytes, why))
                if slot.requires_grad:
                    self.events.append(_Event(position, "reduce_scatter", "backward", nbytes, why))
            if not slot.requires_grad or need.how not in ("whole", "part") or need.operand.layout is not None:
                continue
            nbytes = math.prod(slot.shape) * slot.dtype.itemsize
            if need.how == "part":
                self.events.append(
                    _Event(position, "all_gather", "backward", nbytes, f"gradient of a slice in {where}")
                )
            elif slot.index not in {index for _, index in self._entered if _ <= position}:
                self._entered.add((position, slot.index))
                self.events.append(
                    _Event(position, "all_reduce", "backward", nbytes, f"gradient of the input of {where}")
                )
        for kind, elements in outcome.collectives:
            self.events.append(_Event(position, kind, "forward", elements * 4, f"{node.name} in {where}"))
        out = outcome.out
        if outcome.reduce:
            slot = next(leaf for leaf in pytree.tree_leaves(node.out) if isinstance(leaf, TraceSlot))
            out = scattered(node.name, slot.shape, self.size) if self.sequence else None
            nbytes = math.prod(slot.shape) * slot.dtype.itemsize
            kind = "all_reduce" if out is None else "reduce_scatter"
            self.events.append(_Event(position, kind, "forward", nbytes, f"sum of {where}"))
            if out is not None and slot.requires_grad:
                self.events.append(
                    _Event(position, "all_gather", "backward", nbytes, f"gradient of the sum of {where}")
                )
        if outcome.reduce or outcome.collectives:
            self.ended |= sources
            if node.name in _SUMS or node.name.startswith(("conv", "multi_head", "embedding")):
                self.paired |= sources
        self._set(node, out, sources if outcome.out is not None else frozenset())

    def collectives(self, shorten: Callable[[str], str]) -> tuple[CollectivePlan, ...]:
        """Return the collectives of the step, with those of similar submodules combined."""
        grouped: dict[tuple[str, str, str], list[int]] = {}
        for event in self.events:
            grouped.setdefault((event.kind, event.phase, shorten(event.why)), []).append(event.bytes)
        return tuple(
            CollectivePlan(kind, "forward" if phase == "forward" else "backward", len(sizes), sum(sizes), why)
            for (kind, phase, why), sizes in grouped.items()
        )

    def fallback_plans(self, shorten: Callable[[str], str]) -> tuple[FallbackPlan, ...]:
        """Return the operators on full tensors, with those of similar submodules combined."""
        grouped: dict[tuple[str, str, str], list[int]] = {}
        for _, item in self.fallbacks:
            grouped.setdefault((item.operator, shorten(item.module), item.reason), []).append(item.bytes)
        return tuple(
            FallbackPlan(name, module, len(sizes), sum(sizes), reason)
            for (name, module, reason), sizes in grouped.items()
        )


def _needs(tree: Any) -> list[Need]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Need)]


def _weight(node: Node) -> tuple[TraceSlot, int, str] | None:
    """Return the weight of a call that produces new features, its output dim and the reason; None without one."""

    def given(position: int, name: str) -> Any:
        return node.args[position] if position < len(node.args) else node.kwargs.get(name)

    weight: Any = None
    dim, why = 0, "column-wise: starts a split"
    if node.name == "linear":
        weight = given(1, "weight")
    elif node.name == "embedding":
        weight, why = given(1, "weight"), "by vocabulary"
    elif node.name == "addmm" and len(node.args) > 2:
        weight, dim = node.args[2], 1
    elif node.name in ("matmul", "mm", "bmm", "baddbmm"):
        weight = (
            node.args[2]
            if node.name == "baddbmm" and len(node.args) > 2
            else given(1, "mat2" if node.name != "matmul" else "other")
        )
        dim = len(weight.shape) - 1 if isinstance(weight, TraceSlot) else 0
    elif node.name in ("conv1d", "conv2d", "conv3d") and given(6, "groups") in (None, 1):
        weight = given(1, "weight")
    elif node.name in ("_grouped_mm", "grouped_mm"):
        weight, dim = given(1, "mat2"), 2
    elif node.name.startswith("conv_transpose") and given(6, "groups") in (None, 1):
        weight, dim = given(1, "weight"), 1
    elif node.name == "einsum":
        weight, dim = _einsum_weight(node)
    if not isinstance(weight, TraceSlot) or len(weight.shape) < 2:
        return None
    return weight, dim, why


def _einsum_weight(node: Node) -> tuple[Any, int]:
    """Return the parameter among two factors, and its first dim that only it contributes to the product."""
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str) or "->" not in equation or "..." in equation or len(operands) != 2:
        return None, 0
    left, right = equation.replace(" ", "").split("->")
    terms = left.split(",")
    for weight, own, other in ((operands[1], terms[1], terms[0]), (operands[0], terms[0], terms[1])):
        new = [dim for dim, letter in enumerate(own) if letter in right and letter not in other]
        if isinstance(weight, TraceSlot) and weight.name and new:
            return weight, new[0]
    return None, 0


def _bind_attention(call: Call) -> dict[str, Any]:
    import inspect

    import torch.nn.functional as F

    bound = inspect.signature(F.multi_head_attention_forward).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


__all__ = ["MHA_PROJECTIONS", "LayoutConstraints", "LayoutPropagation"]
