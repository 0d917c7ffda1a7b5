"""The outer optimizer of DiLoCo, which steps on the islands' mean parameter change between two synchronisations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from lightning_pardist.local_tensors import local_shard


class OuterOptimizer:
    """SGD with Nesterov momentum on the mean of the islands' differences (DiLoCo, arXiv 2311.08105).

    The outer gradient is ``anchor - now``, with ``anchor`` the parameters after the last outer step and ``now`` the
    islands' mean. Anchors and momenta are kept in fp32 or wider, for this rank's part of each parameter.

    Args:
        params: Parameters that islands train, plain or ``DTensor``s.
        lr: Outer learning rate; 1 without momentum is plain averaging.
        momentum: Nesterov momentum; 0 disables it.
    """

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, momentum: float) -> None:
        self._anchors = {param: _widened(param) for param in params}
        self._sgd = torch.optim.SGD(
            list(self._anchors.values()) or [torch.empty(0)], lr=lr, momentum=momentum, nesterov=momentum > 0
        )

    @torch.no_grad()
    def start(self) -> None:
        """Set the anchors to the current parameters."""
        for param, anchor in self._anchors.items():
            anchor.copy_(local_shard(param))

    def has(self, param: Tensor) -> bool:
        """Return whether a parameter is managed by this optimizer."""
        return param in self._anchors

    @torch.no_grad()
    def step(self, params: Iterable[nn.Parameter]) -> None:
        """Step on some parameters, which hold the islands' mean, and write the result to them."""
        stepping = [param for param in params if param in self._anchors]
        self.step_on(dict(zip(stepping, self.differences(stepping), strict=True)))

    @torch.no_grad()
    def differences(self, params: Iterable[nn.Parameter]) -> list[Tensor]:
        """Return ``anchor - now`` for this rank's parts of some parameters."""
        return [self._anchors[param] - local_shard(param) for param in params]

    @torch.no_grad()
    def step_on(self, means: Mapping[nn.Parameter, Tensor], *, mixing: float = 0.0) -> None:
        """Step on some parameters, and write the result to them.

        Args:
            means: Mean of the islands' differences, by parameter.
            mixing: Weight of a parameter's current value when the result is written to it.
        """
        for param, mean in means.items():
            self._anchors[param].grad = mean
        self._sgd.step()
        for param in means:
            anchor = self._anchors[param]
            anchor.grad = None
            own = local_shard(param)
            own.copy_(torch.lerp(anchor, own.to(anchor.dtype), mixing) if mixing else anchor)

    @torch.no_grad()
    def complete(self, means: Mapping[nn.Parameter, Tensor]) -> None:
        """Add to the last step of some parameters what its gradients lacked, and write the result to them."""
        settings = self._sgd.param_groups[0]
        for param, mean in means.items():
            anchor = self._anchors[param]
            momentum = self._sgd.state[anchor].get("momentum_buffer")
            if momentum is not None:
                momentum.add_(mean)
            anchor.sub_(mean, alpha=settings["lr"] * (1 + settings["momentum"]))
            local_shard(param).copy_(anchor)

    def momenta(self) -> dict[nn.Parameter, Tensor]:
        """Return the momentum of this rank's part of each parameter, initialised to zeros before its first step."""
        found = {}
        for param, anchor in self._anchors.items():
            state = self._sgd.state[anchor]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(anchor)
            found[param] = state["momentum_buffer"]
        return found


def _widened(param: nn.Parameter) -> Tensor:
    own = local_shard(param).detach()
    dtype = torch.promote_types(own.dtype, torch.float32)
    return own.to(dtype, copy=True)
