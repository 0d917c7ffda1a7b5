"""Autograd regions that one rank computes for all: the outputs are broadcast in forward, input gradients in backward.

[Note: one graph on every rank] All ranks run the same code; only the inside of a region differs. On every rank, a
region has an entry and an exit node in the autograd graph, connected by a token: a backward pass through the exit
always reaches the entry, whatever the owner computes in between. Autograd runs ready nodes in reverse order of
creation, so all ranks reach entries and exits in the same order, and their broadcasts match without further
synchronisation. The backward of a region is a region again: double backward, ``torch.autograd.grad`` and
``retain_graph=True`` work as on one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pardist.collectives import as_bytes


@dataclass(frozen=True)
class RegionFailure:
    """Message of a region in which the owner raised an exception.

    Attributes:
        text: Description of the exception.
    """

    text: str


@dataclass(frozen=True)
class _Described:
    """Metadata of a tensor, broadcast before its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class RegionChannel:
    """Broadcasts objects and tensors from one rank of a group to all others.

    Args:
        group: The process group.
        device: Device of this rank's tensors.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = group.rank()
        self._wire = device if device.type in str(dist.get_backend_config(group)) else torch.device("cpu")

    def broadcast(
        self, owner: int, message: Any, tensors: Sequence[Tensor | None] = ()
    ) -> tuple[Any, list[Tensor | None]]:
        """Broadcast the owner's message and tensors. Collective over the group.

        Args:
            owner: Source rank in the group.
            message: Any picklable object; used on the owner only.
            tensors: Tensors; used on the owner only. None stays None.

        Returns:
            The owner's message, and its tensors: on the owner the given ones, on other ranks new ones with the same
            ``requires_grad``.
        """
        described = [None if t is None else _Described(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]
        box = [(message, described)]
        dist.broadcast_object_list(box, group_src=owner, group=self.group)
        message, described = box[0]
        if self.rank == owner:
            for tensor in tensors:
                if tensor is not None and tensor.numel():
                    values = tensor.detach().to(self._wire).contiguous()
                    dist.broadcast(as_bytes(values), group_src=owner, group=self.group)
            return message, list(tensors)
        return message, [None if entry is None else self._receive(entry, owner) for entry in described]

    def _receive(self, entry: _Described, owner: int) -> Tensor:
        values = torch.empty(entry.shape, dtype=entry.dtype, device=self._wire)
        if values.numel():
            dist.broadcast(as_bytes(values), group_src=owner, group=self.group)
        return values.to(self.device).requires_grad_(entry.requires_grad)


class OwnerRegion:
    """One region, from :meth:`enter` to :meth:`leave`, both called by every rank of the channel.

    Args:
        channel: Channel of the ranks that share the region.
        owner: Rank that computes the inside of the region.
    """

    def __init__(self, channel: RegionChannel, owner: int) -> None:
        self.channel = channel
        self.is_owner = channel.rank == owner
        self.owner = owner

    def enter(self, inputs: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Enter the region. Not collective, but its backward is collective over the channel.

        Args:
            inputs: The inputs that require gradients.

        Returns:
            The token for :meth:`leave`, and on the owner the tensors to use inside in place of the inputs.
        """
        if not inputs:
            return torch.zeros((), device=self.channel.device, requires_grad=torch.is_grad_enabled()), ()
        token, *inside = _Enter.apply(self, *inputs)
        return token, tuple(inside)

    def leave(self, token: Tensor, outputs: Sequence[Tensor], message: Any) -> tuple[Any, tuple[Tensor, ...]]:
        """Leave the region: broadcast its outputs. Collective over the channel.

        Args:
            token: From :meth:`enter`.
            outputs: Outputs of the region; used on the owner only.
            message: Any picklable object; used on the owner only.

        Returns:
            The owner's message and outputs, on every rank.

        Raises:
            RuntimeError: On all ranks but the owner, if the message is a :class:`RegionFailure`.
        """
        made: tuple[Tensor, ...]
        if torch.is_grad_enabled():
            box = [message]
            made = _Leave.apply(self, box, 1, token, *(outputs if self.is_owner else ()))
            message = box[0]
        else:
            message, found = self.channel.broadcast(self.owner, message, outputs if self.is_owner else ())
            made = tuple(tensor for tensor in found if tensor is not None)
        if isinstance(message, RegionFailure) and not self.is_owner:
            raise RuntimeError(message.text)
        return message, made


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: OwnerRegion, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.region = region
        ctx.set_materialize_grads(False)
        token = torch.zeros((), device=region.channel.device)
        ctx.save_for_backward(token)
        # Detached: for inputs returned as they are, autograd creates views that do not allow in-place writes.
        return (token, *(x.detach() for x in inputs)) if region.is_owner else (token,)

    @staticmethod
    def backward(ctx: Any, of_token: Tensor | None, *gradients: Tensor | None) -> Any:
        region = ctx.region
        if not torch.is_grad_enabled():
            return None, *region.channel.broadcast(region.owner, None, gradients)[1]
        (token,) = ctx.saved_tensors
        # The entry's own token connects double backward to the entry, also through what the owner has computed.
        of_token = torch.zeros((), device=region.channel.device) if of_token is None else of_token
        return None, *_Leave.apply(region, [None], 2, of_token, token, *gradients)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, region: OwnerRegion, box: list[Any], num_tokens: int, *values: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.region, ctx.num_tokens = region, num_tokens
        ctx.set_materialize_grads(False)
        box[0], found = region.channel.broadcast(region.owner, box[0], values[num_tokens:])
        made = tuple(None if x is None else x.detach() for x in found)
        pairs = zip(made, found, strict=True)
        ctx.mark_non_differentiable(*(m for m, x in pairs if m is not None and x is not None and not x.requires_grad))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        region = ctx.region
        token = torch.zeros((), device=region.channel.device)
        given = [gradient for gradient in gradients if gradient is not None]
        if torch.is_grad_enabled() and any(gradient.requires_grad for gradient in given):
            token, *inside = _Enter.apply(region, *given)
            rest = iter(inside)
            gradients = tuple(None if gradient is None else next(rest, None) for gradient in gradients)
        tokens = (token, *(None for _ in range(ctx.num_tokens - 1)))
        return None, None, None, *tokens, *(gradients if region.is_owner else ())
