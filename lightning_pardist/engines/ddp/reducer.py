"""Average gradients over the data axis during backward, without a wrapper around the module.

[Note: what may be launched during backward]
Every rank must issue the same collectives in the same order, regardless of its autograd graph. Buckets therefore have a
fixed order, a bucket is launched only after its predecessor, and buckets that are incomplete at the end of backward are
completed with zeros. Unused parameters cost only these zeros: the graph is not traversed, and a parameter that is used
on some ranks only gets the correct gradient.

A leaf's gradient is accumulated once per backward, so its hook marks it as final, with two exceptions: reentrant
activation checkpointing runs nested backwards that each add to it, and user code may call ``backward`` more often than
announced to the reducer. Both run under another autograd graph task than the announced one. Their gradients are not
marked as ready, and are reduced at the end, when they are complete.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_pardist.checkpoint.tensors import Slots, full_slots
from lightning_pardist.compat.autograd import after_backward, current_backward
from lightning_pardist.compat.tensors import accumulation_hooks_of, gradient_hooks_of
from lightning_pardist.engines.common.gradient_math import Counts, sum_of_powers
from lightning_pardist.engines.data_engine import Assigned
from lightning_pardist.engines.ddp.bucket import Bucket, partition
from lightning_pardist.engines.ddp.buffers import average_tensors
from lightning_pardist.engines.ddp.sparse import reduce_sparse, sparse_parameters
from lightning_pardist.engines.ddp.transport import AllReduce, Transport, mean_scales
from lightning_pardist.local_tensors import local_shard

#: Number of steps in which assigned gradients are compared with those of other ranks.
_LOOKS = 5


class GradientReducer:
    """Gradient averaging over the data axis during backward, for parameters that are replicated on every rank.

    Life cycle: construct once the module is on its device; run every backward inside :meth:`backward`, after which
    gradients are averaged over the group, unless it ran under :meth:`no_sync`; call :meth:`detach` at the end.

    With :class:`~lightning_pardist.engines.ddp.transport.AllReduce` it sends ``2 Psi (N-1)/N`` per rank and
    step (Psi parameters, N ranks), the cost of a ring all-reduce.

    Args:
        module: The module whose gradients are reduced; its parameters must be equal on all ranks of the group.
        transport: How buckets are synchronised, and over which group.
        bucket_groups: Bucket group of each parameter, for instance the index of its optimizer. Buckets do not mix
            groups, so that one whose parameters are all frozen (``toggle_optimizer``) sends nothing.
        bucket_size_mb: Size of a bucket in MiB. Larger buckets use the bandwidth better, smaller ones overlap earlier.
        first_bucket_size_mb: Size of the first bucket in MiB.
        overlap: Whether buckets are sent during backward.
        reorder: Whether buckets are rebuilt in the order of the first backward.
        alone: Whether to use buckets even if the group consists of this rank only.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        transport: Transport,
        bucket_groups: Mapping[nn.Parameter, int] | None = None,
        bucket_size_mb: float = 25.0,
        first_bucket_size_mb: float = 1.0,
        overlap: bool = True,
        reorder: bool = True,
        alone: bool = False,
    ) -> None:
        if bucket_size_mb <= 0 or first_bucket_size_mb <= 0:
            raise ValueError(
                f"bucket_size_mb={bucket_size_mb} and first_bucket_size_mb={first_bucket_size_mb} must be positive;"
                " 25 and 1 are good values."
            )
        self.module = module
        self.group = transport.group
        self.bucket_groups = bucket_groups or {}
        self.bucket_size_mb = bucket_size_mb
        self.first_bucket_size_mb = first_bucket_size_mb
        self.transport = transport
        self.overlap = overlap
        self.alone = alone
        self.buckets: list[Bucket] = []
        #: Whether gradients were averaged since the last call of :meth:`step_done`.
        self.is_reduced = False
        #: Gradients that user code had assigned, averaged in this step, and the number of steps that had any.
        self._averaged: dict[nn.Parameter, Tensor] = {}
        self._num_assigned = 0
        self._sync = True
        self._hands_off = False
        self._handles: list[RemovableHandle] = []
        self._sparse = sparse_parameters(module)
        self._slots: dict[Tensor, tuple[Bucket, int]] = {}
        self._root_task: int | None = None
        self._queued: weakref.ref[Callable[[], None]] | None = None
        self._active: list[Bucket] = []
        self._works: list[Any] = []
        self._order: list[Tensor] | None = [] if reorder else None
        if self.enabled:
            self._add_new_parameters()

    @property
    def enabled(self) -> bool:
        """Whether gradients go through buckets: the group has several ranks, or ``alone`` is set."""
        return self.alone or self.group.size() > 1

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(param.grad is not None for param in self.module.parameters())

    @property
    def scales_reduced_gradients(self) -> bool:
        """Whether a factor on all gradients may be applied after the reduction: not with a communication hook."""
        return isinstance(self.transport, AllReduce)

    @property
    def has_gradient_hooks(self) -> bool:
        """Whether any parameter has a hook on its gradient, besides the reducer's own."""
        params = self.module.parameters()
        return any(gradient_hooks_of(p) or len(accumulation_hooks_of(p)) > (p in self._slots) for p in params)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally, without communication; the next :meth:`backward` outside reduces the sum."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @contextmanager
    def backward(self, loss: Tensor, *, overlap: bool = True) -> Iterator[None]:
        """Reduce the gradients of the backward from ``loss`` that runs inside.

        Collective over the group, unless under :meth:`no_sync`.

        Args:
            loss: The tensor that backward starts from.
            overlap: False if user code controls backward, so that buckets must not be sent before its end.
        """
        if not self.enabled:
            yield
            return
        self._add_new_parameters()
        if not self._sync:
            yield
            return
        self._start()
        handle = None
        if self.overlap and overlap and loss.requires_grad:
            handle = loss.register_hook(self._note_root_task)
        try:
            yield
        except BaseException:
            self._abandon()
            raise
        finally:
            self._root_task = None
            if handle is not None:
                handle.remove()
        self.reduce()

    def reduce(self) -> None:
        """Reduce all buckets that were not reduced yet and set the parameters' gradients. Collective over the group.

        Called at the end of :meth:`backward`. Must be called explicitly on a rank whose step had no backward, so that
        it receives the other ranks' gradients and does not block them.
        """
        if not self.enabled:
            return
        if not self._active:
            self._add_new_parameters()
            self._start()
        while len(self._works) < len(self._active):
            self._launch(self._active[len(self._works)])
        for bucket, work in zip(self._active, self._works, strict=True):
            self.transport.finish(bucket, work)
        self.transport.finish_all(self._active)
        for bucket in self._active:
            bucket.release()
        reduce_sparse(self._sparse, group=self.group)
        self.is_reduced = True
        self._abandon()
        if self._order is not None:
            self._rebuild(self._order)

    def average_assigned(self, params: Iterable[nn.Parameter], weight: float) -> Assigned:
        """Average gradients that user code has assigned to parameters, as far as it has not been done in this step.

        Collective over the group if some were, which all ranks must have done. A parameter whose gradient only some
        ranks have set has zeros on the others.

        Args:
            params: Parameters of the next step.
            weight: Weight of this rank's gradients, such as the samples in its batch.
        """
        if not self.enabled:
            return "none"
        self._add_new_parameters()
        known = [(param, *self._slots[param]) for param in params if param in self._slots]
        own = [self._is_assigned(param, bucket, index) for param, bucket, index in known]
        if not any(own):
            return "none"
        device = next(local_shard(param).device for param, _, _ in known)
        message = torch.tensor([weight, *map(float, own)], dtype=torch.float64).to(device)
        dist.all_reduce(message, group=self.group)
        total, *flags = message.tolist()
        scales = mean_scales(self.group, self.transport.narrower)
        by_group: dict[dist.ProcessGroup, list[nn.Parameter]] = {}
        before: dict[nn.Parameter, Tensor] = {}
        for (param, _, _), is_own, flag in zip(known, own, flags, strict=True):
            if not flag:
                continue
            if is_own and param.grad is not None:
                before[param] = param.grad.detach()
            group = self.transport.group_of(param)
            # Without a number of its own (nothing counts on any rank), the gradient is zero.
            factor = weight * self.group.size() / total * (scales[group] * group.size()) if total else 0.0
            # A copy: the tensor may be the user's own.
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad.detach() * factor
            by_group.setdefault(group, []).append(param)
        for group, members in by_group.items():
            average_tensors([param.grad for param in members if param.grad is not None], group=group)
            self._averaged |= {param: param.grad for param in members if param.grad is not None}
        self._num_assigned += 1
        if self._num_assigned > _LOOKS or self.group.size() == 1:
            return "alike"
        pairs = [(local_shard(grad), local_shard(self._averaged[param])) for param, grad in before.items()]
        return "alike" if all(torch.allclose(one, other, rtol=1e-4) for one, other in pairs) else "different"

    def _is_assigned(self, param: nn.Parameter, bucket: Bucket, index: int) -> bool:
        grad = param.grad
        return grad is not None and not bucket.is_in_place(index) and self._averaged.get(param) is not grad

    def step_done(self) -> None:
        """Reset :attr:`is_reduced` after an optimizer step: the next step's gradients are not averaged yet."""
        self.is_reduced = False
        self._averaged.clear()

    @contextmanager
    def defer_reduction(self) -> Iterator[None]:
        """Leave the gradients of backward passes inside in ``.grad``, for a later :meth:`reduce`."""
        before, self._hands_off = self._hands_off, True
        try:
            yield
        finally:
            self._hands_off = before

    def grad_power(
        self, params: Iterable[nn.Parameter], norm_type: float = 2.0, counts: Counts | None = None
    ) -> Tensor:
        """Return the sum of powers of the reduced gradients of some parameters; equal on all ranks of the group.

        Collective over the group if some parameters are not replicated on all of its ranks.
        """
        params = list(params)
        device = next((param.device for param in params if not param.is_meta), torch.device("cpu"))
        held = [param for param in params if counts is None or counts(param)]
        narrower = self.transport.narrower
        total = sum_of_powers(self.local_grads(p for p in held if p not in narrower), norm_type, device=device)
        if not narrower:
            return total
        largest = math.isinf(norm_type)
        for group in dict.fromkeys(narrower.values()):
            own = sum_of_powers(
                self.local_grads(p for p in held if narrower.get(p) is group), norm_type, device=device
            ).to(total.dtype)
            # The gradients are replicated in the narrower group: each of its ranks contributes its share.
            own = own if largest else own / group.size()
            dist.all_reduce(own, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self.group)
            total = torch.maximum(total, own) if largest else total + own
        return total

    def local_grads(self, params: Iterable[nn.Parameter]) -> list[Tensor]:
        """Return this rank's local parts of the gradients of some parameters. Not collective."""
        return [local_shard(param.grad) for param in params if param.grad is not None]

    def zero_grad(self) -> None:
        """Do nothing: gradients are stored in the parameters' ``.grad``."""

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's full state dict; only on the global rank 0 if the optimizer shards its own state."""
        if not hasattr(optimizer, "consolidate_state_dict"):
            return optimizer.state_dict()
        # Such as torch's ZeroRedundancyOptimizer. Collective.
        optimizer.consolidate_state_dict()
        return optimizer.state_dict() if dist.get_rank() == 0 else {}

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a single-process state dict."""
        optimizer.load_state_dict(state)

    def detach(self) -> None:
        """Remove all hooks and drop the buckets. Not collective."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.buckets.clear()
        self._slots.clear()
        self._abandon()

    def slots(self, optimizer: Optimizer) -> Slots:
        """Return the optimizer's slots: it updates the parameters themselves."""
        return full_slots(optimizer)

    def settle(self, optimizer: Optimizer) -> None:
        """Do nothing: optimizer state is not moved."""

    def held_bytes(self) -> int:
        """Return the bytes of gradient buckets on this rank."""
        return sum(bucket.held_bytes() for bucket in self.buckets)

    # --- one backward -------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._active = [bucket for bucket in self.buckets if bucket.requires_grad]
        self._works = []

    def _abandon(self) -> None:
        for bucket in self._active:
            bucket.reset()
        self._active, self._works, self._root_task = [], [], None

    def _note_root_task(self, grad: Tensor) -> None:
        self._root_task = current_backward()

    def _on_grad(self, param: Tensor) -> None:
        bucket, index = self._slots[param]
        if self._hands_off:
            return
        if not self._sync:
            # Move it into the bucket at once, so that accumulation needs no second copy of the gradients.
            bucket.adopt(index, 1.0)
            return
        if self._root_task is None:
            if not self._active and not self._is_queued:
                # loss.backward() without an announcement (manual optimization without manual_backward).
                callback = self._reduce_unannounced
                self._queued = weakref.ref(callback)
                after_backward(callback)
            return
        if current_backward() != self._root_task:
            return
        bucket.adopt(index, self.transport.scale_of(bucket))
        bucket.mark_ready(index)
        if self._order is not None:
            self._order.append(param)
        if bucket.pending == 0:
            while len(self._works) < len(self._active) and self._active[len(self._works)].pending == 0:
                self._launch(self._active[len(self._works)])

    @property
    def _is_queued(self) -> bool:
        """Whether a running backward calls :meth:`_reduce_unannounced` at its end.

        Only that backward holds the callback: if it has failed, the callback is gone.
        """
        return self._queued is not None and self._queued() is not None

    def _reduce_unannounced(self) -> None:
        self._queued = None
        if self._sync:
            self.reduce()

    def _launch(self, bucket: Bucket) -> None:
        bucket.fill(self.transport.scale_of(bucket))
        index = len(self._works)
        self._works.append(self.transport.launch(bucket, index=index, is_last=index == len(self._active) - 1))

    # --- buckets ------------------------------------------------------------------------------------------------

    def _add_new_parameters(self) -> None:
        """Create buckets for parameters that newly require a gradient (unfrozen layers)."""
        sparse = {id(param) for param in self._sparse}
        fresh = [
            param
            for param in self.module.parameters()
            if param.requires_grad and not param.is_meta and param not in self._slots and id(param) not in sparse
        ]
        if fresh:
            # Backward runs roughly in the reverse order of registration.
            self._build(list(reversed(fresh)))
            self._handles.extend(param.register_post_accumulate_grad_hook(self._on_grad) for param in fresh)

    def _build(self, params: Sequence[nn.Parameter]) -> None:
        bucket_groups: dict[Any, list[nn.Parameter]] = {}
        for param in params:
            key = self.bucket_groups.get(param, -1), self.transport.group_of(param)
            bucket_groups.setdefault(key, []).append(param)
        for lane in bucket_groups.values():
            for run in partition(
                lane, bucket_size_mb=self.bucket_size_mb, first_bucket_size_mb=self.first_bucket_size_mb
            ):
                bucket = self.transport.make_bucket(run)
                self.buckets.append(bucket)
                self._slots.update({param: (bucket, index) for index, param in enumerate(run)})

    def _rebuild(self, reached: Sequence[Tensor]) -> None:
        """Rebuild the buckets in the order of the first backward on the first rank. Collective over the group."""
        self._order = None
        current = [param for bucket in self.buckets for param in bucket.params]
        if not current:
            return
        position: dict[Tensor, int] = {param: index for index, param in enumerate(current)}
        first = list(dict.fromkeys(reached))
        seen = set(first)
        wanted = first + [param for param in current if param not in seen]
        message = torch.tensor([position[param] for param in wanted], device=self.buckets[0].buffer.device)
        dist.broadcast(message, group_src=0, group=self.group)
        order = message.tolist()
        if order == list(range(len(current))):
            return
        self.buckets.clear()
        self._build([current[index] for index in order])
        for bucket in self.buckets:
            for index, param in enumerate(bucket.params):
                if param.grad is not None:
                    bucket.adopt(index, 1.0)
