"""Autograd functions between replicated and sharded tensors: copy, reduce, scatter and gather regions.

They are Megatron-LM's conjugate pairs (arXiv 1909.08053, section 3): an identity in forward is an all-reduce in
backward and vice versa, so that the gradient of a replicated tensor is equal on all ranks and counted once.

=============  =====================  ====================================
name           forward                backward
=============  =====================  ====================================
``copy``       identity               all-reduce (gradients are partial)
``reduce``     all-reduce             identity
``scatter``    slice                  all-gather
``gather``     all-gather             slice
``move``       all-to-all             all-to-all
``parameter``  identity               identity, to be averaged over ranks
=============  =====================  ====================================
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_pardist.collectives import all_gather_flat, as_bytes, table_device
from lightning_pardist.compat.fake_group import backend_on
from lightning_pardist.compat.patches import apply_directly
from lightning_pardist.compat.tensors import gradient_hooks_of, is_unshared, is_view, version_of
from lightning_pardist.engines.tensor.layout import Layout

#: Number of recently entered tensors that are cached: q, k and v of one input share one all-reduce of its gradient.
_REMEMBERED = 4


class TensorGroup:
    """The ranks over which tensors are sharded, with counts of the collectives.

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
        #: Number of collectives since :meth:`reset`, by kind, and the bytes of the tensors they were called with.
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        #: Whether gradients of replicated parameters are summed in backward instead of being averaged by the data axis.
        self.sums_at_once = False
        #: Operators that have drawn rank-specific random numbers for sharded tensors.
        self.drawn: set[str] = set()
        self._entered: dict[tuple[int, int], tuple[int, weakref.ref[Tensor], Tensor]] = {}
        self._entries = 0

    def reset(self) -> None:
        """Reset the counts."""
        self.calls.clear()
        self.bytes.clear()

    def forget(self) -> None:
        """Clear the cache of entered tensors. Called at both ends of a step."""
        self._entered.clear()

    @contextmanager
    def summing(self, *, at_once: bool) -> Iterator[None]:
        """Context manager around a run of the autograd engine: whether :meth:`parameter` sums gradients at once."""
        before, self.sums_at_once = self.sums_at_once, at_once
        try:
            yield
        finally:
            self.sums_at_once = before

    def all_reduce_(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce in place over the tensor group. Collective."""
        self._count("all_reduce", tensor)
        dist.all_reduce(tensor, op=op, group=self.process_group)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's ``tensor`` in rank order. Collective; shapes are equal on all ranks."""
        self._count("all_gather", tensor)
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather([as_bytes(part) for part in parts], as_bytes(tensor), group=self.process_group)
        return parts

    def assemble(self, local: Tensor, layout: Layout) -> Tensor:
        """All-gather the shards into the full tensor, without autograd. Collective."""
        if layout.ends is None:
            return layout.join(self.all_gather(local))
        whole = layout.global_shape(local.shape, self.size)
        shapes = [layout.local_shape(whole, self.size, rank) for rank in range(self.size)]
        message = local.new_zeros(max(map(math.prod, shapes)))
        message[: local.numel()] = local.reshape(-1)
        parts = self.all_gather(message)
        return layout.join([part[: math.prod(shape)].view(shape) for part, shape in zip(parts, shapes, strict=True)])

    def move_parts(self, local: Tensor, source: Layout, target: Layout) -> Tensor:
        """Redistribute a shard from layout ``source`` to layout ``target``, without autograd. Collective."""
        if source.dim == target.dim:
            return target.take(self.assemble(local, source), self.rank, self.size).contiguous()
        whole = source.global_shape(local.shape, self.size)
        mine = target.local_shape(whole, self.size, self.rank)
        extents = [source.local_shape(whole, self.size, rank)[source.dim] for rank in range(self.size)]
        shapes = [(*mine[: source.dim], extent, *mine[source.dim + 1 :]) for extent in extents]
        pieces = [target.take(local, rank, self.size).reshape(-1) for rank in range(self.size)]
        sizes = list(map(math.prod, shapes))
        received = local.new_empty(sum(sizes))
        message = torch.cat(pieces)
        self._count("all_to_all", message)
        splits = [piece.numel() for piece in pieces]
        width = local.element_size()
        dist.all_to_all_single(
            as_bytes(received),
            as_bytes(message),
            [size * width for size in sizes],
            [split * width for split in splits],
            group=self.process_group,
        )
        parts = [part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]
        return source.join(parts)

    def fetch_rows(self, local: Tensor, layout: Layout, wanted: Sequence[tuple[int, int]]) -> Tensor:
        """Return the rows of a sharded tensor that this rank needs from any rank, without autograd. Collective.

        Args:
            local: This rank's shard.
            layout: Its layout, in one segment.
            wanted: First row and end (exclusive) of the rows that each rank needs, in rank order.
        """
        runs = self._runs(local, layout)
        outgoing = [_overlap(runs[self.rank], other) for other in wanted]
        incoming = [_overlap(run, wanted[self.rank]) for run in runs]
        start = runs[self.rank][0]
        pieces = [local.narrow(layout.dim, first - start if count else 0, count) for first, count in outgoing]
        shapes = [(*local.shape[: layout.dim], count, *local.shape[layout.dim + 1 :]) for _, count in incoming]
        return torch.cat(self._exchange_pieces(pieces, shapes), layout.dim)

    def return_rows(self, rows: Tensor, layout: Layout, wanted: Sequence[tuple[int, int]], like: Tensor) -> Tensor:
        """Sum every rank's copies of this rank's rows: the adjoint of :meth:`fetch_rows`. Collective.

        Args:
            rows: The rows that this rank fetched (their gradients in backward).
            layout: Layout of the sharded tensor.
            wanted: As for :meth:`fetch_rows`.
            like: A tensor with the shape of this rank's shard.
        """
        runs = self._runs(like, layout)
        outgoing = [_overlap(run, wanted[self.rank]) for run in runs]
        incoming = [_overlap(runs[self.rank], other) for other in wanted]
        first_wanted, start = wanted[self.rank][0], runs[self.rank][0]
        pieces = [rows.narrow(layout.dim, first - first_wanted if count else 0, count) for first, count in outgoing]
        shapes = [(*like.shape[: layout.dim], count, *like.shape[layout.dim + 1 :]) for _, count in incoming]
        result = rows.new_zeros(like.shape)
        for (first, count), piece in zip(incoming, self._exchange_pieces(pieces, shapes), strict=True):
            if count:
                result.narrow(layout.dim, first - start, count).add_(piece)
        return result

    def _runs(self, local: Tensor, layout: Layout) -> list[tuple[int, int]]:
        extent = layout.global_shape(local.shape, self.size)[layout.dim]
        return [layout.run(extent, rank, self.size) for rank in range(self.size)]

    def _exchange_pieces(self, pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Send one piece to each rank and receive one from each; the own piece is not sent."""
        sent = [pieces[0].new_empty(0) if rank == self.rank else p.reshape(-1) for rank, p in enumerate(pieces)]
        sizes = [0 if rank == self.rank else math.prod(shape) for rank, shape in enumerate(shapes)]
        message, received = torch.cat(sent), pieces[0].new_empty(sum(sizes))
        self._count("all_to_all", message)
        width = message.element_size()
        dist.all_to_all_single(
            as_bytes(received),
            as_bytes(message),
            [size * width for size in sizes],
            [piece.numel() * width for piece in sent],
            group=self.process_group,
        )
        found = received.split(sizes)
        return [pieces[r] if r == self.rank else found[r].view(tuple(shape)) for r, shape in enumerate(shapes)]

    def reduce_scatter(self, tensor: Tensor, layout: Layout) -> Tensor:
        """Return this rank's shard of the sum over ranks. Collective."""
        self._count("reduce_scatter", tensor)
        parts = [layout.take(tensor, rank, self.size).contiguous() for rank in range(self.size)]
        if layout.ends is not None:
            sizes = [part.numel() for part in parts]
            mine = parts[self.rank]
            flat = tensor.new_empty(self.size * mine.numel())
            message = torch.cat([part.view(-1) for part in parts])
            dist.all_to_all_single(flat, message, [mine.numel()] * self.size, sizes, group=self.process_group)
            return flat.view(self.size, *mine.shape).sum(0)
        if backend_on(self.process_group, tensor.device) not in (dist.Backend.GLOO, "fake"):
            out = torch.empty_like(parts[0])
            dist.reduce_scatter(out, parts, group=self.process_group)
            return out
        # gloo's reduce-scatter sends as much as an all-reduce; an all-to-all and a local sum send half.
        received = torch.empty((self.size, *parts[0].shape), dtype=tensor.dtype, device=tensor.device)
        dist.all_to_all_single(received, torch.stack(parts), group=self.process_group)
        return received.sum(0)

    def exchange(self, *values: int) -> Tensor:
        """All-gather integers; shape ``[size, len(values)]``, int64 on the host. Collective; not counted."""
        device = table_device(self.process_group, torch.device(self.mesh.device_type))
        mine = torch.tensor(values, dtype=torch.int64, device=device)
        everyone = mine.new_empty(self.size * len(values))
        all_gather_flat(everyone, mine, group=self.process_group)
        return everyone.view(self.size, -1).cpu()

    def copy(self, tensor: Tensor) -> Tensor:
        """Enter a replicated tensor into a sharded computation; its partial gradients are all-reduced in backward."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        key = (id(tensor), version_of(tensor))
        found = self._entered.get(key)
        if found is not None and found[1]() is tensor:
            return found[2]
        entered: Tensor = _Copy.run(tensor, self)
        self._entered[key] = (self._entries, weakref.ref(tensor), entered)
        self._entries += 1
        # Evict by age only. Whether a key recurs after its tensor was freed differs between ranks, but the cache must
        # be the same on all of them: a tensor that one rank enters again causes one more all-reduce in its backward.
        for old in [old for old, (age, *_) in self._entered.items() if age < self._entries - _REMEMBERED]:
            del self._entered[old]
        return entered

    def reduce(self, partial: Tensor) -> Tensor:
        """All-reduce the partial results into a replicated tensor. ``partial`` may be overwritten."""
        result: Tensor = _Reduce.run(partial, self)
        return result

    def scatter(self, tensor: Tensor, layout: Layout) -> Tensor:
        """Return this rank's shard of a replicated tensor."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return layout.take(tensor, self.rank, self.size)
        result: Tensor = _Scatter.run(tensor, layout, self)
        return result

    def gather(self, local: Tensor, layout: Layout) -> Tensor:
        """All-gather the shards into the full tensor."""
        result: Tensor = _Gather.run(local, layout, self)
        return result

    def gather_into_split(self, local: Tensor, layout: Layout) -> Tensor:
        """Like ``copy(gather(local))`` with half the backward traffic: a reduce-scatter instead of an all-reduce."""
        result: Tensor = _GatherCopy.run(local, layout, self)
        return result

    def reduce_into_split(self, partial: Tensor, layout: Layout) -> Tensor:
        """Like ``take(reduce(partial))`` with half the forward traffic: a reduce-scatter."""
        result: Tensor = _ReduceScatter.run(partial, layout, self)
        return result

    def move(self, local: Tensor, source: Layout, target: Layout) -> Tensor:
        """Redistribute a shard from layout ``source`` to ``target``: Ulysses' all-to-all (arXiv 2309.14509)."""
        if source == target:
            return local
        result: Tensor = _Move.run(local, source, target, self)
        return result

    def rows(self, local: Tensor, layout: Layout, wanted: Sequence[tuple[int, int]]) -> Tensor:
        """Return the rows of a sharded tensor that this rank needs, with autograd; see :meth:`fetch_rows`."""
        result: Tensor = _Rows.run(local, layout, tuple(wanted), self)
        return result

    def apply_rowwise(self, run: Callable[..., Tensor], rows: Tensor, of_rows: Tensor) -> Tensor:
        """Apply ``run`` to a tensor whose rows it treats independently.

        Args:
            run: Maps local rows ``[..., columns]`` and one value for each of them ``[...]`` to ``[...]``.
            rows: A tensor sharded along its last dim.
            of_rows: A replicated tensor with one value for each row.
        """
        return run(rows, of_rows)

    def parameter(self, parameter: Tensor, *, hooked: bool | None = None) -> Tensor:
        """Enter a replicated parameter into a sharded computation; its gradients are averaged over ranks later.

        Like :meth:`copy` without communication: each rank's partial gradient is multiplied by the number of ranks, so
        that the mean over ranks, which the data axis takes together with the mean over samples, is their sum. Gradients
        are summed at once if they are returned and not accumulated (``torch.autograd.grad``), or if the parameter has a
        hook that must receive the sum.
        """
        if not (parameter.requires_grad and torch.is_grad_enabled()):
            return parameter
        hooked = bool(gradient_hooks_of(parameter)) if hooked is None else hooked
        result: Tensor = _Parts.run(parameter, self, hooked)
        return result

    def extract_rows(self, local: Tensor) -> Tensor:
        """Enter local rows of a sharded tensor into a computation on plain tensors, ended by :meth:`insert_rows`.

        All gradients inside are multiplied by the number of ranks; :meth:`parameter` does so for each parameter.
        """
        return self._scaled(local, divided=True)

    def insert_rows(self, local: Tensor) -> Tensor:
        """Return rows computed from a tensor that was :meth:`extract_rows` to the sharded computation."""
        return self._scaled(local, divided=False)

    def _scaled(self, local: Tensor, *, divided: bool) -> Tensor:
        if not (local.requires_grad and torch.is_grad_enabled()):
            return local
        result: Tensor = _Scaled.run(local, self, divided)
        return result

    def inside(self, parameter: Tensor) -> Tensor:
        """Enter a replicated parameter into a computation on rows that were :meth:`extract_rows`.

        Rows on other ranks contribute to its gradient. Like :meth:`parameter`, but gradients inside are already
        multiplied by the number of ranks.
        """
        if not (parameter.requires_grad and torch.is_grad_enabled()):
            return parameter
        result: Tensor = _Inside.run(parameter, self, bool(gradient_hooks_of(parameter)))
        return result

    def _count(self, kind: str, tensor: Tensor) -> None:
        self.calls[kind] += 1
        self.bytes[kind] += tensor.numel() * tensor.element_size()


class PlainFunction(torch.autograd.Function):
    """Base of the engine's own autograd functions: bypasses the interception that lets users' functions run on shards.

    Double backward works: the backward of each function is its conjugate, which has a backward as well.
    """

    @classmethod
    def run(cls, *args: Any) -> Any:
        """Like ``apply``, for plain tensors only."""
        return apply_directly(cls, *args)


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
        # In place: operators that end in a sum over ranks do not save their output for backward.
        ctx.mark_dirty(partial)
        return group.all_reduce_(partial)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Copy.run(grads[0], ctx.group) if torch.is_grad_enabled() else grads[0], None


class _Parts(PlainFunction):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, group: TensorGroup, at_once: bool) -> Tensor:
        ctx.group, ctx.at_once = group, at_once
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        group = ctx.group
        if torch.is_grad_enabled():
            return _Reduce.run(grads[0].clone(), group), None, None
        if group.sums_at_once or ctx.at_once:
            return group.all_reduce_(grads[0].clone(memory_format=torch.contiguous_format)), None, None
        return grads[0] * group.size, None, None


class _Scaled(PlainFunction):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, divided: bool) -> Tensor:
        ctx.group, ctx.divided = group, divided
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.group.sums_at_once:
            return grads[0], None, None
        return (grads[0] / ctx.group.size if ctx.divided else grads[0] * ctx.group.size), None, None


