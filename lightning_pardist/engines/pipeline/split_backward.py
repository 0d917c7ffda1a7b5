"""Backward in two halves, for zero-bubble schedules: gradients of a stage's inputs first, of its parameters later.

Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2: the input half is on the critical path, the parameter
half fills idle time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class SplitBackward:
    """The two halves of one stage's backward for one micro-batch.

    Args:
        roots: Tensors to differentiate.
        seeds: Gradients with respect to them.
        parameters: Parameters of the stage.
    """

    def __init__(
        self, roots: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor], parameters: Sequence[nn.Parameter]
    ) -> None:
        self.roots = list(roots)
        self.seeds = list(seeds)
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]

    def inputs(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The first half: gradients with respect to the inputs; None for inputs that no root depends on.

        Args:
            inputs: Received values that require grad.
        """
        if not self.roots or not inputs:
            return [None] * len(inputs)
        return list(torch.autograd.grad(self.roots, list(inputs), self.seeds, retain_graph=True, allow_unused=True))

    def weights(self) -> None:
        """The second half: add the parameters' gradients to their ``.grad``; frees the graph."""
        if self.roots and self.parameters:
            torch.autograd.backward(self.roots, self.seeds, inputs=self.parameters)
        self.roots, self.seeds = [], []
