"""The outer optimizer of DiLoCo: steps on what islands have changed between two meetings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from lightning_pardist.local_tensors import own_part


class OuterOptimizer:
    """SGD, with Nesterov momentum, on the mean of the islands' differences (DiLoCo, arXiv 2311.08105).

    From the parameters ``anchor`` of the last meeting and the islands' mean ``now``, ``anchor - now`` serves as a
    gradient. Anchors and momenta are kept in fp32 or wider for what this rank holds of each parameter.

    Args:
        params: Parameters that islands train, plain or ``DTensor``s.
        lr: Step size; 1 without momentum is plain averaging.
        momentum: Of Nesterov's kind.
    """

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, momentum: float) -> None:
        self._anchors = {param: _widened(param) for param in params}
        self._sgd = torch.optim.SGD(
            list(self._anchors.values()) or [torch.empty(0)], lr=lr, momentum=momentum, nesterov=momentum > 0
        )

    @torch.no_grad()
    def start(self) -> None:
        """Measure differences from the parameters as they are now."""
        for param, anchor in self._anchors.items():
            anchor.copy_(own_part(param))

    def has(self, param: Tensor) -> bool:
        """Whether a parameter is one of those."""
        return param in self._anchors

    @torch.no_grad()
    def step(self, params: Iterable[nn.Parameter]) -> None:
        """Make a step for some parameters, which hold the islands' mean, and put the result there."""
        stepping = [param for param in params if param in self._anchors]
        self.step_on(dict(zip(stepping, self.differences(stepping), strict=True)))

    @torch.no_grad()
    def differences(self, params: Iterable[nn.Parameter]) -> list[Tensor]:
        """What has been taken off some parameters since the last step, as this rank holds them."""
        return [self._anchors[param] - own_part(param) for param in params]

    @torch.no_grad()
    def step_on(self, means: Mapping[nn.Parameter, Tensor], *, mixing: float = 0.0) -> None:
        """Make a step for some parameters, and put the result there.

        Args:
            means: Of the islands' differences, by parameter.
            mixing: Share that parameters keep of what they hold now.
        """
        for param, mean in means.items():
            self._anchors[param].grad = mean
        self._sgd.step()
        for param in means:
            anchor = self._anchors[param]
            anchor.grad = None
            own = own_part(param)
            own.copy_(torch.lerp(anchor, own.to(anchor.dtype), mixing) if mixing else anchor)

    @torch.no_grad()
    def complete(self, means: Mapping[nn.Parameter, Tensor]) -> None:
        """Add to the last step of some parameters what its gradients lacked, and put the result there."""
        settings = self._sgd.param_groups[0]
        for param, mean in means.items():
            anchor = self._anchors[param]
            momentum = self._sgd.state[anchor].get("momentum_buffer")
            if momentum is not None:
                momentum.add_(mean)
            anchor.sub_(mean, alpha=settings["lr"] * (1 + settings["momentum"]))
            own_part(param).copy_(anchor)

    def momenta(self) -> dict[nn.Parameter, Tensor]:
        """Momentum of each parameter, as this rank holds it; zeros where there has been no step."""
        found = {}
        for param, anchor in self._anchors.items():
            state = self._sgd.state[anchor]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(anchor)
            found[param] = state["momentum_buffer"]
        return found


def _widened(param: nn.Parameter) -> Tensor:
    own = own_part(param).detach()
    dtype = torch.promote_types(own.dtype, torch.float32)
    return own.to(dtype, copy=True)
