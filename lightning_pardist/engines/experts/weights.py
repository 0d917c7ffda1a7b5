"""Experts whose weights are gathered: every rank runs all of them on its own tokens, as a single process does.

This needs nothing of the module. Weights are gathered from the forward of the module that computes with them to the end
of their backward, like those of a unit under ZeRO-2; parameters, gradients and optimizer state stay sharded, 1/N on
each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pardist.engines.experts.calls import join_exchange
from lightning_pardist.engines.experts.exchange import Peers, all_gather_weights
from lightning_pardist.engines.experts.finding import ExpertLayer
from lightning_pardist.engines.experts.layer_weights import (
    LayerWeights,
    places_of,
    with_expert_parameters,
    with_parameters,
    without_reentrant,
)


class GatheredExperts:
    """Runs a module with the gathered weights of all ranks' experts.

    Args:
        number: Index of the layer, the same on all ranks.
        layer: The layer.
        module: The module that computes with the experts.
        forward: Its original forward.
        weights: Parameters of this rank's experts.
        experts: For lists, the modules of each expert of all ranks.
        peers: The expert group.
    """

    def __init__(
        self,
        number: int,
        layer: ExpertLayer,
        module: nn.Module,
        forward: Callable[..., Any],
        weights: LayerWeights,
        experts: list[list[nn.Module]],
        peers: Peers,
    ) -> None:
        self.number, self.layer, self.module, self.forward = number, layer, module, forward
        self.weights, self.experts, self.peers = weights, experts, peers
        self.load: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replacement for the module's ``forward``. Collective over the expert group, in forward and in backward."""
        with ExitStack() as stack:
            with self.peers.sequenced(self.number):
                mark = self._put_in_place(stack)
            stack.enter_context(without_reentrant())
            return join_exchange(self.forward(*args, **kwargs), mark)

    def run_empty(self) -> None:
        """Take part in a layer that other ranks run. Collective."""
        with ExitStack() as stack:
            self._put_in_place(stack)

    def _put_in_place(self, stack: ExitStack) -> Tensor:
        self.peers.exchange_counts(self.number, torch.zeros((self.peers.size, 1), dtype=torch.int64))
        values = self.weights.full_values()
        if self.layer.stacked:
            whole, mark = all_gather_weights([[value] for value in values], self.peers, stacked=True)
            whole_by_name = {name: run[0] for name, run in zip(self.layer.stacked, whole, strict=True)}
            stack.enter_context(with_parameters(self.module, whole_by_name, {}))
            return mark
        places = [places_of(parts) for parts in self.experts]
        width = len(places[0])
        runs = [values[column::width] for column in range(width)]
        whole, mark = all_gather_weights(runs, self.peers, stacked=False)
        everywhere = [place for expert in places for place in expert]
        of_experts = [whole[column][index] for index in range(len(places)) for column in range(width)]
        stack.enter_context(with_expert_parameters(everywhere, of_experts))
        return mark
