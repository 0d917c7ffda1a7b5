"""Autograd functions between whole and sharded tensors: copy, reduce, scatter and gather regions.

They are Megatron-LM's conjugate pairs (arXiv 1909.08053, section 3): what is an identity forward is an all-reduce
backward and the other way round, so that the gradient of a whole tensor is equal on all ranks and counted once.

=============  =====================  ====================================
name           forward                backward
=============  =====================  ====================================
``copy``       identity               all-reduce (each rank has a part)
``reduce``     all-reduce             identity
``scatter``    slice                  all-gather
``gather``     all-gather             slice
=============  =====================  ====================================
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_pardist.collectives import all_gather_flat, as_bytes
from lightning_pardist.compat.process_groups import device_types
from lightning_pardist.compat.tensors import is_unshared, is_view, version_of
from lightning_pardist.engines.tensor.layout import Layout

#: How many recently entered tensors are remembered: q, k and v of one input share one all-reduce of its gradient.
_REMEMBERED = 4


class TensorGroup:
    """The ranks over which tensors are split, and a count of what they sent.

    Args:
        mesh: One-dimensional mesh of the tensor ranks.

    Raises:
        ValueError: If the mesh has more than one dim.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.ndim != 1:
            raise ValueError(
                f"The tensor engine takes a mesh of one dim and was given one of {mesh.ndim}"
                f' ({mesh.mesh_dim_names}). Pass mesh["tensor_parallel"].'
            )
        self.mesh = mesh
        self.process_group = mesh.get_group()
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        #: Collectives issued since :meth:`reset`, by kind, and the bytes of the tensors they were called with.
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._entered: OrderedDict[tuple[int, int], tuple[weakref.ref[Tensor], Tensor]] = OrderedDict()

    def reset(self) -> None:
        """Forget the counts."""
        self.calls.clear()
        self.bytes.clear()

    def forget(self) -> None:
        """Drop tensors remembered for sharing an all-reduce. Called at both ends of a step."""
        self._entered.clear()

    def all_reduce_(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce in place over the tensor group. Collective."""
        self._count("all_reduce", tensor)
        dist.all_reduce(tensor, op=op, group=self.process_group)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's ``tensor``, in the order of ranks. Collective; shapes are equal on all ranks."""
        self._count("all_gather", tensor)
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather([as_bytes(part) for part in parts], as_bytes(tensor), group=self.process_group)
        return parts

    def reduce_scatter(self, tensor: Tensor, layout: Layout) -> Tensor:
        """This rank's part of the sum over ranks. Collective."""
        self._count("reduce_scatter", tensor)
        parts = [layout.take(tensor, rank, self.size).contiguous() for rank in range(self.size)]
        if dist.get_backend(self.process_group) == "nccl":
            out = torch.empty_like(parts[0])
            dist.reduce_scatter(out, parts, group=self.process_group)
            return out
        # gloo's own reduce-scatter sends as much as an all-reduce; an all-to-all and a sum send half.
        received = torch.empty((self.size, *parts[0].shape), dtype=tensor.dtype, device=tensor.device)
        dist.all_to_all_single(received, torch.stack(parts), group=self.process_group)
        return received.sum(0)

    def exchange(self, *values: int) -> Tensor:
        """Every rank's numbers, shape ``[size, len(values)]``, int64 on the host. Collective; not counted."""
        known: Any = device_types(self.process_group)
        device = torch.device("cpu") if torch.device("cpu") in known else torch.device(self.mesh.device_type)
        mine = torch.tensor(values, dtype=torch.int64, device=device)
        everyone = mine.new_empty(self.size * len(values))
        all_gather_flat(everyone, mine, group=self.process_group)
        return everyone.view(self.size, -1).cpu()

    def copy(self, tensor: Tensor) -> Tensor:
        """A whole tensor into a computation that is split: the gradient comes back in parts and is summed."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        key = (id(tensor), version_of(tensor))
        found = self._entered.get(key)
        if found is not None and found[0]() is tensor:
            return found[1]
        entered: Tensor = _Copy.run(tensor, self)
        self._entered[key] = (weakref.ref(tensor), entered)
        while len(self._entered) > _REMEMBERED:
            self._entered.popitem(last=False)
        return entered

    def reduce(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' parts, as a whole tensor. ``partial`` may be overwritten."""
        result: Tensor = _Reduce.run(partial, self)
        return result

    def scatter(self, tensor: Tensor, layout: Layout) -> Tensor:
        """This rank's part of a whole tensor."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return layout.take(tensor, self.rank, self.size)
        result: Tensor = _Scatter.run(tensor, layout, self)
        return result

    def gather(self, local: Tensor, layout: Layout) -> Tensor:
        """The whole tensor of which every rank has a part."""
        result: Tensor = _Gather.run(local, layout, self)
        return result

    def gather_into_split(self, local: Tensor, layout: Layout) -> Tensor:
        """As ``copy(gather(local))`` with half the traffic backward: a reduce-scatter in place of an all-reduce."""
        result: Tensor = _GatherCopy.run(local, layout, self)
        return result

    def reduce_into_split(self, partial: Tensor, layout: Layout) -> Tensor:
        """As ``take(reduce(partial))`` with half the traffic forward: a reduce-scatter."""
        result: Tensor = _ReduceScatter.run(partial, layout, self)
        return result

    def _count(self, kind: str, tensor: Tensor) -> None:
        self.calls[kind] += 1
        self.bytes[kind] += tensor.numel() * tensor.element_size()


class PlainFunction(torch.autograd.Function):
    """A function of the engine's own: without the detour that makes users' functions work on split tensors.

    Gradients of gradients: the backward of one of a pair is the other, which has a backward again.
    """

    @classmethod
    def run(cls, *args: Any) -> Any:
        """As ``apply``, on plain tensors alone."""
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


class _Copy(PlainFunction):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0]
        if torch.is_grad_enabled():
            return _Reduce.run(grad.clone(), ctx.group), None
        if not grad.is_contiguous() or not is_unshared(grad):
            grad = grad.clone(memory_format=torch.contiguous_format)
        return ctx.group.all_reduce_(grad), None


class _Reduce(PlainFunction):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        if is_view(partial) or not partial.is_contiguous():
            return group.all_reduce_(partial.clone(memory_format=torch.contiguous_format))
        # In place: the operators that end in a sum over ranks do not keep their output for backward.
        ctx.mark_dirty(partial)
        return group.all_reduce_(partial)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Copy.run(grads[0], ctx.group) if torch.is_grad_enabled() else grads[0], None


class _Scatter(PlainFunction):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, layout: Layout, group: TensorGroup) -> Tensor:
        ctx.layout, ctx.group = layout, group
        return layout.take(tensor, group.rank, group.size).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            return _Gather.run(grads[0], ctx.layout, ctx.group), None, None
        return ctx.layout.join(ctx.group.all_gather(grads[0])), None, None


class _Gather(PlainFunction):
    @staticmethod
    def forward(ctx: Any, local: Tensor, layout: Layout, group: TensorGroup) -> Tensor:
        ctx.layout, ctx.group = layout, group
        return layout.join(group.all_gather(local.detach()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            return _Scatter.run(grads[0], ctx.layout, ctx.group), None, None
        return ctx.layout.take(grads[0], ctx.group.rank, ctx.group.size), None, None


class _GatherCopy(PlainFunction):
    @staticmethod
    def forward(ctx: Any, local: Tensor, layout: Layout, group: TensorGroup) -> Tensor:
        ctx.layout, ctx.group = layout, group
        return layout.join(group.all_gather(local.detach()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            return _ReduceScatter.run(grads[0], ctx.layout, ctx.group), None, None
        return ctx.group.reduce_scatter(grads[0], ctx.layout), None, None


class _ReduceScatter(PlainFunction):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, layout: Layout, group: TensorGroup) -> Tensor:
        ctx.layout, ctx.group = layout, group
        return group.reduce_scatter(partial.detach(), layout)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            return _GatherCopy.run(grads[0], ctx.layout, ctx.group), None, None
        return ctx.layout.join(ctx.group.all_gather(grads[0])), None, None
