"""Model fragments that islands synchronise one after another, overlapped with training (Streaming DiLoCo)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pardist.engines.common.block_quantization import Compression
from lightning_pardist.engines.outer_exchange import OuterExchange
from lightning_pardist.engines.outer_optimizer import OuterOptimizer


class OuterFragment:
    """A subset of the parameters with its own asynchronous outer step over the islands.

    Args:
        params: Parameters managed by ``outer``.
        outer: The outer optimizer, which steps on the mean difference.
        group: This rank and its counterparts on the other islands.
        kind: Quantization of the messages; None sends full precision.
        mixing: Weight of an island's own parameters when the result of an outer step is merged into them.

    Attributes:
        trained: Whether an inner step has run since the last outer step; set by the caller.
        in_flight: Whether an exchange of differences is under way.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        outer: OuterOptimizer,
        *,
        group: dist.ProcessGroup,
        kind: Compression | None,
        mixing: float,
    ) -> None:
        self.params, self._outer, self._mixing = list(params), outer, mixing
        sizes = [_real(difference).numel() for difference in outer.differences(self.params)]
        self._exchange = OuterExchange(sizes, group=group, kind=kind, like=self._flat())
        self._turned = self.in_flight = self.trained = False
        #: The flat differences of the exchange under way.
        self._sent = torch.empty(0)

    def start(self) -> None:
        """Start to exchange this island's changes since the fragment's last outer step. Collective over the group."""
        self._sent = self._flat()
        self._exchange.start(self._sent)
        self.in_flight, self._turned = True, False

    def turn(self) -> None:
        """Average this rank's slice and start to distribute it. Collective over the group."""
        self._exchange.turn()
        self._turned = True

    def finish(self) -> None:
        """Make the outer step, and merge its result into this island's parameters. Collective over the group."""
        self._outer.step_on(self._means(self._arrived()), mixing=self._mixing)
        self.trained = False

    def meet_exactly(self) -> None:
        """Average all differences in full precision and make the outer step. Collective over the group.

        Afterwards all islands hold the same parameters, and the error-feedback buffers are zero. Differences in flight
        and changes since they were sent make one outer step together; if no inner step has run since the last outer
        step, the quantization error of that step is added to it instead.
        """
        if self.in_flight:
            sent = self._sent
            arrived = self._arrived()
            mean, steps = arrived + self._exchange.exact(self._flat() - sent), True
        else:
            mean, steps = self._exchange.exact(self._flat()), self.trained
        (self._outer.step_on if steps else self._outer.complete)(self._means(mean))
        self.trained = False

    def held_bytes(self) -> int:
        """Return the bytes held on this rank besides the outer optimizer's state."""
        return self._exchange.held_bytes()

    @torch.no_grad()
    def _flat(self) -> Tensor:
        parts = [_real(difference).reshape(-1) for difference in self._outer.differences(self.params)]
        return torch.cat(parts)

    def _arrived(self) -> Tensor:
        if not self._turned:
            self.turn()
        self.in_flight, self._sent = False, torch.empty(0)
        return self._exchange.finish()

    def _means(self, flat: Tensor) -> dict[nn.Parameter, Tensor]:
        means, begin = [], 0
        for difference in self._outer.differences(self.params):
            real = _real(difference)
            piece = flat.narrow(0, begin, real.numel()).view(real.shape).to(real.dtype)
            means.append(torch.view_as_complex(piece) if difference.is_complex() else piece)
            begin += real.numel()
        return dict(zip(self.params, means, strict=True))


def fragments_of(params: Sequence[nn.Parameter], number: int) -> list[list[nn.Parameter]]:
    """Split parameters, in order, into at most ``number`` contiguous runs of about the same number of elements."""
    total, seen = sum(param.numel() for param in params), 0
    found: dict[int, list[nn.Parameter]] = {}
    for param in params:
        # A parameter goes to the fragment that contains its midpoint.
        found.setdefault(min(number - 1, int(number * (seen + param.numel() / 2) / max(total, 1))), []).append(param)
        seen += param.numel()
    return list(found.values())


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
