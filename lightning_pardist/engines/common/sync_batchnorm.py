"""Batch normalisation over the samples of all ranks, on CPU and GPU (``nn.SyncBatchNorm`` refuses CPU tensors).

A layer's class is replaced by a subclass of it, so that ``isinstance`` checks and its other methods still work. A layer
with its own ``forward`` (with an activation after the normalisation, say) runs that ``forward``, in which calls of
``batch_norm`` use the statistics of all ranks.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_pardist.compat.autograd import not_compiled
from lightning_pardist.compat.modules import BatchNorm, check_dims


@dataclass
class CurrentBatch:
    """The training batch of this rank that synchronized layers compute with.

    Attributes:
        counts: Whether its samples enter the statistics. Those of a batch that only keeps the ranks in step do not; its
            layers use, and track, the statistics of the other ranks' samples.
    """

    counts: bool = True


class _SyncedBatchNorm(BatchNorm):
    """A batch norm layer whose training statistics are computed over all ranks of a group.

    Equals a single process' batch normalisation of the concatenated batch, also if ranks hold different numbers of
    samples. Collective over ``group`` in training: one all-gather in forward, one all-reduce in backward, and two in a
    backward with ``create_graph=True`` (penalties on gradients), whose own backward has two as well.
    """

    group: dist.ProcessGroup
    batch: CurrentBatch
    plain: type[BatchNorm]
    #: Name of the layer in the module while it is synchronized; None otherwise.
    synchronized_as: str | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input``, shape ``[N, C, ...]``; returns a tensor of the same shape and dtype."""
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
            counts=self.batch.counts,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchNorm:
        """Copy the layer; the copy is synchronized too."""
        with_group = type(self)
        copied: BatchNorm = self._as_plain(lambda: copy.deepcopy(self, memo))
        copied.__class__ = with_group
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the layer with its original class."""
        # In later protocols, pickle compares the class with that of the layer.
        return self._as_plain(lambda: self.__reduce_ex__(0))

    def _as_plain(self, do: Callable[[], Any]) -> Any:
        with_group: Any = type(self)
        self.__class__ = with_group.plain
        try:
            return do()
        finally:
            self.__class__ = with_group


class _SyncedCustomBatchNorm(_SyncedBatchNorm):
    """A synchronized batch norm layer whose original class overrides ``forward``."""

    @not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own ``forward`` with synchronized ``batch_norm`` calls.

        Raises:
            ValueError: If it does not call torch's ``batch_norm``, and so uses this rank's statistics only.
        """
        own = functools.partial(self.plain.forward, self)
        if not self.training or self.synchronized_as is None:
            return own(*args, **kwargs)
        with _SyncedStatistics(self.group, self.batch) as statistics:
            output = own(*args, **kwargs)
        if not statistics.asked:
            raise ValueError(
                f"sync_batchnorm=True cannot synchronize {self.synchronized_as!r}: the forward of"
                f" {self.plain.__name__} does not call torch's batch_norm, so its statistics are those of one rank's"
                " samples. Call torch.nn.functional.batch_norm or super().forward in it, or set sync_batchnorm=False."
            )
        return output


class _SyncedStatistics(TorchFunctionMode):
    """Function mode in which torch's ``batch_norm`` in training computes its statistics over the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup, batch: CurrentBatch) -> None:
        super().__init__()
        self.group, self.batch = group, batch
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
        return batch_norm(**asked, group=self.group, counts=self.batch.counts)


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


#: Converters of call arguments to keyword arguments, by torch function that layers may call.
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
    counts: bool = True,
) -> Tensor:
    """Compute ``torch.nn.functional.batch_norm`` in training with statistics over all ranks. Collective over ``group``.

    Args:
        input: This rank's samples, shape ``[N, C, ...]``; ``N`` may differ between ranks.
        running_mean: Running mean, updated in place, shape ``[C]``; None if not tracked.
        running_var: Running variance, updated in place, shape ``[C]``; None if not tracked.
        weight: Scale, shape ``[C]``, or None.
        bias: Shift, shape ``[C]``, or None.
        momentum: Weight of this batch in the running statistics.
        eps: Added to the variance.
        group: Ranks whose samples are normalised together.
        counts: Whether this rank's samples enter the statistics; they are normalised in any case.

    Raises:
        ValueError: If ``input`` has fewer than 2 dims, or all ranks together have at most one value per channel.
    """
    if input.dim() < 2:
        raise ValueError(f"Batch normalisation expects at least 2 dims (N, C, ...), got shape {tuple(input.shape)}.")
    output, mean, variance, count = _Normalize.apply(input, weight, bias, eps, group, counts)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased = variance * (count / (count - 1).clamp(min=1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return output  # type: ignore[no-any-return]


class _SumOverGroup(torch.autograd.Function):
    """Sum over a group, differentiable any number of times: each rank's part affects the losses of all ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _SumOverGroup.apply(grad, ctx.group), None


