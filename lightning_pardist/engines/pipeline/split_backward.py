"""Backward in two halves, for zero-bubble schedules: gradients of a stage's inputs first, of its parameters later.

Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2: the input half is on the critical path, the parameter
half fills idle time.

[Note: where the graph is cut] Call a node *inner* if gradients go on from it to an input. The first half runs exactly
the inner nodes. Parameters hang on inner nodes by edges into nodes that are not inner: a matrix product has one edge to
its input and one to its weight. At each inner node with such edges the first half remembers the gradient that came in;
the second half starts there and asks for those parameters only, so that autograd skips the product for the input, which
was done before. Where one parameter hangs on two nodes of which one lies behind the other (a layer used twice), a hook
keeps the second half from running on along the inner edges and counting twice. What no input reaches (an auxiliary loss
of parameters alone) is left to the second half whole.
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
        scaled: Hooks that change gradients on their way, by node: no node runs them twice.
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
        """The first half: gradients with respect to the inputs; None for inputs that no root depends on.

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
            # The second half begins at the joints, with gradients that are scaled.
            handles += [self._scaled[joint.node] for joint in self._joints if joint.node in self._scaled]
            for handle in handles:
                handle.remove()

    def weights(self) -> None:
        """The second half: add the parameters' gradients to their ``.grad``; frees the graph."""
        for joint in self._joints:
            joint.finish()
        if self._rest and self._parameters:
            roots, seeds = zip(*self._rest, strict=True)
            torch.autograd.backward(roots, seeds, inputs=list(self._parameters.values()))
        self._joints, self._rest = [], []


class _Joint:
    """An inner node on which parameters hang."""

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
            # Several joints may share what lies behind them (a weight's cast), so nothing is freed in between.
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
        self._goals = goals

    def is_inner(self, node: Node) -> bool:
        """Whether gradients go on from a node to an input."""
        return self._inner[node]

    def joints(self, parameters: dict[Node, nn.Parameter]) -> list[_Joint]:
        """Inner nodes on which parameters hang."""
        below: dict[Node, frozenset[Node]] = {}

        def visit(node: Node) -> frozenset[Node]:
            own = frozenset({node}) if node in parameters else frozenset()
            return own.union(*(below[child] for child in _children(node)))

        found = []
        for node in self._order:
            if not self._inner[node] or node in self._goals:
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
    """Visit every node below the roots once, children first; without recursion, since graphs are deep."""
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
