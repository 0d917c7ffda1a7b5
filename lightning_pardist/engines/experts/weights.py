"""Experts whose weights travel: every rank runs all of them on its own tokens, as one process does.

Nothing is asked of the module. Weights are whole from the forward of the module that computes with them to the end of
their backward, as those of a unit under ZeRO-2; parameters, gradients and optimizer state stay one in N.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pardist.engines.experts.calls import behind
from lightning_pardist.engines.experts.exchange import Peers, gathered
from lightning_pardist.engines.experts.finding import ExpertLayer
from lightning_pardist.engines.experts.stacked import in_place


class GatheredExperts:
    """Runs a module with the weights of all ranks' experts in place.

    Args:
        number: Of the layer, the same on all ranks.
        layer: It.
        module: That computes with the experts.
        forward: Of the module, as its class has it.
        parameters: Gives stacked parameters of the experts of this rank, by name.
        experts: For lists, the modules of each expert of all ranks.
        peers: The ranks.
    """

    def __init__(
        self,
        number: int,
        layer: ExpertLayer,
        module: nn.Module,
        forward: Callable[..., Any],
        parameters: Callable[[], dict[str, Tensor]],
        experts: list[list[nn.Module]],
        peers: Peers,
    ) -> None:
        self.number, self.layer, self.module, self.forward = number, layer, module, forward
        self.parameters, self.experts, self.peers = parameters, experts, peers
        self.load: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of the module's forward. Collective over the ranks, and so is backward."""
        with ExitStack() as stack:
            mark = self._put_in_place(stack)
            return behind(self.forward(*args, **kwargs), mark)

    def run_empty(self) -> None:
        """Take part in what other ranks run. Collective."""
        with ExitStack() as stack:
            self._put_in_place(stack)

    def _put_in_place(self, stack: ExitStack) -> Tensor:
        self.peers.tell(self.number, torch.zeros((self.peers.size, 1), dtype=torch.int64))
        if self.layer.stacked:
            own = self.parameters()
            whole, mark = gathered([[value] for value in own.values()], self.peers, stacked=True)
            stack.enter_context(in_place(self.module, {n: run[0] for n, run in zip(own, whole, strict=True)}, {}))
            return mark
        each = self.layer.count // self.peers.size
        own_experts = self.experts[self.peers.rank * each : (self.peers.rank + 1) * each]
        places = [_places(parts) for parts in self.experts]
        runs = [
            [parameter for _, _, parameter in column]
            for column in zip(*(_places(parts) for parts in own_experts), strict=True)
        ]
        whole, mark = gathered(runs, self.peers, stacked=False)
        for index, expert in enumerate(places):
            for column, (owner, name, _) in enumerate(expert):
                stack.enter_context(in_place(owner, {name: whole[column][index]}, {}))
        return mark


def _places(parts: list[nn.Module]) -> list[tuple[nn.Module, str, Tensor]]:
    """Owner, name and value of every parameter of an expert."""
    return [
        (owner, name, parameter)
        for part in parts
        for owner in part.modules()
        for name, parameter in owner.named_parameters(recurse=False)
    ]