class _Normalize(torch.autograd.Function):
    """Batch normalisation with statistics and their gradients summed over a group; differentiable twice."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: dist.ProcessGroup,
        counts_here: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        channels = x.shape[1]
        own_count = x.numel() // channels if counts_here else 0
        # Merge each rank's mean and M2 (Chan et al.), which avoids the cancellation of E[x^2] - E[x]^2.
        rank_mean, rank_m2 = wide.new_zeros(2, channels)
        if own_count:
            rank_mean = wide.mean(dims)
            rank_m2 = (wide - rank_mean.view(shape)).square().sum(dims)
        packed = torch.cat([rank_mean, rank_m2, wide.new_full((1,), own_count)])
        gathered = [torch.empty_like(packed) for _ in range(group.size())]
        dist.all_gather(gathered, packed, group=group)
        means, m2s, counts = torch.stack(gathered).split([channels, channels, 1], dim=1)
        count = counts.sum()
        # The total is read only if this rank has at most one value: reading it synchronizes with the device.
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
        ctx.group, ctx.dims, ctx.shape, ctx.eps = group, dims, shape, eps
        ctx.counts_here = counts_here
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inv_std, count = ctx.saved_tensors
        wide, grad = x.to(mean.dtype), grad.to(mean.dtype)
        if torch.is_grad_enabled():
            # create_graph: what is saved has no graph. The values stay, as the first moment around the mean is zero.
            centered = wide - mean.view(ctx.shape)
            moments = torch.cat([centered.sum(ctx.dims), centered.square().sum(ctx.dims)])
            moments = moments if ctx.counts_here else 0.0 * moments
            first, second = (_SumOverGroup.apply(moments, ctx.group) / count).chunk(2)
            mean, inv_std = mean + first, torch.rsqrt(second - first.square() + ctx.eps)
        normalized = (wide - mean.view(ctx.shape)) * inv_std.view(ctx.shape)
        grad_bias = grad.sum(ctx.dims)
        grad_weight = (grad * normalized).sum(ctx.dims)
        # Parameter gradients stay local: the data engine averages them like all others.
        packed = _SumOverGroup.apply(torch.cat([grad_bias, grad_weight]), ctx.group)
        sum_grad, sum_grad_normalized = (packed / count).chunk(2)
        scale = inv_std if weight is None else inv_std * weight
        of_statistics = sum_grad.view(ctx.shape) + normalized * sum_grad_normalized.view(ctx.shape)
        if not ctx.counts_here:
            # Not left out: all ranks need the same graph, whose backward is collective.
            of_statistics = 0.0 * of_statistics
        grad_x = scale.view(ctx.shape) * (grad - of_statistics)
        return (
            grad_x.to(x.dtype),
            None if weight is None else grad_weight.to(weight.dtype),
            grad_bias.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None,
            None,
            None,
            None,
        )


def convert(module: nn.Module, *, group: dist.ProcessGroup, batch: CurrentBatch | None = None) -> nn.Module:
    """Synchronize the statistics of every batch norm layer in ``module`` over ``group``. In place, not collective.

    The layer objects stay the same, so that shared layers and references to them remain valid; only their class is
    extended, until :func:`revert`. Does nothing for a group of one rank. ``batch`` says whether this rank's samples
    count; they always do if it is None.
    """
    if group.size() == 1:
        return module
    batch = batch or CurrentBatch()
    extended: dict[type[BatchNorm], type[BatchNorm]] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, BatchNorm) and not isinstance(layer, nn.SyncBatchNorm):
            if not isinstance(layer, _SyncedBatchNorm):
                plain = type(layer)
                if plain not in extended:
                    extended[plain] = _extended(plain, group, batch)
                layer.__class__ = extended[plain]
            layer.__dict__["synchronized_as"] = name
    return module


def is_converted(layer: nn.Module) -> bool:
    """Return whether a layer's class was extended by :func:`convert`."""
    return isinstance(layer, _SyncedBatchNorm)


def synchronized_statistics(module: nn.Module) -> Iterator[Tensor]:
    """Iterate over the running statistics of converted layers, which are the same on all ranks."""
    for layer in module.modules():
        if isinstance(layer, _SyncedBatchNorm):
            yield from (b for b in (layer.running_mean, layer.running_var, layer.num_batches_tracked) if b is not None)


def revert(module: nn.Module) -> nn.Module:
    """Restore the layers' original classes, to undo :func:`convert`."""
    for layer in module.modules():
        if isinstance(layer, _SyncedBatchNorm):
            layer.__dict__.pop("synchronized_as", None)
            # A class that was extended again since then is kept; without a name it behaves like the plain class.
            if "plain" in type(layer).__dict__:
                layer.__class__ = layer.plain  # type: ignore[assignment]
    return module


def _extended(plain: type[BatchNorm], group: dist.ProcessGroup, batch: CurrentBatch) -> type[BatchNorm]:
    base = _SyncedBatchNorm if plain.forward is BatchNorm.forward else _SyncedCustomBatchNorm
    names = {"group": group, "batch": batch, "plain": plain}
    names |= {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    return type(plain.__name__, (base, plain), names)
