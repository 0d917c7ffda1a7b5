"""Batch normalisation over the samples of all ranks, on CPU as well as on GPU (torch's own refuses CPU tensors)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class SyncBatchNorm(_BatchNorm):
    """Drop-in for ``BatchNorm1d/2d/3d``: statistics over the batches of all ranks of a group, in training.

    Equals one process' batch normalisation of the concatenated batch, also where ranks hold different numbers of
    samples. Collective over ``group`` in training: one reduction forward and one backward. Parameters, buffers and
    their names are those of the layer it replaces.
    """

    group: dist.ProcessGroup | None = None

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm expects at least 2 dims (N, C, ...), got shape {tuple(input.shape)}.")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input``, shape ``[N, C, ...]``; the same shape and dtype come back."""
        self._check_input_dim(input)
        use_batch = self.training or self.running_mean is None
        if not use_batch or not self.training or self.group is None or self.group.size() == 1:
            plain: Tensor = super().forward(input)
            return plain
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        output, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps, self.group)
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            momentum = self.momentum
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked or 1)
            with torch.no_grad():
                unbiased = variance * (count / (count - 1).clamp(min=1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
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
        local = wide.new_tensor(x.numel() // channels)
        # Mean and M2 of each rank are merged (Chan et al.), which loses no digits where E[x^2] - E[x]^2 would.
        rank_mean = wide.mean(dims) if x.numel() else wide.new_zeros(channels)
        rank_m2 = (wide - rank_mean.view(shape)).square().sum(dims)
        packed = torch.cat([rank_mean, rank_m2, local.reshape(1)])
        gathered = [torch.empty_like(packed) for _ in range(group.size())]
        dist.all_gather(gathered, packed, group=group)
        means, m2s, counts = torch.stack(gathered).split([channels, channels, 1], dim=1)
        count = counts.sum()
        if count <= 1:
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
    """Let every ``BatchNorm`` layer in ``module`` take its statistics over ``group``. In place, not collective.

    The layers stay the objects they are, so that shared layers stay shared and references to them stay right; only
    their class changes until :func:`revert`.
    """
    for layer in module.modules():
        if isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm | nn.SyncBatchNorm):
            layer.__dict__["_original_class"] = type(layer)
            layer.__dict__["group"] = group
            layer.__class__ = SyncBatchNorm
    return module


def revert(module: nn.Module) -> nn.Module:
    """Undo :func:`convert`."""
    for layer in module.modules():
        if isinstance(layer, SyncBatchNorm):
            layer.__dict__.pop("group")
            layer.__class__ = layer.__dict__.pop("_original_class")
    return module
