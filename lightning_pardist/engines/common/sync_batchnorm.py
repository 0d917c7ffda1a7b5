"""Batch normalisation over the samples of all ranks, on CPU as well as on GPU (torch's own refuses CPU tensors).

A layer keeps its class below a new one, so that ``isinstance`` holds and its other methods stay. One with a ``forward``
of its own (an activation after the normalisation, say) runs it, and what that asks of ``batch_norm`` is computed over
all ranks.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_pardist.compat.autograd import not_compiled
from lightning_pardist.compat.modules import BatchNorm, check_dims


class _OverRanks(BatchNorm):
    """A batch norm layer whose statistics in training are those of the batches of all ranks of a group.

    Equals one process' batch normalisation of the concatenated batch, also where ranks hold different numbers of
    samples. Collective over ``group`` in training: one reduction forward and one backward.
    """

    group: dist.ProcessGroup
    plain: type[BatchNorm]
    #: Of the layer in the module, while it is synchronized.
    synchronized_as: str | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input``, shape ``[N, C, ...]``; the same shape and dtype come back."""
        if not self.training or self.synchronized_as is None:
            return super().forward(input)
        check_dims(self, input)
        momentum = self.momentum
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        tracked = self.track_running_stats
        return batch_norm(
            input,
            self.running_mean if tracked else None,
            self.running_var if tracked else None,
            self.weight,
            self.bias,
            momentum or 0.0,
            self.eps,
            group=self.group,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchNorm:
        """The copy is synchronized as well."""
        with_group = type(self)
        copied: BatchNorm = self._as_plain(lambda: copy.deepcopy(self, memo))
        copied.__class__ = with_group
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files know of the layer's own class only."""
        # Of later protocols, pickle compares the class with that of the layer.
        return self._as_plain(lambda: self.__reduce_ex__(0))

    def _as_plain(self, do: Callable[[], Any]) -> Any:
        with_group: Any = type(self)
        self.__class__ = with_group.plain
        try:
            return do()
        finally:
            self.__class__ = with_group


class _OverRanksByItself(_OverRanks):
    """The same for a layer with a ``forward`` of its own."""

    @not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own ``forward``.

        Raises:
            ValueError: If it normalises by itself, by statistics of this rank's samples.
        """
        own = functools.partial(self.plain.forward, self)
        if not self.training or self.synchronized_as is None:
            return own(*args, **kwargs)
        with _StatisticsOfAll(self.group) as statistics:
            output = own(*args, **kwargs)
        if not statistics.asked:
            raise ValueError(
                f"sync_batchnorm=True cannot synchronize {self.synchronized_as!r}: the forward of"
                f" {self.plain.__name__} does not call torch's batch_norm, so its statistics are those of one rank's"
                " samples. Call torch.nn.functional.batch_norm or super().forward in it, or set sync_batchnorm=False."
            )
        return output


class _StatisticsOfAll(TorchFunctionMode):
    """While active, torch's ``batch_norm`` in training takes its statistics over the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.asked = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call = _CALLS.get(func)
        if call is None:
            return func(*args, **(kwargs or {}))
        self.asked = True
        asked = call(*args, **(kwargs or {}))
        training = asked.pop("training")
        if not training:
            return func(*args, **(kwargs or {}))
        return batch_norm(**asked, group=self.group)


def _functional(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> dict[str, Any]:
    return locals()


def _operator(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> dict[str, Any]:
    return {name: value for name, value in locals().items() if name != "cudnn_enabled"}


#: Arguments by name, of the functions of torch that layers call.
_CALLS: dict[Any, Callable[..., dict[str, Any]]] = {F.batch_norm: _functional, torch.batch_norm: _operator}


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    *,
    group: dist.ProcessGroup,
) -> Tensor:
    """``torch.nn.functional.batch_norm`` in training, by the statistics of all ranks' samples. Collective.

    Args:
        input: This rank's samples, shape ``[N, C, ...]``; ``N`` may differ between ranks.
        running_mean: Updated in place, shape ``[C]``.
        running_var: Updated in place, shape ``[C]``.
        weight: Shape ``[C]``.
        bias: Shape ``[C]``.
        momentum: Share of this batch in the running statistics.
        eps: Added to the variance.
        group: Whose samples count.

    Raises:
        ValueError: If all ranks together have one value per channel.
    """
    if input.dim() < 2:
        raise ValueError(f"Batch normalisation expects at least 2 dims (N, C, ...), got shape {tuple(input.shape)}.")
    output, mean, variance, count = _Normalize.apply(input, weight, bias, eps, group)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased = variance * (count / (count - 1).clamp(min=1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return output  # type: ignore[no-any-return]


class _Normalize(torch.autograd.Function):
    """Batch normalisation with statistics and their gradients summed over a group."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        channels = x.shape[1]
        own_count = x.numel() // channels
        # Mean and M2 of each rank are merged (Chan et al.), which loses no digits where E[x^2] - E[x]^2 would.
        rank_mean = wide.mean(dims) if x.numel() else wide.new_zeros(channels)
        rank_m2 = (wide - rank_mean.view(shape)).square().sum(dims)
        packed = torch.cat([rank_mean, rank_m2, wide.new_full((1,), own_count)])
        gathered = [torch.empty_like(packed) for _ in range(group.size())]
        dist.all_gather(gathered, packed, group=group)
        means, m2s, counts = torch.stack(gathered).split([channels, channels, 1], dim=1)
        count = counts.sum()
        # A rank with several knows without looking, for which it would wait for the device.
        if own_count <= 1 and count <= 1:
            raise ValueError(f"Expected more than 1 value per channel over all ranks, got input size {tuple(x.shape)}.")
        mean = (means * counts).sum(0) / count
        variance = (m2s.sum(0) + (counts * (means - mean).square()).sum(0)) / count
        inv_std = torch.rsqrt(variance + eps)
        normalized = (wide - mean.view(shape)) * inv_std.view(shape)
        output = normalized if weight is None else normalized * weight.view(shape)
        if bias is not None:
            output = output + bias.view(shape)
        ctx.save_for_backward(x, weight, mean, inv_std, count)
        ctx.group, ctx.dims, ctx.shape = group, dims, shape
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inv_std, count = ctx.saved_tensors
        wide, grad = x.to(mean.dtype), grad.to(mean.dtype)
        normalized = (wide - mean.view(ctx.shape)) * inv_std.view(ctx.shape)
        grad_bias = grad.sum(ctx.dims)
        grad_weight = (grad * normalized).sum(ctx.dims)
        # Parameter gradients stay local: the data axis averages them like all others.
        packed = torch.cat([grad_bias, grad_weight])
        dist.all_reduce(packed, group=ctx.group)
        sum_grad, sum_grad_normalized = (packed / count).chunk(2)
        scale = inv_std if weight is None else inv_std * weight
        grad_x = scale.view(ctx.shape) * (
            grad - sum_grad.view(ctx.shape) - normalized * sum_grad_normalized.view(ctx.shape)
        )
        return (
            grad_x.to(x.dtype),
            None if weight is None else grad_weight.to(weight.dtype),
            grad_bias.to(weight.dtype) if weight is not None and ctx.needs_input_grad[2] else None,
            None,
            None,
        )


def convert(module: nn.Module, *, group: dist.ProcessGroup) -> nn.Module:
    """Let every batch norm layer in ``module`` take its statistics over ``group``. In place, not collective.

    The layers stay the objects they are, so that shared layers stay shared and references to them stay right; their
    class is extended until :func:`revert`. Where the group is one rank nothing changes.
    """
    if group.size() == 1:
        return module
    extended: dict[type[BatchNorm], type[BatchNorm]] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, BatchNorm) and not isinstance(layer, nn.SyncBatchNorm):
            if not isinstance(layer, _OverRanks):
                plain = type(layer)
                if plain not in extended:
                    extended[plain] = _extended(plain, group)
                layer.__class__ = extended[plain]
            layer.__dict__["synchronized_as"] = name
    return module


def is_converted(layer: nn.Module) -> bool:
    """Whether :func:`convert` has extended a layer."""
    return isinstance(layer, _OverRanks)


def revert(module: nn.Module) -> nn.Module:
    """Undo :func:`convert`."""
    for layer in module.modules():
        if isinstance(layer, _OverRanks):
            layer.__dict__.pop("synchronized_as", None)
            # A class that somebody else has extended since then stays, and does what the plain one does.
            if "plain" in type(layer).__dict__:
                layer.__class__ = layer.plain  # type: ignore[assignment]
    return module


def _extended(plain: type[BatchNorm], group: dist.ProcessGroup) -> type[BatchNorm]:
    base = _OverRanks if plain.forward is BatchNorm.forward else _OverRanksByItself
    names = {"group": group, "plain": plain, "__module__": plain.__module__, "__qualname__": plain.__qualname__}
    return type(plain.__name__, (base, plain), names)