class _Inside(PlainFunction):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, group: TensorGroup, hooked: bool) -> Tensor:
        ctx.group, ctx.hooked = group, hooked
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        group = ctx.group
        if not (group.sums_at_once or ctx.hooked):
            return grads[0], None, None
        total = _Reduce.run(grads[0].clone(memory_format=torch.contiguous_format), group)
        return total if group.sums_at_once else total / group.size, None, None


class _Move(PlainFunction):
    @staticmethod
    def forward(ctx: Any, local: Tensor, source: Layout, target: Layout, group: TensorGroup) -> Tensor:
        ctx.source, ctx.target, ctx.group = source, target, group
        return group.move_parts(local.detach(), source, target)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            return _Move.run(grads[0], ctx.target, ctx.source, ctx.group), None, None, None
        return ctx.group.move_parts(grads[0], ctx.target, ctx.source), None, None, None


class _Rows(PlainFunction):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, layout: Layout, wanted: tuple[tuple[int, int], ...], group: TensorGroup
    ) -> Tensor:
        ctx.layout, ctx.wanted, ctx.group = layout, wanted, group
        ctx.like = torch.empty(local.shape, device="meta")
        return group.fetch_rows(local.detach(), layout, wanted)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        given = grads[0], ctx.layout, ctx.wanted, ctx.like
        if torch.is_grad_enabled():
            return _RowsBack.run(*given, ctx.group), None, None, None
        return ctx.group.return_rows(*given), None, None, None


