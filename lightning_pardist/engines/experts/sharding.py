"""Sharding of experts over the ranks that share them: full only while their layer computes.

[Note: why not fully_shard]
``fully_shard`` gathers a module's parameters when the module is called. With experts in a list, each rank calls those
that its own tokens are routed to, so ranks would deadlock in each other's gathers; all ranks take part in a layer's
exchange of tokens, not in the call of each module. So a layer's experts are gathered in its exchange, in one message,
freed once its results are computed, and gathered again when backward reaches these (ZeRO, arXiv 1910.02054, stage 3).
Two nodes of the autograd graph do this, one before and one after the experts' computation: ranks that run the same
layers in the same order issue the same order of collectives in backward, whatever their tokens are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_pardist.collectives import as_bytes, reduce_scatter_flat
from lightning_pardist.compat.autograd import current_backward
from lightning_pardist.compat.modules import own_parameters
from lightning_pardist.engines.common.slice_exchange import exchanges_directly, scatter_slices
from lightning_pardist.engines.experts.layer_weights import (
    LayerWeights,
    Place,
    with_expert_parameters,
    without_reentrant,
)
from lightning_pardist.engines.tensor.regions import PlainFunction
from lightning_pardist.local_tensors import local_shard, wrap_like

#: Mesh axis over which experts are sharded; over the others they are replicated.
SHARD_AXIS = "data_shard"
#: First dim along which stacked parameters may be sharded: dim 0, of experts, is already sharded over the expert axis.
STACKED_DIM = 1


@dataclass(frozen=True)
class ExpertSharding:
    """Sharding of experts over the ranks that hold the same ones.

    Attributes:
        mesh: These ranks, one axis or several, with the names of the job's mesh; None for a single rank.
        with_experts: The same mesh with the expert axis as its last axis.
        average_over: Number of ranks by which all gradients are divided, including those with other experts.
        compute_dtype: Dtype in which experts are gathered and compute; their own if None.
        reduce_dtype: Dtype in which gradients are reduced; the compute dtype if None.
        keep: Whether they stay gathered from a layer's forward to the end of its backward.
        copies: Replicas that are in no mesh, whose gradients are summed as well.
    """

    mesh: DeviceMesh | None
    with_experts: DeviceMesh
    average_over: int
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    keep: bool = False
    copies: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Number of shards."""
        return 1 if self.shard_group is None else self.shard_group.size()

    @property
    def rank(self) -> int:
        """Rank in the shard group."""
        return 0 if self.shard_group is None else self.shard_group.rank()

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """Group of the ranks that hold different shards; None if experts are not sharded."""
        return next(iter(self._groups(True)), None)

    @property
    def replicate_groups(self) -> list[dist.ProcessGroup]:
        """Groups of the ranks that hold the same shards, one for each axis."""
        return [*self._groups(False), *([] if self.copies is None else [self.copies])]

    def _groups(self, shards: bool) -> list[dist.ProcessGroup]:
        if self.mesh is None:
            return []
        names = enumerate(_names(self.mesh))
        return [self.mesh.get_group(axis) for axis, name in names if (name == SHARD_AXIS) == shards]

    def listed(self, local: Tensor) -> Tensor:
        """Return this rank's shard of a parameter of a local expert. Not collective."""
        dim = None if self.mesh is None else shard_dim(local, self.size)
        if self.mesh is None or dim is None:
            return local
        placements: list[Placement] = [Shard(dim) if name == SHARD_AXIS else Replicate() for name in _names(self.mesh)]
        return _around(self.piece(local, dim), self.mesh, placements, like=local)

    def stacked(self, whole: Tensor, local: Tensor) -> Tensor:
        """Return this rank's shard of a stacked parameter, as a ``DTensor`` of the full shape. Not collective.

        Args:
            whole: Parameter of all experts.
            local: Slice of this rank's experts.
        """
        names = _names(self.with_experts)[:-1]
        dim = None if self.mesh is None else shard_dim(local, self.size, STACKED_DIM)
        placements: list[Placement] = [
            Shard(dim) if name == SHARD_AXIS and dim is not None else Replicate() for name in names
        ]
        return _around(self.piece(local, dim), self.with_experts, [*placements, Shard(0)], like=whole)

    def piece(self, local: Tensor, dim: int | None) -> Tensor:
        """Return a contiguous copy of this rank's slice of a tensor along ``dim``; a full copy if ``dim`` is None."""
        if dim is None:
            return local.detach().clone(memory_format=torch.contiguous_format)
        step = -(-local.size(dim) // self.size)
        start = min(self.rank * step, local.size(dim))
        rows = local.detach().narrow(dim, start, min(step, local.size(dim) - start))
        return rows.clone(memory_format=torch.contiguous_format)


def shard_dim(local: Tensor, size: int, first_dim: int = 0) -> int | None:
    """Return the dim along which to shard an expert's parameter: the first that divides, else the longest, if any."""
    dims = range(first_dim, local.dim())
    if not dims or not local.numel():
        return None
    return next((dim for dim in dims if local.size(dim) % size == 0), max(dims, key=local.size))


class ShardedWeights(LayerWeights):
    """Expert parameters that are sharded over several ranks.

    Args:
        places: Owner and name of each parameter.
        sharding: How they are sharded.
        shapes: Unsharded shape of each on a rank of the expert group.
        first_dim: First dim that may be sharded.
    """

    def __init__(
        self,
        places: Sequence[Place],
        sharding: ExpertSharding,
        shapes: Sequence[torch.Size],
        *,
        first_dim: int = 0,
    ) -> None:
        super().__init__(places)
        self.sharding = sharding
        self._shapes = list(shapes)
        whole = [torch.empty(shape, device="meta") for shape in shapes]
        alone = sharding.mesh is None
        self._dims = [None if alone else shard_dim(each, sharding.size, first_dim) for each in whole]
        self._dtypes = [own_parameters(owner)[name].dtype for owner, name in self.places]  # type: ignore[union-attr]

    def full_values(self) -> list[Tensor]:
        """Return the values gathered over the ranks that share them."""
        parameters: list[Any] = [own_parameters(owner)[name] for owner, name in self.places]
        # Not by to_local(), which in torch 2.11 replaces a missing gradient by zeros.
        return list(_Taken.run(self, *parameters))

    def release_after(self, result: Tensor, values: Sequence[Tensor]) -> Tensor:
        """Free the values until backward reaches the result."""
        if not torch.is_grad_enabled():
            return result
        result = _Returned.run(self, result, *values)
        # Values recomputed by a checkpointed block in backward are needed at once.
        if self.sharding.size > 1 and not self.sharding.keep and current_backward() is None:
            for value in values:
                value.untyped_storage().resize_(0)
        return result

    @contextmanager
    def in_modules(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Context in which the values replace the parameters."""
        with without_reentrant(), with_expert_parameters(self.places, values):
            yield

    @contextmanager
    def without_values(self) -> Iterator[None]:
        """Context in which zeros replace the parameters."""
        like = [local_shard(own_parameters(owner)[name]) for owner, name in self.places]  # type: ignore[arg-type]
        zeros = [
            each.new_zeros(shape, dtype=self._computes(i))
            for i, (each, shape) in enumerate(zip(like, self._shapes, strict=True))
        ]
        with self.in_modules(zeros):
            yield

    def _computes(self, i: int) -> torch.dtype:
        own = self._dtypes[i]
        wanted = self.sharding.compute_dtype
        return wanted if wanted is not None and own.is_floating_point else own

    def _sums(self, i: int) -> torch.dtype:
        return self.sharding.reduce_dtype or self._computes(i)

    def _piece_shape(self, i: int) -> list[int]:
        """Return the shape of a shard, padded to the length of the first rank's."""
        shape, dim = list(self._shapes[i]), self._dims[i]
        if dim is not None:
            shape[dim] = -(-shape[dim] // self.sharding.size)
        return shape

    # --- gather ---------------------------------------------------------------------------------------------------

    def gathered(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """All-gather full values, each in its own memory if there are shards. Collective over the shard group."""
        group = self.sharding.shard_group
        cast = [shard.detach().to(self._computes(i)) for i, shard in enumerate(shards)]
        if group is None:
            return cast
        sent = [self._padded(i, each) for i, each in enumerate(cast) if self._dims[i] is not None]
        packed = torch.cat([as_bytes(each) for each in sent]) if sent else torch.empty(0, dtype=torch.uint8)
        received = packed.new_empty((group.size(), packed.numel()))
        if sent:
            dist.all_gather(list(received.unbind()), packed, group=group)
        whole, at = [], 0
        for i, each in enumerate(cast):
            dim, shape = self._dims[i], self._piece_shape(i)
            if dim is None:
                whole.append(each.clone())
                continue
            nbytes = torch.Size(shape).numel() * each.element_size()
            pieces = [row[at : at + nbytes].clone().view(each.dtype).view(shape) for row in received]
            whole.append(torch.cat(pieces, dim).narrow(dim, 0, self._shapes[i][dim]).contiguous())
            at += nbytes
        return whole

    def _padded(self, i: int, shard: Tensor) -> Tensor:
        shape, dim = self._piece_shape(i), self._dims[i]
        if list(shard.shape) == shape or dim is None:
            return shard.contiguous()
        padded = shard.new_zeros(shape)
        padded.narrow(dim, 0, shard.size(dim)).copy_(shard)
        return padded

    @torch.no_grad()
    def refill(self, values: Sequence[Tensor]) -> None:
        """Gather freed values again, into their own memory. Collective over the shard group if they were freed."""
        if self.sharding.size == 1 or all(value.untyped_storage().size() for value in values if value.numel()):
            return
        for value, fresh in zip(values, self.gathered(super().full_values()), strict=True):
            value.untyped_storage().resize_(fresh.untyped_storage().size())
            # By .data, which has its own version counter: backward must not detect a change of saved tensors.
            value.data.copy_(fresh)

    # --- gradients ------------------------------------------------------------------------------------------------

    def reduced(self, gradients: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
        """Return this rank's shards of the mean gradients. Collective over the ranks that share the parameters.

        Args:
            gradients: Gradients of full values, summed over the tokens of the expert group.
            wanted: Whether each gradient is needed, the same on all ranks.

        Returns:
            None for parameters for which no rank has a gradient.
        """
        numbers = [i for i, asked in enumerate(wanted) if asked]
        used = self._used_anywhere(torch.tensor([gradients[i] is not None for i in numbers], dtype=torch.int32))
        result: list[Tensor | None] = [None] * len(gradients)
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, any_has in zip(numbers, used, strict=True):
            if any_has:
                by_dtype.setdefault(self._sums(i), []).append(i)
        for dtype, members in by_dtype.items():
            flat = torch.cat([self._slices(i, gradients[i], dtype) for i in members], dim=1)
            own = self._summed(flat)
            own.div_(self.sharding.average_over)
            for i, part in zip(members, own.split([self._slice_numel(i) for i in members]), strict=True):
                result[i] = self._trimmed(i, part.view(self._piece_shape(i)))
        return result

    def _used_anywhere(self, flags: Tensor) -> list[int]:
        for group in (self.sharding.shard_group, *self.sharding.replicate_groups):
            if group is not None and flags.numel():
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        found: list[int] = flags.tolist()
        return found

    def _slice_numel(self, i: int) -> int:
        return torch.Size(self._piece_shape(i)).numel()

    def _slices(self, i: int, gradient: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return each rank's slice of a gradient, shape ``[ranks, slice]``; all of it if the parameter is unsharded."""
        size, dim = self.sharding.size, self._dims[i]
        if gradient is None:
            like = local_shard(own_parameters(self.places[i][0])[self.places[i][1]])  # type: ignore[arg-type]
            return torch.zeros((size, self._slice_numel(i)), dtype=dtype, device=like.device)
        gradient = gradient.to(dtype)
        if dim is None:
            return gradient.reshape(1, -1).expand(size, -1)
        step = self._piece_shape(i)[dim]
        if gradient.size(dim) != step * size:
            shape = list(gradient.shape)
            shape[dim] = step * size
            padded = gradient.new_zeros(shape)
            padded.narrow(dim, 0, gradient.size(dim)).copy_(gradient)
            gradient = padded
        slices: Tensor = gradient.unflatten(dim, (size, step))
        return slices.movedim(dim, 0).reshape(size, -1)

    def _summed(self, flat: Tensor) -> Tensor:
        group = self.sharding.shard_group
        flat = flat.contiguous()
        own = flat.new_empty(flat.shape[1])
        if group is None:
            own.copy_(flat[0])
        elif exchanges_directly(flat, group):
            scatter_slices(flat.view(-1), group=group).finish(own)
        else:
            reduce_scatter_flat(own, flat.view(-1), group=group)
        for copies in self.sharding.replicate_groups:
            dist.all_reduce(own, group=copies)
        return own

    def _trimmed(self, i: int, part: Tensor) -> Tensor:
        dim = self._dims[i]
        if dim is not None:
            step, length = part.size(dim), self._shapes[i][dim]
            start = min(self.sharding.rank * step, length)
            part = part.narrow(dim, 0, min(step, length - start))
        # Copy, because a view would keep the buffer of all gradients alive.
        return part.to(self._dtypes[i], copy=True).contiguous()


class _Taken(PlainFunction):
    @staticmethod
    def forward(ctx: Any, weights: ShardedWeights, *parameters: Tensor) -> tuple[Tensor, ...]:
        shards = [local_shard(parameter) for parameter in parameters]
        ctx.weights, ctx.parameters = weights, parameters
        ctx.set_materialize_grads(False)
        # For checkpointed blocks, see exchange.py.
        ctx.save_for_backward(shards[0].new_empty(0))
        whole = weights.gathered(shards)
        return tuple(
            value.view_as(value) if value.data_ptr() == shard.data_ptr() else value
            for value, shard in zip(whole, shards, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        _ = ctx.saved_tensors
        own = ctx.weights.reduced(gradients, ctx.needs_input_grad[1:])
        pairs = zip(own, ctx.parameters, strict=True)
        return None, *(None if grad is None else wrap_like(grad, parameter) for grad, parameter in pairs)


class _Returned(PlainFunction):
    @staticmethod
    def forward(ctx: Any, weights: ShardedWeights, result: Tensor, *values: Tensor) -> Tensor:
        ctx.weights, ctx.count = weights, len(values)
        # These are the tensors that the layer's own nodes have saved, also if the forward has been recomputed.
        ctx.save_for_backward(*values)
        return result.view_as(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.weights.refill(ctx.saved_tensors)
        return None, gradient, *([None] * ctx.count)


def _around(piece: Tensor, mesh: DeviceMesh, placements: list[Placement], *, like: Tensor) -> DTensor:
    stride = torch.empty(like.shape, device="meta").stride()
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=like.shape, stride=stride)


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()
