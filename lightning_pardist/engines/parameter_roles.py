"""Classification of parameters by their use in a step: hidden matrix, embedding or first layer, head, vector."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch.nn.functional as F

from lightning_pardist.engines.tensor.calls import leaves_of
from lightning_pardist.engines.tensor.mha_arguments import MHA_PROJECTIONS
from lightning_pardist.engines.tensor.operator_trace import Node, OperatorTrace, TraceSlot

Role = Literal["matrix", "embedding", "head", "vector", "unused"]

#: Layer functions: per weight, (position, name) of the weight argument and of the argument it is multiplied with.
_WEIGHT, _INPUT = (1, "weight"), (0, "input")
_CELL = (((2, "w_ih"), (0, "input")), ((3, "w_hh"), (1, "hx")))
_CONVOLUTIONS = tuple(f"conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3))
_LAYERS: dict[str, tuple[tuple[tuple[int, str], tuple[int, str]], ...]] = {
    **dict.fromkeys(("linear", *_CONVOLUTIONS), ((_WEIGHT, _INPUT),)),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), _CELL),
    "conv_tbc": ((_WEIGHT, _INPUT),),
    "bilinear": (((2, "weight"), (0, "input1")), ((2, "weight"), (1, "input2"))),
}
_RECURRENT = frozenset(["lstm", "gru", "rnn_tanh", "rnn_relu"])
#: Products of any two operands; those in :data:`_ADDED_FIRST` add their first operand instead of multiplying it.
_PRODUCTS = frozenset(
    ["matmul", "rmatmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "tensordot", "einsum", "chain_matmul", "multi_dot"]
    + ["addmm", "baddbmm", "addbmm", "addmv", "_grouped_mm", "grouped_mm", "_scaled_mm"]
)
_ADDED_FIRST = frozenset(["addmm", "baddbmm", "addbmm", "addmv"])
#: Lookup functions: (position, name) of the table argument.
_LOOKUPS = {
    "embedding": _WEIGHT,
    "embedding_bag": _WEIGHT,
    **dict.fromkeys(("index_select", "gather", "take", "take_along_dim", "getitem"), _INPUT),
    # Distances to a codebook.
    "cdist": (1, "x2"),
}
_OPAQUE = "(not a torch function)"


@dataclass(frozen=True)
class _Use:
    """One use of one or more parameters in an operator call.

    Attributes:
        names: Names of the parameters; several if they were combined before the call.
        kind: How the call uses them.
        met: Whether the data operand depends on an earlier layer's output.
        out: Results of the call.
        followed: Whether another layer follows within the same call.
    """

    names: frozenset[str]
    kind: Literal["product", "lookup", "elementwise"]
    met: bool = True
    out: tuple[TraceSlot, ...] = ()
    followed: bool = False


def find_roles(found: OperatorTrace) -> dict[str, Role]:
    """Return the role of each parameter by name; tied parameters appear under their first name.

    ``"embedding"``: a table whose rows are looked up, a learned input of a layer, or the weight of a layer whose input
    is the batch. ``"matrix"``: a weight that multiplies an earlier layer's output and is followed by another layer.
    ``"head"``: a weight that no layer follows. ``"vector"``: a parameter that is added or multiplied elementwise
    (biases, gains, positions), and a weight with one row or column, also per group of a convolution. ``"unused"``: a
    parameter that the step does not use. A parameter with several uses, for instance a tied head, is an embedding or a
    matrix if any of its uses is.

    Args:
        found: The operator trace of one step.
    """
    uses = _Walk(found).uses()
    followed = _used_by_later_layers(found, uses)
    roles: dict[str, set[Role]] = {name: set() for name in found.parameters}
    for use in uses:
        leads_on = use.followed or any(slot.index in followed for slot in use.out)
        for name in use.names & roles.keys():
            roles[name].add(_role(use, leads_on=leads_on))
    order: tuple[Role, ...] = ("embedding", "matrix", "head", "vector")
    tables = {name for use in uses if use.kind == "lookup" for name in use.names}
    result: dict[str, Role] = {}
    for name, tensor in found.parameters.items():
        # A first layer that is applied again after other layers counts as a matrix; a lookup table does not.
        ranked = order if name in tables else ("matrix", "embedding", "head", "vector")
        role: Role = next((role for role in ranked if role in roles[name]), "unused")
        thin = sum(size > 1 for size in tensor.shape) < 2
        result[name] = "vector" if role == "matrix" and thin else role
    return result


def _role(use: _Use, *, leads_on: bool) -> Role:
    if use.kind == "elementwise":
        return "vector"
    if use.kind == "lookup":
        return "embedding"
    if not leads_on:
        return "head"
    return "matrix" if use.met else "embedding"


def _used_by_later_layers(found: OperatorTrace, uses: list[_Use]) -> set[int]:
    """Return the indices of slots that a later layer depends on differentiably."""
    layers = {id(use.out[0]) for use in uses if use.kind == "product" and use.out}
    leading: set[int] = set()
    for node in reversed(found.nodes):
        outs = _slots(node.out)
        if any(id(out) in layers or out.index in leading for out in outs):
            leading |= {slot.index for slot in _slots((node.args, node.kwargs)) if slot.requires_grad}
    return leading


class _Walk:
    """Forward pass over a trace that follows parameters through views, casts and combinations to their uses on data."""

    def __init__(self, found: OperatorTrace) -> None:
        self._found = found
        self._of: dict[int, frozenset[str]] = {}
        self._constants: set[int] = set()
        self._met: set[int] = set()

    def uses(self) -> list[_Use]:
        return [use for node in self._found.nodes for use in self._visit(node)]

    def _names(self, slot: Any) -> frozenset[str]:
        """Return the parameters that a tensor was computed from; empty if it depends on data as well."""
        if not isinstance(slot, TraceSlot):
            return frozenset()
        if slot.index in self._of:
            return self._of[slot.index]
        return frozenset([slot.name]) if slot.name in self._found.parameters else frozenset()

    def _is_constant(self, slot: TraceSlot) -> bool:
        return slot.index in self._constants or slot.name in self._found.buffers

    def _visit(self, node: Node) -> list[_Use]:
        operands, outs = _slots((node.args, node.kwargs)), tuple(_slots(node.out))
        weights = [slot for slot in operands if self._names(slot)]
        data = [slot for slot in operands if not self._names(slot) and not self._is_constant(slot)]
        uses = list(self._special(node, outs)) if weights else []
        if not uses and not data:
            if weights:
                names = frozenset().union(*map(self._names, weights))
                self._of |= {out.index: names for out in outs}
            else:
                self._constants |= {out.index for out in outs}
            return []
        named = frozenset().union(*(use.names for use in uses))
        rest = frozenset().union(*map(self._names, weights)) - named if weights else frozenset()
        if rest:
            uses.append(_Use(rest, "elementwise"))
        if any(slot.index in self._met for slot in data) or any(use.kind != "elementwise" for use in uses):
            self._met |= {out.index for out in outs}
        return uses

    def _special(self, node: Node, outs: tuple[TraceSlot, ...]) -> Iterator[_Use]:
        """Yield a call's products and lookups of parameters; nothing if it is elementwise or only combines weights."""
        name = node.name
        if name in _LAYERS:
            for weight, given in _LAYERS[name]:
                yield from self._layer(_argument(node, *weight), _argument(node, *given), outs, thin=_is_thin(node))
        elif name in _RECURRENT:
            yield from self._recurrent(node, outs)
        elif name == "multi_head_attention_forward":
            yield from self._attention(node, outs)
        elif name == "scaled_dot_product_attention":
            yield from (_Use(names, "lookup") for slot in _slots(node.args) if (names := self._names(slot)))
        elif name in _LOOKUPS:
            table = _argument(node, *_LOOKUPS[name])
            if self._names(table) and _looks_up_rows(node, table):
                yield _Use(self._names(table), "lookup")
        elif name in _PRODUCTS or name == _OPAQUE or _is_custom(node):
            yield from self._product(node, outs)

    def _layer(self, weight: Any, given: Any, outs: tuple[TraceSlot, ...], *, thin: bool) -> Iterator[_Use]:
        if names := self._names(weight):
            yield _Use(names, "elementwise" if thin else "product", met=self._has_met(given), out=outs)
        if learned := self._names(given):
            # A learned input of the layer, such as learned queries.
            yield _Use(learned, "lookup")

    def _product(self, node: Node, outs: tuple[TraceSlot, ...]) -> Iterator[_Use]:
        operands = _slots((node.args, node.kwargs))
        if node.name in _ADDED_FIRST:
            operands = operands[1:]
        others = [slot for slot in operands if not self._names(slot)]
        if all(self._is_constant(slot) for slot in others):
            return
        met = any(slot.index in self._met for slot in others)
        for at, slot in enumerate(operands):
            names = self._names(slot)
            is_weight = len(slot.shape) > 1 or node.name in _PRODUCTS
            if names and is_weight and (node.name != "einsum" or _is_summed(node, at)):
                yield _Use(names, "product", met=met, out=outs)

    def _recurrent(self, node: Node, outs: tuple[TraceSlot, ...]) -> Iterator[_Use]:
        lists = [position for position, value in enumerate(node.args) if isinstance(value, (list, tuple))]
        # An LSTM takes its list of states (h, c) before the list of weights.
        at = lists[1 if node.name == "lstm" else 0]
        weights, layers, directions = node.args[at], node.args[at + 2], 1 + bool(node.args[at + 5])
        each = len(weights) // (layers * directions)
        for position, slot in enumerate(weights):
            first = position % each == 0 and position < each * directions
            if len(slot.shape) > 1:
                met = self._has_met(node.args[0]) if first else True
                yield _Use(self._names(slot), "product", met=met, out=outs, followed=True)

    def _attention(self, node: Node, outs: tuple[TraceSlot, ...]) -> Iterator[_Use]:
        given = inspect.signature(F.multi_head_attention_forward).bind(*node.args, **node.kwargs).arguments
        inputs = [given[name] for name in ("query", "key", "value")]
        for name in MHA_PROJECTIONS:
            last = name == MHA_PROJECTIONS[-1]
            if names := self._names(given.get(name)):
                met = last or any(self._has_met(each) for each in inputs)
                yield _Use(names, "product", met=met, out=outs, followed=not last)
        for name in ("bias_k", "bias_v"):
            inputs.append(given.get(name))
        yield from (_Use(names, "lookup") for each in inputs if (names := self._names(each)))

    def _has_met(self, slot: Any) -> bool:
        return isinstance(slot, TraceSlot) and (slot.index in self._met or bool(self._names(slot)))


