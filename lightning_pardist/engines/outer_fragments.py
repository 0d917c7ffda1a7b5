"""Fragments of a model that islands bring together in turns, while training goes on (Streaming DiLoCo)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pardist.engines.common.block_codes import Compression
from lightning_pardist.engines.outer_exchange import OuterExchange
from lightning_pardist.engines.outer_optimizer import OuterOptimizer


class OuterFragment:
    """Some parameters, and their differences on the way to the other islands.

    Args:
        params: Parameters that ``outer`` has.
        outer: Steps on the mean of differences.
        group: This rank and its counterparts on the other islands.
        kind: Of codes.
        mixing: Share of an island's own weights in what it goes on from.

    Attributes:
        trained: Whether there has been a step since the last outer one; the caller sets it.
        in_flight: Whether differences are on their way.
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
        #: The differences that are on their way.
        self._sent = torch.empty(0)

    def start(self) -> None:
        """Send what this island has changed since the fragment met last. Collective over the group."""
        self._sent = self._flat()
        self._exchange.start(self._sent)
        self.in_flight, self._turned = True, False

    def turn(self) -> None:
        """Send the mean of this rank's slice. Collective over the group."""
        self._exchange.turn()
        self._turned = True

    def finish(self) -> None:
        """Make the outer step, and take its result into this island's weights. Collective over the group."""
        self._outer.step_on(self._means(self._arrived()), mixing=self._mixing)
        self.trained = False

    def meet_exactly(self) -> None:
        """Bring all differences together in full precision. Collective over the group.

        Afterwards all islands have the same, and nothing is left behind by rounding. What is on its way and what has
        been trained since are one outer step; where nothing has been trained since the last one, what rounding has left
        out of that step is added to it.
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
        """Bytes that are held on this rank beside the outer optimizer's."""
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
    """Runs of parameters of about the same size, in their order; fewer than asked for if there are fewer parameters."""
    total, seen = sum(param.numel() for param in params), 0
    found: dict[int, list[nn.Parameter]] = {}
    for param in params:
        # By where its middle lies.
        found.setdefault(min(number - 1, int(number * (seen + param.numel() / 2) / max(total, 1))), []).append(param)
        seen += param.numel()
    return list(found.values())


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