class _RowsBack(PlainFunction):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, layout: Layout, wanted: tuple[tuple[int, int], ...], like: Tensor, group: TensorGroup
    ) -> Tensor:
        ctx.layout, ctx.wanted, ctx.group = layout, wanted, group
        return group.return_rows(rows.detach(), layout, wanted, like)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            return _Rows.run(grads[0], ctx.layout, ctx.wanted, ctx.group), None, None, None, None
        return ctx.group.fetch_rows(grads[0], ctx.layout, ctx.wanted), None, None, None, None


class _Scatter(PlainFunction):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, layout: Layout, group: TensorGroup) -> Tensor:
        ctx.layout, ctx.group = layout, group
        return layout.take(tensor, group.rank, group.size).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            return _Gather.run(grads[0], ctx.layout, ctx.group), None, None
        return ctx.group.assemble(grads[0], ctx.layout), None, None


class _Gather(PlainFunction):
    @staticmethod
    def forward(ctx: Any, local: Tensor, layout: Layout, group: TensorGroup) -> Tensor:
        ctx.layout, ctx.group = layout, group
        return group.assemble(local.detach(), layout)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            return _Scatter.run(grads[0], ctx.layout, ctx.group), None, None
        return ctx.layout.take(grads[0], ctx.group.rank, ctx.group.size), None, None


class _GatherCopy(PlainFunction):
    @staticmethod
    def forward(ctx: Any, local: Tensor, layout: Layout, group: TensorGroup) -> Tensor:
        ctx.layout, ctx.group = layout, group
        return group.assemble(local.detach(), layout)

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
        return ctx.group.assemble(grads[0], ctx.layout), None, None


def _overlap(run: tuple[int, int], wanted: tuple[int, int]) -> tuple[int, int]:
    """Return the first row of the intersection of two runs of rows, and its number of rows."""
    first = max(run[0], wanted[0])
    return first, max(min(run[1], wanted[1]) - first, 0)
