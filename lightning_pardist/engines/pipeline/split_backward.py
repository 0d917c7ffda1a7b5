"""Split backward for zero-bubble schedules: gradients of a stage's inputs first, of its parameters later.

Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2: the input half is on the critical path, the parameter
half fills idle time.

[Note: where the graph is cut] A node of the autograd graph is *inner* if it leads to an input. The first half runs
exactly the inner nodes. Parameters are reached from inner nodes by edges to nodes that are not inner: a matrix product
has one edge to its input and one to its weight. At each inner node with such edges (a joint), the first half saves the
incoming gradient; the second half starts there and requests gradients of these parameters only, so autograd skips the
product for the input, which has already been computed. If a parameter is reached from two joints of which one leads to
the other (a layer used twice), a hook stops the second half at the inner edges, where it would count gradients twice.
Roots that do not depend on an input (an auxiliary loss of parameters alone) are left to the second half as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle


class SplitBackward:
    """The two halves of one stage's backward for one micro-batch.

    Args:
        roots: Tensors to differentiate.
        seeds: Gradients with respect to them.
        parameters: Parameters of the stage.
        scaled: Hooks that scale the incoming gradient, by node; removed at joints, so that none applies twice.
    """

    def __init__(
        self,
        roots: Sequence[torch.Tensor],
        seeds: Sequence[torch.Tensor],
        parameters: Sequence[nn.Parameter],
        scaled: Mapping[Node, RemovableHandle] | None = None,
    ) -> None:
        self._scaled = scaled or {}
        self._rest = list(zip(roots, seeds, strict=True))
        self._parameters = {get_gradient_edge(p).node: p for p in parameters if p.requires_grad}
        self._joints: list[_Joint] = []

    def inputs(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Run the first half: return the gradients of the inputs, None for an input that no root depends on.

        Args:
            inputs: Received values that require grad.
        """
        graph = _Graph([get_gradient_edge(root).node for root, _ in self._rest], inputs)
        here = [(root, seed) for root, seed in self._rest if graph.is_inner(get_gradient_edge(root).node)]
        self._rest = [(root, seed) for root, seed in self._rest if not graph.is_inner(get_gradient_edge(root).node)]
        if not here:
            return [None] * len(inputs)
        self._joints = graph.joints(self._parameters)
        handles = [joint.node.register_prehook(joint.remember) for joint in self._joints]
        try:
            roots, seeds = zip(*here, strict=True)
            return list(torch.autograd.grad(roots, list(inputs), seeds, retain_graph=True, allow_unused=True))
        finally:
            # The second half starts at the joints, with gradients that are already scaled.
            handles += [self._scaled[joint.node] for joint in self._joints if joint.node in self._scaled]
            for handle in handles:
                handle.remove()

    def weights(self) -> None:
        """Run the second half: accumulate the parameters' gradients into ``.grad``, and free the graph."""
        for joint in self._joints:
            joint.finish()
        if self._rest and self._parameters:
            roots, seeds = zip(*self._rest, strict=True)
            torch.autograd.backward(roots, seeds, inputs=list(self._parameters.values()))
        self._joints, self._rest = [], []


class _Joint:
    """An inner node with edges that lead to parameters, and the gradient saved for the second half."""

    def __init__(self, node: Node, inner_edges: list[bool], parameters: list[nn.Parameter]) -> None:
        self.node = node
        self.inner_edges = inner_edges
        self.parameters = parameters
        self.gradients: tuple[Any, ...] = ()

    def remember(self, gradients: tuple[Any, ...]) -> None:
        self.gradients = gradients

    def finish(self) -> None:
        edges = [GradientEdge(self.node, i) for i, gradient in enumerate(self.gradients) if gradient is not None]
        if not edges:
            return
        seeds = [gradient for gradient in self.gradients if gradient is not None]
        handle = self.node.register_hook(self._stop)
        try:
            # retain_graph: several joints may share nodes on the way to a parameter (a weight's cast).
            torch.autograd.backward(edges, seeds, inputs=self.parameters, retain_graph=True)
        finally:
            handle.remove()

    def _stop(self, grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        pairs = zip(grad_inputs, self.inner_edges, strict=True)
        return tuple(None if is_inner else gradient for gradient, is_inner in pairs)


class _Graph:
    """The autograd graph between roots and inputs."""

    def __init__(self, roots: Sequence[Node], inputs: Sequence[torch.Tensor]) -> None:
        goals = {get_gradient_edge(tensor).node for tensor in inputs}
        self._inner: dict[Node, bool] = {}
        self._order: list[Node] = []

        def visit(node: Node) -> bool:
            return node in goals or any(self._inner[child] for child in _children(node))

        _after_children(roots, self._inner, visit, self._order)
        self._stop_nodes = goals

    def is_inner(self, node: Node) -> bool:
        """Return whether a node leads to an input."""
        return self._inner[node]

    def joints(self, parameters: dict[Node, nn.Parameter]) -> list[_Joint]:
        """Return the inner nodes with edges that lead to parameters outside the inner graph."""
        below: dict[Node, frozenset[Node]] = {}

        def visit(node: Node) -> frozenset[Node]:
            own = frozenset({node}) if node in parameters else frozenset()
            return own.union(*(below[child] for child in _children(node)))

        found = []
        for node in self._order:
            if not self._inner[node] or node in self._stop_nodes:
                continue
            outer = [child for child in _children(node) if not self._inner[child]]
            _after_children(outer, below, visit, [])
            hanging = frozenset[Node]().union(*(below[child] for child in outer))
            if hanging:
                edges = [child is not None and self._inner[child] for child, _ in node.next_functions]
                found.append(_Joint(node, edges, [parameters[leaf] for leaf in hanging]))
        return found


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _after_children(
    roots: Sequence[Node], done: dict[Node, Any], visit: Callable[[Node], Any], order: list[Node]
) -> None:
    """Visit every node reachable from the roots once, children first; iteratively, since graphs are deep."""
    stack = [(node, False) for node in roots]
    while stack:
        node, ready = stack.pop()
        if node in done:
            continue
        if ready:
            done[node] = visit(node)
            order.append(node)
            continue
        stack.append((node, True))
        stack.extend((child, False) for child in _children(node) if child not in done)