def _slots(tree: Any) -> list[TraceSlot]:
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, TraceSlot)]


def _argument(node: Node, position: int, name: str) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def _is_thin(node: Node) -> bool:
    """Return whether each group of a convolution's weight has one row or column (depthwise)."""
    if node.name not in _CONVOLUTIONS:
        return False
    groups = _argument(node, 6, "groups") or 1
    weight = _argument(node, *_WEIGHT)
    rows, columns = weight.shape[0], math.prod(weight.shape[1:])
    if "transpose" in node.name:
        rows, columns = weight.shape[1], weight.shape[0] * math.prod(weight.shape[2:])
        return bool(groups > 1 and 1 in (rows, columns // groups))
    return bool(groups > 1 and 1 in (rows // groups, columns))


def _looks_up_rows(node: Node, table: TraceSlot) -> bool:
    """Return whether a call looks up rows of a table by index tensors, rather than whole matrices (experts)."""
    left = len(table.shape)
    if node.name == "getitem":
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        if not _slots(index):
            return False
        left -= sum(isinstance(entry, (int, TraceSlot, list)) and not isinstance(entry, bool) for entry in index)
    elif node.name == "index_select":
        left -= 1
    else:
        return True
    return left < 2


def _is_custom(node: Node) -> bool:
    """Return whether a call is a custom autograd function; it is not traced into, so a matrix counts as a product."""
    return getattr(node.func, "__name__", "") == "apply" and node.name != "apply"


def _is_summed(node: Node, operand: int) -> bool:
    """Return whether an einsum contracts an operand's dim with another operand; True if the equation is not parsed."""
    equation = node.args[0]
    if not isinstance(equation, str) or "->" not in equation:
        return True
    given, result = equation.replace(" ", "").replace("...", "").split("->")
    terms = given.split(",")
    others = {letter for at, term in enumerate(terms) if at != operand for letter in term}
    return operand >= len(terms) or any(letter in others and letter not in result for letter in terms[operand])
